"""Three tenants, an unlisted key and no key on one real server: each finds its own adapters, and no sign of others."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.models import PROMPT
from testbed.server import Server
from tests.e2e.access_table import BLOCKED, observed
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, lora_server
from tests.e2e.standing_still import LONGEST_S, in_state, in_the_midst_of, is_held, seen
from tests.make import adapter_files

POLICY = """
[default]
adapters = ["public/*"]
[tenants.team-a]
keys = ["key-a"]
adapters = ["team-a/*", "shared"]
[tenants.team-b]
keys = ["key-b"]
adapters = ["team-b/*", "shared"]
pushes = ["team-b/pushed*"]
pushes_per_minute = 2
[tenants.trainer]
keys = ["key-p"]
adapters = []
pushes = ["team-p/*"]
[tenants.metered]
keys = ["key-m", "key-n"]
adapters = ["shared"]
tokens_per_minute = 60
[tenants.operators]
keys = ["key-root"]
admin = true
"""
FILES = ("adapter_config.json", "adapter_model.safetensors")
KEYS = ("key-a", "key-b", "key-root", "unlisted")
METERED = ("key-m", "key-n")
TRAINER = "key-p"
# Where each lies, and whose answer it gives.
ADAPTERS = {"team-a/sql": "sql", "team-b/sql": "chat", "team-b/cold": "chat", "shared": "wide", "public/sql": "sql"}
MAY = {
    "key-a": {"team-a/sql", "shared"},
    "key-b": {"team-b/sql", "team-b/cold", "shared"},
    "key-root": set(ADAPTERS),
    "unlisted": {"public/sql"},
}


@dataclass(frozen=True)
class Guarded:
    """A server with a policy, and what its adapters answer."""

    server: Server
    bed: Bed
    client: httpx.Client  # with one connection, and so with one of several API servers

    def ask(self, method: str, path: str, key: str | None, *, headers: Any = None, **more: Any) -> httpx.Response:
        bearer = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.client.request(method, path, headers={**bearer, **(headers or {})}, **more)

    def post(self, path: str, key: str | None, **body: Any) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.server.url}{path}", headers=headers, json=body, timeout=240)

    def listed(self, key: str) -> set[str]:
        headers = {"Authorization": f"Bearer {key}"}
        cards = httpx.get(f"{self.server.url}/v1/models", headers=headers, timeout=240).json()["data"]
        return {card["id"] for card in cards}

    def answer(self, name: str, key: str) -> list[int]:
        client = connect(self.server).with_options(api_key=key)
        return list(complete(client, name, PROMPT, MAX_TOKENS).token_ids)


@pytest.fixture(scope="module")
def guarded(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    home = tmp_path_factory.mktemp("guarded")
    for name, like in ADAPTERS.items():
        shutil.copytree(bed.adapters / like, home / "adapters" / name)
    for name in BLOCKED:
        shutil.copytree(bed.adapters / "sql", home / "adapters" / name)
    (home / "policy.toml").write_text(POLICY)
    with lora_server(
        bed,
        home,
        *(
            "--max-loras",
            "2",
            "--max-cpu-loras",
            "2",
            "--enable-scale-out",
            "--enable-tokenizer-info-endpoint",
            "--api-key",
            *KEYS,
            *METERED,
            TRAINER,
        ),
        plugins=(RESOLVER, MANAGER, KERNELS, ADMIN),
        LORA_PLUGINS_POLICY=str(home / "policy.toml"),
        VLLM_SERVER_DEV_MODE="1",  # /pause and /resume
        VLLM_ENABLE_RESPONSES_API_STORE="1",
    ) as server:
        one = httpx.Limits(max_connections=1)
        with httpx.Client(base_url=server.url, timeout=LONGEST_S, limits=one) as client:
            yield Guarded(server, bed, client)


def test_each_key_gets_right_answers_and_sees_its_adapters_only(guarded: Guarded) -> None:
    for key in KEYS:
        assert guarded.answer(str(guarded.bed.base), key) == guarded.bed.answers[None], key
        for name in sorted(MAY[key]):
            assert guarded.answer(name, key) == guarded.bed.answers[ADAPTERS[name]], (key, name)
    for key in KEYS:  # all are loaded by now
        assert guarded.listed(key) == {str(guarded.bed.base)} | MAY[key], key


def test_invocations_answer_for_the_model_of_the_body(guarded: Guarded) -> None:
    def text(path: str, model: str | None) -> str:
        body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
        named = body if model is None else {**body, "model": model}
        return str(guarded.post(path, "key-root", **named).raise_for_status().json()["choices"][0]["text"])

    base, adapter = (text("/v1/completions", model) for model in (str(guarded.bed.base), "public/sql"))
    assert base != adapter
    assert text("/invocations", "public/sql") == adapter
    assert text("/invocations", str(guarded.bed.base)) == text("/invocations", None) == base
    assert guarded.post("/invocations", "key-root", model="unknown", prompt=PROMPT, max_tokens=1).status_code == 404


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/tokenize": {"prompt": PROMPT},
    "/invocations": {"prompt": PROMPT, "max_tokens": 1},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_forbidden_adapter_looks_like_none(guarded: Guarded, path: str) -> None:
    """Loaded, not loaded, or missing: status, text and headers are those of an unknown name in the tenant's folder."""
    assert guarded.answer("team-b/sql", "key-b")

    def seen(name: str, stream: bool) -> tuple[int, str, dict[str, str]]:
        answer = guarded.post(path, "key-a", model=name, stream=stream, **ROUTES[path])
        headers = {key: value for key, value in answer.headers.items() if key not in {"date", "content-length"}}
        return answer.status_code, answer.text.replace(name, "<name>"), headers

    for stream in (False, True):
        unknown = seen("team-a/nobody", stream)
        assert unknown[0] == 404, unknown
        assert "<name>" in unknown[1]
        for name in ("team-b/sql", "team-b/cold", "team-b/nobody", "public/sql", "nobody"):
            assert seen(name, stream) == unknown, (name, stream)
    assert guarded.answer("team-b/sql", "key-b") == guarded.bed.answers["chat"], "it is there all the same"


def test_a_key_pushes_its_own_names_at_its_own_rate(guarded: Guarded) -> None:
    directory = guarded.bed.adapters / "wide"
    files = {file: (file, (directory / file).read_bytes()) for file in FILES}

    def put(name: str, key: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.put(f"{guarded.server.url}/v1/loras/{name}", files=files, headers=headers, timeout=LONGEST_S)

    assert put("team-b/pushed", "key-b").status_code == 200
    assert guarded.answer("team-b/pushed", "key-b") == guarded.bed.answers["wide"]
    for name, key in (("team-b/sql", "key-b"), ("shared", "key-b"), ("team-b/pushed", "key-a")):
        assert put(name, key).status_code == 403
    assert put("team-b/pushed-2", "key-b").status_code == 200
    assert put("team-c/pushed-3", "key-root").status_code == 200
    misspelt = [guarded.ask("GET", "/v1/loras/team-b/pushed-3", key) for key in ("key-b", "key-root")]
    assert [answer.status_code for answer in misspelt] == [404, 404]
    assert ["'team-b/pushed-2'" in answer.text for answer in misspelt] == [True, True]
    assert ["team-c" in answer.text for answer in misspelt] == [False, True], "a pusher meets names of its own"
    assert guarded.ask("DELETE", "/v1/loras/team-c/pushed-3", "key-root").status_code == 200
    refused = put("team-b/pushed", "key-b")
    assert (refused.status_code, "[L001]" in refused.text, "retry-after" in refused.headers) == (503, True, True)
    for name in ("team-b/pushed", "team-b/pushed-2"):
        gone = httpx.delete(
            f"{guarded.server.url}/v1/loras/{name}", headers={"Authorization": "Bearer key-b"}, timeout=LONGEST_S
        )
        assert gone.status_code == 200


def test_a_pusher_sees_no_path_of_the_server(guarded: Guarded) -> None:
    """Of an adapter for another model, whose error names the directory of the base model."""
    files = {file: (file, content) for file, content in adapter_files().items()}
    answers = [guarded.ask("PUT", "/v1/loras/team-p/new", key, files=files) for key in (TRAINER, "key-root")]
    assert [answer.status_code for answer in answers] == [400, 400]
    errors = [answer.json()["error"] for answer in answers]
    assert [error["lora_plugins"]["code"] for error in errors] == ["L003", "L003"]
    assert [str(guarded.bed.base) in error["message"] for error in errors] == [False, True]
    assert "served is '<path>'" in errors[0]["message"]
    assert str(guarded.bed.base.parent) not in answers[0].text


def test_a_tenants_keys_share_their_tokens_of_a_minute(guarded: Guarded) -> None:
    """Answers are let in while a token is left, streamed or whole, of adapters and the base model; then 429."""
    body = {"prompt": PROMPT, "max_tokens": 9, "ignore_eos": True}
    base = guarded.ask("GET", "/v1/models", "key-m").json()["data"][0]["id"]
    asked = itertools.cycle(itertools.product(METERED, ("shared", base), (False, True)))
    used, began = 0, time.monotonic()
    for key, name, streamed in itertools.islice(asked, 40):
        more = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        answer = guarded.ask("POST", "/v1/completions", key, json={"model": name, **body, **more})
        if answer.status_code != 200:
            break
        assert used < 100 + time.monotonic() - began, "a token was left: 60, and one for each second since"
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith('data: {"')]
        usage = httpx.Response(200, text=lines[-1] if streamed else answer.text).json()["usage"]
        used += usage["total_tokens"]
    assert (answer.status_code, used >= 60) == (429, True), answer.text
    assert answer.json()["error"]["message"].startswith("[L013]")
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    assert guarded.ask("GET", "/v1/models", "key-n").status_code == 200
    assert guarded.post("/v1/completions", "key-a", model="shared", **body).status_code == 200


def test_only_administrators_load_and_unload(guarded: Guarded) -> None:
    guarded.answer("team-a/sql", "key-root")
    for route in ("load_lora_adapter", "unload_lora_adapter"):
        refused = guarded.post(f"/v1/{route}", "key-a", lora_name="team-a/sql", lora_path="/x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, 403)
    assert "team-a/sql" in guarded.listed("key-a")
    path = str(guarded.bed.adapters / "sql")
    assert guarded.post("/v1/load_lora_adapter", "key-root", lora_name="team-a/new", lora_path=path).status_code == 200
    assert guarded.answer("team-a/new", "key-a") == guarded.bed.answers["sql"]
    assert guarded.post("/v1/unload_lora_adapter", "key-root", lora_name="team-a/new").status_code == 200


def test_a_tenant_over_its_share_waits_for_itself(guarded: Guarded) -> None:
    """Of two places in host memory each may use one: no request for its second adapter comes to the engine."""

    async def ask(client: httpx.AsyncClient, name: str, key: str, tokens: int = MAX_TOKENS) -> list[int]:
        body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
        answer = await client.post(
            "/v1/completions", json={**body, "ignore_eos": True}, headers={"Authorization": f"Bearer {key}"}
        )
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    async def run() -> dict[str, list[int]]:
        headers = {"Authorization": "Bearer key-root"}
        async with httpx.AsyncClient(base_url=guarded.server.url, timeout=LONGEST_S, headers=headers) as client:

            async def begin() -> asyncio.Task[list[int]]:
                long = asyncio.create_task(ask(client, "team-a/sql", "key-a", 200))

                async def is_in_the_engine() -> bool:
                    return long.done() or await in_state(client, "team-a/sql", "serving", 1)

                await seen(is_in_the_engine)
                return long

            async with in_the_midst_of(client, "team-a/sql", begin) as long:
                async with asyncio.timeout(10):
                    unknown = await client.post(
                        "/v1/completions",
                        json={"model": "team-a/none", "prompt": PROMPT},
                        headers={"Authorization": "Bearer key-a"},
                    )
                assert unknown.status_code == 404, "a name that does not exist takes nothing of a share"
                # They come first, to whichever API servers there are.
                own = asyncio.gather(*(ask(client, "shared", "key-a") for _ in range(8)))
                await asyncio.sleep(0.2)
                others = asyncio.create_task(ask(client, "team-b/sql", "key-b"))
                await seen(lambda: is_held(client, "team-b/sql"))
                assert not await is_held(client, "shared")
                assert not own.done()
                without_share = asyncio.create_task(ask(client, "shared", "key-root"))
                await seen(lambda: is_held(client, "shared"))
            shared = (await own)[-1]
            return {"shared": shared, "team-b/sql": await others, "root": await without_share, "long": await long}

    for name in sorted(MAY["key-a"] | MAY["key-b"]):
        guarded.answer(name, "key-root")
    answers, right = asyncio.run(run()), guarded.bed.answers
    assert answers["shared"] == answers["root"] == right[ADAPTERS["shared"]]
    assert answers["team-b/sql"] == right[ADAPTERS["team-b/sql"]]
    assert answers["long"][:MAX_TOKENS] == right[ADAPTERS["team-a/sql"]]


def test_who_reaches_what_is_the_table_of_the_docs(guarded: Guarded) -> None:
    for name in BLOCKED:
        assert guarded.ask("DELETE", f"/v1/loras/{name}?block=true", "key-root").status_code == 200
    guarded.answer("team-b/sql", "key-b")
    table = observed(guarded.ask, guarded.ask("GET", "/v1/loras/team-b/sql", "key-root").json()["digest"])
    page = Path(__file__).parents[2] / "docs/guides/access.md"
    assert table in page.read_text(), f"{page.name} has another table; this one was seen:\n{table}"


def test_a_stored_response_is_its_keys_alone(guarded: Guarded) -> None:
    """Ids are the callers' own choice, so that others may guess them, or take them."""

    def ask(key: str, text: str, **more: Any) -> httpx.Response:
        body = {"model": "shared", "input": text, "max_output_tokens": 1, **more}
        return guarded.ask("POST", "/v1/responses", key, json=body)

    def read(key: str) -> httpx.Response:
        return guarded.ask("GET", "/v1/responses/resp_job-1", key)

    first = ask("key-a", "x", request_id="resp_job-1").raise_for_status().json()
    assert read("key-a").json() == first
    assert [read(key).status_code for key in KEYS] == [200, 404, 404, 404]
    assert ask("key-b", "x", previous_response_id="resp_job-1").status_code == 404
    assert guarded.ask("POST", "/v1/responses/resp_job-1/cancel", "key-b").status_code == 404
    ask("key-b", "another", request_id="resp_job-1", max_output_tokens=2).raise_for_status()
    assert read("key-a").json() == first
    assert ask("key-a", "x", previous_response_id="resp_job-1").status_code == 200


def test_the_log_names_tenants_and_no_key(guarded: Guarded) -> None:
    log = guarded.server.log()
    assert "Access policy: 6 keys of team-a, team-b, trainer, metered, operators" in log
    ours = [line for line in log.splitlines() if "lora_plugins" in line or "ccess" in line]
    assert not [line for line in ours if any(key in line for key in (*KEYS, *METERED, TRAINER))]
