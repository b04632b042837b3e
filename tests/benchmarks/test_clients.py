"""What the run of others' programs calls an adapter's own answer; and the page names the versions that run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks.clients.judged import fault_of, faults_of, prompt_of, text_of
from benchmarks.clients.table import PROGRAMS
from benchmarks.recorder import Call, Recorder

SQL, CHAT = Path("/adapters/sql"), Path("/adapters/chat")
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "clients.md"


class Reference:
    """Adapters that answer with their own name's letters; a prompt is its letters."""

    tokenizer = SimpleNamespace(
        eos_token_id=1, decode=lambda ids, skip_special_tokens: "".join(map(chr, ids)).replace("\x01", "")
    )

    def prompt_ids(self, prompt: str) -> list[int]:
        return [*map(ord, prompt)]

    def chat_ids(self, messages: Any) -> list[int]:
        return self.prompt_ids("".join(f"{it['role'][0]}:{it['content']};" for it in messages))

    def generate(self, adapter: Path, prompt: Any, count: int, ends: Any = ()) -> list[int]:
        return [*map(ord, adapter.name * 8)][:count]


def call(model: str, text: str, *, status: int = 200, digest: str = "", **body: Any) -> Call:
    answer = json.dumps({"choices": [{"text": text}]}) if status == 200 else text
    body = {"model": model, "prompt": "x", **body}
    return Call("/v1/completions", body, status=status, digest=digest or f"d-{model}", answer=answer)


def streamed(*events: Any) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@pytest.mark.parametrize(
    "answer",
    [
        json.dumps({"choices": [{"text": "ahoy"}]}),
        json.dumps({"choices": [{"message": {"content": "ahoy"}}]}),
        json.dumps({"content": [{"type": "text", "text": "ahoy"}]}),
        json.dumps({"output": [{"type": "reasoning"}, {"type": "message", "content": [{"text": "ahoy"}]}]}),
        streamed({"choices": [{"text": "ah"}]}, {"choices": [{"text": "oy"}]}, {"choices": [], "usage": {}}),
        streamed({"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "ahoy"}}]}),
        streamed({"type": "content_block_delta", "delta": {"text": "ahoy"}}, {"type": "message_stop"}),
        streamed({"type": "response.output_text.delta", "delta": "ahoy"}, {"type": "response.completed"}),
    ],
)
def test_the_text_of_every_route_is_read(answer: str) -> None:
    assert text_of(answer) == "ahoy"


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": "hi"}, "hi"),
        ({"prompt": ["hi"]}, "hi"),
        ({"prompt": [104, 105]}, "hi"),
        ({"prompt": [[104, 105]]}, "hi"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "u:hi;"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "system": "s"}, "s:s;u:hi;"),
        ({"input": "hi", "instructions": "s"}, "s:s;u:hi;"),
    ],
)
def test_the_prompt_of_every_route_is_read(body: dict[str, Any], prompt: str) -> None:
    asked = Call("", body)
    assert prompt_of(asked, Reference()) == [*map(ord, prompt)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        (call("a", "sqlsq", max_tokens=5), None),
        (call("a", "sqlsqlsqlsql", max_tokens=12), None),
        (call("a", "sqlsqlsqlsql"), None),
        (call("a", "sqlsq\N{REPLACEMENT CHARACTER}", max_tokens=5), None),
        (call("a", "sqlsqlsql", max_tokens=5), "of nobody"),
        (call("a", "chatc", max_tokens=5), "of chat"),
        (call("a", "", max_tokens=5), "of nobody"),
        (call("a", "no such model", status=404), "404: no such model"),
    ],
)
def test_an_answer_is_its_adapters_or_a_fault(asked: Call, fault: str | None) -> None:
    found = fault_of(asked, SQL, Reference(), [CHAT])  # type: ignore[arg-type]
    assert found is None if fault is None else found is not None and fault in found


def test_each_name_is_asked_for_and_has_its_digest() -> None:
    adapters, digests = {"a": SQL, "b": CHAT, "c": CHAT}, {"a": "d-a", "b": "d-b", "c": "d-b"}
    calls = [call("a", "sql", max_tokens=3), call("b", "cha", max_tokens=3, digest="another")]
    faults = faults_of(calls, adapters, digests, Reference())  # type: ignore[arg-type]
    assert faults == ["b: the digest another", "c was never asked for"]


def test_a_recorder_passes_streams_on_and_keeps_them() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response([])
        response = web.StreamResponse(headers={"x-lora-digest": "d1", "content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in (b"data: 1\n", b"\ndata: 2\n\n"):
            await response.write(piece)
        return response

    async def ask() -> tuple[bytes, str, list[Call]]:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        upstream = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with Recorder(upstream).running() as recorder, aiohttp.ClientSession() as session:
            async with session.post(f"{recorder.url}/v1/completions", json={"model": "a"}) as given:
                got, kind = await given.read(), given.content_type
            async with session.get(f"{recorder.url}/v1/models") as given:
                await given.read()
        await runner.cleanup()
        return got, kind, recorder.calls

    got, kind, calls = asyncio.run(ask())
    assert (got, kind) == (b"data: 1\n\ndata: 2\n\n", "text/event-stream")
    asked = [(it.path, it.model, it.status, it.digest, it.answer) for it in calls]
    assert asked == [("/v1/completions", "a", 200, "d1", got.decode()), ("/v1/models", "None", 200, None, "[]")]


def test_the_page_names_the_versions_that_run() -> None:
    page = PAGE.read_text().lower()
    pins = {name.replace("[proxy]", "") for it in PROGRAMS if it.packages for name in it.packages.names[:1]}
    for pin in pins:
        name, _, version = pin.partition("==") if "==" in pin else pin.rpartition("@")
        assert f"{name.partition('[')[0].removesuffix('-slim')} {version}" in page, pin
