"""vLLM's own serving and response classes, which say the digest of the version that a request is given."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.testclient import TestClient
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.entrypoints.serve.instrumentator import metrics
from vllm.lora.request import LoRARequest

from lora_plugins.api.access.policy import Policy
from lora_plugins.process import Process
from lora_plugins.server.response_digest import HEADER, SayDigest
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches.api_server import access, response_digest

OLD, NEW = "a1" * 32, "b2" * 32
CLASSES = (
    chat.ChatCompletionResponse,
    chat.ChatCompletionStreamResponse,
    completion.CompletionResponse,
    completion.CompletionStreamResponse,
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch, store: Path) -> Iterator[Process]:
    """vLLM's classes with the patch, and afterwards as they were."""
    process = Process(Settings(store_dir=store))
    # As vLLM has them: other tests of this process may have registered a resolver, which patches them too.
    monkeypatch.setattr(BaseServing, "_maybe_get_adapters", inspect.unwrap(BaseServing._maybe_get_adapters))
    monkeypatch.setattr(metrics, "attach_router", inspect.unwrap(metrics.attach_router))
    with pytest.MonkeyPatch.context() as patching:
        inherited = [one for one in CLASSES if "__init__" not in vars(one)]
        for one in set(CLASSES) - set(inherited):
            patching.setattr(one, "__init__", inspect.unwrap(one.__init__))
        response_digest.patch(process)
        yield process
        for one in inherited:
            del one.__init__


class Models:
    """What `BaseServing` asks of vLLM's table of names."""

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


def whole(fingerprint: str | None = None) -> list[Any]:
    """The responses of the other kinds, as vLLM makes them."""
    common: dict[str, Any] = {"choices": [], "model": "m", "usage": UsageInfo(), "system_fingerprint": fingerprint}
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

    app.add_middleware(SayDigest)
    return TestClient(app)


def fingerprints(text: str) -> list[str | None]:
    return [json.loads(line).get("system_fingerprint") for line in text.splitlines()]


def test_a_version_of_the_store_is_said(store: Path) -> None:
    seen = client_of(serving(None, sql=f"{store}/{OLD}")).post("/", json={"model": "sql"})
    assert seen.headers[HEADER] == OLD
    assert fingerprints(seen.text) == [OLD] * 6


def test_vllms_own_fingerprint_stays(store: Path) -> None:
    seen = client_of(serving("vllm-1", sql=f"{store}/{OLD}")).post("/", json={"model": "sql"})
    assert seen.headers[HEADER] == OLD
    assert fingerprints(seen.text) == [None, None, *["vllm-1"] * 4]


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


def test_a_serving_class_without_fingerprint_is_left_alone(store: Path) -> None:
    one = BaseServing(Models(sql=f"{store}/{OLD}"), SimpleNamespace())  # type: ignore[arg-type]
    app = FastAPI()

    @app.post("/")
    async def answer(body: dict[str, Any]) -> Any:
        one._maybe_get_adapters(SimpleNamespace(**body))
        return json.loads(chunk())

    app.add_middleware(SayDigest)
    seen = TestClient(app).post("/", json={"model": "sql"})
    assert (seen.headers[HEADER], "system_fingerprint" in seen.json()) == (OLD, False)


def test_outside_of_a_request_a_response_is_vllms_own() -> None:
    assert "system_fingerprint" not in json.loads(chunk())
    assert [response.system_fingerprint for response in whole()] == [None] * 3


def test_an_adapter_that_policy_withholds_is_not_said(
    patched: Process, store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A default adapter for images, which the key may not use: the base model answers."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[default]\nadapters = ["public/*"]\n')
    monkeypatch.setattr(access, "this_process", lambda: SimpleNamespace(policy=Policy.read(policy)))
    one = serving(None, image=f"{store}/{OLD}")
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    body = {"model": "base", "messages": [message]}
    assert client_of(one).post("/", json=body).headers[HEADER] == OLD
    monkeypatch.setattr(BaseServing, "_maybe_get_adapters", access._getting(BaseServing._maybe_get_adapters))
    assert HEADER not in client_of(one).post("/", json=body).headers


def test_vllms_metrics_router_brings_the_middleware() -> None:
    app = FastAPI()
    metrics.attach_router(app)
    assert [one.cls for one in app.user_middleware].count(SayDigest) == 1
