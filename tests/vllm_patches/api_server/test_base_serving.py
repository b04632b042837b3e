"""vLLM's own serving and response classes, which say the digest of the version that a request is given."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, UploadFile
from fastapi.responses import StreamingResponse
from starlette.testclient import TestClient
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMClientError, VLLMNotFoundError
from vllm.lora.request import LoRARequest

from lora_plugins.api.access.policy import Policy
from lora_plugins.lifecycle.response import HEADER, AnswerForAdapters, Response
from lora_plugins.process import Process
from lora_plugins.settings import Settings
from lora_plugins.store.blocked_names import Blocks
from lora_plugins.store.layout import Layout
from lora_plugins.vllm_patches.api_server import base_serving

OLD, NEW = "a1" * 32, "b2" * 32


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def patched(process: Process, store: Path) -> Process:
    process.settings = Settings(store_dir=store)
    base_serving.patch()
    return process


class Models:
    """What `BaseServing` asks of vLLM's table of names."""

    engine_client: Any = None

    def __init__(self, **paths: str) -> None:
        self.lora_requests = {name: LoRARequest(name, i, path) for i, (name, path) in enumerate(paths.items(), 1)}

    def is_base_model(self, name: str) -> bool:
        return name == "base"


def serving(fingerprint: str | None = "vllm-1", **paths: str) -> BaseServing:
    made = BaseServing(Models(**paths), SimpleNamespace())  # type: ignore[arg-type]
    made.system_fingerprint = fingerprint  # type: ignore[attr-defined] - as `GenerateBaseServing` has it
    return made


def chunk(fingerprint: str | None = None, reason: str | None = None) -> str:
    """As vLLM writes one of a chat's stream: what it has not set is left out."""
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": reason}
    made = chat.ChatCompletionStreamResponse(id="1", created=0, choices=[choice], model="m")
    if fingerprint is not None:
        made.system_fingerprint = fingerprint
    return made.model_dump_json(exclude_unset=True)


def whole(fingerprint: str | None = None, **more: Any) -> list[Any]:
    """The responses of the other kinds, as vLLM makes them."""
    common: dict[str, Any] = {"choices": [], "model": "m", "usage": UsageInfo(), "system_fingerprint": fingerprint}
    common |= more
    return [
        chat.ChatCompletionResponse(**common),
        completion.CompletionResponse(**common),
        completion.CompletionStreamResponse(**common),
    ]


def client_of(one: BaseServing, *, swap: dict[str, str] | None = None) -> TestClient:
    """A server that picks an adapter as vLLM's routes do, and answers with three chunks; `swap` comes in between."""
    app = FastAPI()

    @app.post("/")
    async def answer(body: dict[str, Any]) -> Any:
        one._maybe_get_adapters(SimpleNamespace(**body), supports_default_mm_loras=True)
        if swap:
            one.models = Models(**swap)  # type: ignore[assignment]

        async def chunks() -> Any:
            for number in range(3):
                yield chunk(one.system_fingerprint if number == 2 else None) + "\n"
                await asyncio.sleep(0)
            for response in whole(one.system_fingerprint):
                yield response.model_dump_json(exclude_none=True) + "\n"

        return StreamingResponse(chunks())

    app.add_middleware(AnswerForAdapters, answer=None)
    return TestClient(app)


def fingerprints(text: str) -> list[str | None]:
    return [json.loads(line).get("system_fingerprint") for line in text.splitlines()]


@pytest.mark.parametrize(
    ("fingerprint", "said"), [(None, [OLD] * 6), ("vllm-1", [None, None, *["vllm-1"] * 4])], ids=["ours", "vLLM's"]
)
def test_a_version_is_said_where_vllm_says_no_fingerprint(store: Path, fingerprint: Any, said: list[Any]) -> None:
    seen = client_of(serving(fingerprint, sql=f"{store}/{OLD}")).post("/", json={"model": "sql"})
    assert seen.headers[HEADER] == OLD
    assert fingerprints(seen.text) == said


def test_each_chunk_says_its_versions_after_a_move(response: Response) -> None:
    before = json.loads(chunk())
    response.spans = [(OLD, 0), (NEW, 3)]
    after = [json.loads(chunk()), *(json.loads(one.model_dump_json(exclude_none=True)) for one in whole())]
    assert "kv_transfer_params" not in before
    assert [one["kv_transfer_params"] for one in after] == [{"lora_versions": [[OLD, 0], [NEW, 3]]}] * 4


def test_what_a_connector_says_goes_on_to_another_engine_alone(response: Response) -> None:
    """A proxy puts the `kv_transfer_params` of a prefill's answer into the request to the engine that decodes."""
    params = {"do_remote_prefill": True, "remote_block_ids": [1, 2]}
    response.spans = [(OLD, 0), (NEW, 3)]
    made = whole(kv_transfer_params=params | {"lora_versions": response.spans})[:2]
    assert [one.kv_transfer_params for one in made] == [params, params]


def test_a_swap_after_the_pick_changes_nothing(store: Path) -> None:
    one = serving(None, sql=f"{store}/{OLD}")
    client = client_of(one, swap={"sql": f"{store}/{NEW}"})
    first, second = (client.post("/", json={"model": "sql"}) for _ in range(2))
    assert (first.headers[HEADER], set(fingerprints(first.text))) == (OLD, {OLD})
    assert (second.headers[HEADER], set(fingerprints(second.text))) == (NEW, {NEW})


@pytest.mark.parametrize("model", ["base", "by-path", "elsewhere"])
def test_the_base_model_and_unknown_versions_say_nothing(store: Path, model: str) -> None:
    one = serving(None, **{"by-path": "/adapters/sql", "elsewhere": f"/adapters/{OLD}", "sql": f"{store}/{OLD}"})
    seen = client_of(one).post("/", json={"model": model})
    assert (HEADER in seen.headers, set(fingerprints(seen.text))) == (False, {None})


def test_a_serving_class_without_fingerprint_is_left_alone(store: Path, response: Response) -> None:
    one = BaseServing(Models(sql=f"{store}/{OLD}"), SimpleNamespace())  # type: ignore[arg-type]
    one._maybe_get_adapters(SimpleNamespace(model="sql"))
    assert (response.digest, "system_fingerprint" in json.loads(chunk())) == (OLD, False)


def test_outside_of_a_request_a_response_is_vllms_own() -> None:
    assert "system_fingerprint" not in json.loads(chunk())
    assert [response.system_fingerprint for response in whole()] == [None] * 3


def test_an_adapter_that_policy_withholds_is_not_said(patched: Process, store: Path, tmp_path: Path) -> None:
    """A default adapter for images, which the key may not use: the base model answers."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[default]\nadapters = ["public/*"]\n')
    one = serving(None, image=f"{store}/{OLD}")
    declared = SimpleNamespace(default_mm_loras={"image": "/adapters/image"})
    one.models.engine_client = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=declared))
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    body = {"model": "base", "messages": [message]}
    assert client_of(one).post("/", json=body).headers[HEADER] == OLD
    patched.policy = Policy.read(policy)
    assert HEADER not in client_of(one).post("/", json=body).headers


# --- fields of other servers ---

REQUEST = {"lora_name": "sql", "lora_int_id": 1, "lora_path": "/adapters/sql"}
FIELDS: list[tuple[str, Any]] = [
    *((name, "sql") for name in ("lora_adapter", "adapter_id", "lora_path", "lora_name", "adapter_name", "adapter")),
    *((name, "sql") for name in ("lora", "lora_id", "loraName", "adapter_path")),
    *((name, REQUEST) for name in ("lora_request", "lora", "adapter")),
    *((name, [value]) for name in ("adapters", "loras", "adapter_ids") for value in ("sql", {"name": "sql"})),
    *((f"{holder}.adapter_id", "sql") for holder in ("parameters", "extra_body", "nvext")),
]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_an_adapter_beside_the_bases_name_is_refused(field: str, value: Any) -> None:
    holder, _, name = field.rpartition(".")
    held = {name: value}
    request = completion.CompletionRequest(model="base", prompt="x", **({holder: held} if holder else held))
    said = f'"{field}": {json.dumps(value)}'.replace("/adapters/sql", "<path>")
    with pytest.raises(VLLMClientError) as refused:
        serving(sql="/adapters/sql")._maybe_get_adapters(request)
    for text in ("L003", said, 'send "model": "sql"', "LORA_PLUGINS_ADAPTER_FIELDS=ignore"):
        assert text in str(refused.value)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"lora_int_id": 1}, r'"lora_int_id": 1.*send the adapter.s name as the "model"'),
        ({"adapter": UploadFile(BytesIO(b"x"), filename="sql")}, r'"adapter": "UploadFile'),  # of a form
    ],
    ids=["a number", "a file"],
)
def test_a_number_or_a_file_is_no_name_to_send(field: dict[str, Any], says: str) -> None:
    request = completion.CompletionRequest(model="base", prompt="x", **field)
    with pytest.raises(VLLMClientError, match=says):
        serving()._maybe_get_adapters(request)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"adapter_id": "sql"}, "adapter": "sql"}}


@pytest.mark.parametrize(
    "body",
    [
        {"adapter": "", "lora": None, "adapters": [], "lora_request": {}, "lora_id": 0, "parameters": {"lora": False}},
        {"adapter_name": "base", "extra_body": {"lora_name": "base"}},
        {"tools": [TOOL]},
        {"metadata": {"adapter": "sql"}, "chat_template_kwargs": {"adapter": "sql"}, "vllm_xargs": {"adapter": "sql"}},
        {"parameters": "adapter", "extra_body": ["adapter"], "lora_scale": 0.5, "adapters_seen": 3},
    ],
    ids=["empty", "the base model's name", "tools", "vLLM's own fields", "others"],
)
def test_fields_that_name_no_adapter_are_answered(body: dict[str, Any]) -> None:
    request = chat.ChatCompletionRequest(model="base", messages=[{"role": "user", "content": "x"}], **body)
    assert serving(sql="/adapters/sql")._maybe_get_adapters(request) is None


def test_fields_are_ignored_beside_an_adapter_and_by_setting(patched: Process) -> None:
    one, more = serving(sql="/adapters/sql"), {"lora": "chat", "nvext": {"lora": "chat"}}
    picked = one._maybe_get_adapters(completion.CompletionRequest(model="sql", prompt="x", **more))
    assert picked is not None
    assert picked.lora_name == "sql"
    patched.settings = Settings(store_dir=patched.settings.store_dir, adapter_fields="ignore")
    assert one._maybe_get_adapters(completion.CompletionRequest(model="base", prompt="x", **more)) is None


# --- streams ---


@pytest.mark.parametrize(
    ("adapter", "more", "held"),
    [
        ("sql", {"stream": True}, True),
        ("sql", {"stream": False}, False),
        ("sql", {}, False),
        ("base", {"stream": True}, False),
    ],
)
def test_only_a_stream_for_an_adapter_is_held_back(
    patched: Process, response: Response, adapter: str, more: Any, held: bool
) -> None:
    patched.is_manager_patched = True
    found = serving(sql="/adapters/sql")._maybe_get_adapters(SimpleNamespace(model=adapter, **more))
    assert (found is None, response.is_held) == (adapter == "base", held)


def block(store: Path, name: str) -> None:
    """As another server of the store does."""
    layout = Layout(store)
    layout.create()
    other = Blocks(layout)
    other.hold(name)
    other.write(name)


def test_without_a_request_an_unknown_name_is_vllms_error(patched: Process) -> None:
    """A framework that calls vLLM's method by itself, outside of an event loop too."""
    patched.is_manager_patched = True
    one = serving(sql="/adapters/sql")
    one.models.engine_client = SimpleNamespace(vllm_config=SimpleNamespace(lora_config="on"))
    with pytest.raises(VLLMNotFoundError, match="`sqk` does not exist"):
        one._maybe_get_adapters(SimpleNamespace(model="sqk"))


@pytest.mark.parametrize("unloads", [1, 2])
def test_a_name_unloaded_while_vllm_resolves_is_resolved_again(unloads: int) -> None:
    """An unload that waits for the name's lock takes the name before the request goes on."""
    models, looks = Models(), list[str]()

    async def resolves(serving: Any, request: Any) -> None:
        looks.append(request.model)
        if len(looks) > unloads:
            serving.models.lora_requests[request.model] = LoRARequest(request.model, 1, "/store/sql")

    serving = SimpleNamespace(models=models, _is_model_supported=models.is_base_model)
    check = base_serving._check_model(resolves, serving, SimpleNamespace(model="sql"))
    if unloads == 1:
        assert asyncio.run(check) is None
    else:
        with pytest.raises(VLLMNotFoundError, match="does not exist"):
            asyncio.run(check)
    assert looks == ["sql"] * 2


@pytest.mark.parametrize(("is_blocked", "status"), [(False, 503), (True, 404)])
@pytest.mark.usefixtures("response")
@pytest.mark.parametrize("may_use", [True, False])
def test_a_name_unloaded_after_its_check_is_refused(
    patched: Process, monkeypatch: pytest.MonkeyPatch, store: Path, is_blocked: bool, status: int, may_use: bool
) -> None:
    """vLLM looks a name up twice; one that an unload takes in between is no name that does not exist."""
    patched.is_manager_patched = True
    if is_blocked:
        block(store, "sql")
    monkeypatch.setattr(base_serving, "may_use", lambda _: may_use)
    one = serving()
    one.models.engine_client = SimpleNamespace(vllm_config=SimpleNamespace(lora_config="on"))
    with pytest.raises((HTTPException, VLLMNotFoundError), match=r"L001|L002") as refused:
        one._maybe_get_adapters(SimpleNamespace(model="sql", stream=True))
    assert getattr(refused.value, "status_code", 404) == (status if may_use else 503), "what is blocked is not said"
    one.models.engine_client = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=None))
    with pytest.raises(VLLMNotFoundError, match="does not exist"):
        one._maybe_get_adapters(SimpleNamespace(model="sql", stream=True))


@pytest.mark.parametrize("may_use", [True, False])
def test_a_blocked_name_of_vllms_table_is_refused(
    patched: Process, monkeypatch: pytest.MonkeyPatch, store: Path, may_use: bool
) -> None:
    """Another server of the store has blocked it, or its unload waits for the name's lock."""
    block(store, "sql")
    monkeypatch.setattr(base_serving, "may_use", lambda _: may_use)
    one = serving(**{"sql": "/adapters/sql", "sql@main": "/adapters/sql", "chat": "/adapters/chat"})
    for name in ("sql", "sql@main"):
        asked = SimpleNamespace(model=name)
        said = r"L002.*blocked" if may_use else "does not exist"  # what is blocked is not said
        with pytest.raises((HTTPException, VLLMNotFoundError), match=said):
            one._maybe_get_adapters(asked)
    monkeypatch.setattr(base_serving, "may_use", lambda _: True)
    assert one._maybe_get_adapters(SimpleNamespace(model="chat")) is not None


def pooling(models: Models) -> PoolingBaseServing:
    """vLLM's class of every pooling route, without an engine."""
    abstract = dict.fromkeys(("__init__", *PoolingBaseServing.__abstractmethods__), lambda *_: None)
    made: Any = type("Pooling", (PoolingBaseServing,), abstract)()
    made.models, made.request_logger, made.trust_request_mm_kwargs, made.request_id_prefix = models, None, False, "pool"
    return made  # type: ignore[no-any-return]


@pytest.mark.usefixtures("response")
def test_pooling_answers_404_for_a_name_nobody_has(patched: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pooling's check lets every name pass, so one that was never there must not look like one that was unloaded."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    patched.is_manager_patched = True
    models: Any = Models(sql="/adapters/sql")
    models.engine_client = SimpleNamespace(vllm_config=SimpleNamespace(lora_config="on"))
    models.base_model_paths, models.model_name = [], lambda adapter: adapter and adapter.lora_name
    known = dict(models.lora_requests)

    async def resolve_lora(name: str) -> Any:
        if name != "unloaded":
            return create_error_response("none", "NotFoundError", HTTPStatus.NOT_FOUND)
        models.lora_requests[name] = LoRARequest(name, 9, "/adapters/unloaded")
        return models.lora_requests[name]

    def unload(_: Any) -> None:
        models.lora_requests = known

    models.resolve_lora = resolve_lora
    io_processor: Any = SimpleNamespace(create_pooling_params=unload)

    def asked(name: str) -> Any:
        request: Any = SimpleNamespace(model=name, mm_processor_kwargs=None, media_io_kwargs=None, request_id=None)
        return asyncio.run(pooling(models)._init_ctx(io_processor, request))

    with pytest.raises(VLLMNotFoundError, match="`sqk` does not exist"):
        asked("sqk")
    with pytest.raises(HTTPException) as refused:
        asked("unloaded")
    assert refused.value.status_code == 503
    assert asked("sql").lora_request.lora_name == "sql"
