"""A streamed response's start that is held back until the engine has begun to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lora_plugins.lifecycle.response import AnswerForAdapters, present
from tests.virtual_time import runs

LATER_S = 1.0


@dataclass
class Connection:
    """What a server sees of one request: what was sent, and when."""

    sent: list[dict[str, Any]] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    hangs_up_after_s: float | None = None
    is_asked: bool = False

    async def receive(self) -> dict[str, Any]:
        if not self.is_asked:
            self.is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.sleep(LATER_S * 1000 if self.hangs_up_after_s is None else self.hangs_up_after_s)
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))
        self.at.append(asyncio.get_running_loop().time())

    @property
    def status(self) -> int:
        (start,) = [message for message in self.sent if message["type"] == "http.response.start"]
        assert self.sent[0] is start
        return int(start["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def parts(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:]]

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode()


Endpoint = Callable[[Request], Awaitable[Response]]


def app_of(endpoint: Endpoint, methods: tuple[str, ...] = ("GET", "POST")) -> Starlette:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"says": error.detail}, status_code=error.status_code, headers=error.headers)

    async def answer(scope: Any, error: Exception) -> Any:
        return await refused(Request(scope), error)

    app = Starlette(routes=[Route("/", endpoint, methods=list(methods))], exception_handlers={HTTPException: refused})
    app.add_middleware(AnswerForAdapters, answer=answer)  # type: ignore[arg-type]
    return app


async def call(endpoint: Endpoint, method: str = "POST", **connection: Any) -> Connection:
    scope = {
        "type": "http", "method": method, "path": "/", "raw_path": b"/", "root_path": "", "query_string": b"",
        "headers": [], "scheme": "http", "http_version": "1.1", "server": ("127.0.0.1", 80), "asgi": {"version": "3.0"},
    }  # fmt: skip
    made = Connection(**connection)
    await app_of(endpoint)(scope, made.receive, made.send)
    return made


def holding(answer: Callable[[], Response]) -> Endpoint:
    """An endpoint whose answer is kept back until the engine has begun."""

    async def endpoint(request: Request) -> Response:
        present().is_held = True
        return answer()

    return endpoint


def stream(
    *, holds: bool = True, error: Exception | None = None, after: int = 0, raises: bool = False, background: Any = None
) -> Endpoint:
    """An endpoint as vLLM's: a role first, then what the engine says in LATER_S; an error after so many outputs."""

    async def outputs() -> AsyncIterator[str]:
        response = present()
        yield "role "
        await asyncio.sleep(LATER_S)
        for number in range(3):
            if error is not None and number == after:
                response.error = error
                if raises:  # as vLLM's responses route does; the others write it into the stream
                    raise error
                yield f"error: {error.detail} " if isinstance(error, HTTPException) else "error "
                break
            response.has_begun = True
            yield f"{number} "
        yield "done"

    async def endpoint(request: Request) -> Response:
        present().is_held = holds
        return StreamingResponse(outputs(), media_type="text/event-stream", background=background)

    return endpoint


PARTS = [b"role ", b"0 ", b"1 ", b"2 ", b"done", b""]
REFUSED = HTTPException(503, "no free slot", headers={"Retry-After": "1"})


@pytest.mark.parametrize("raises", [False, True])
@runs
async def test_an_error_before_the_first_output_has_its_own_status(raises: bool) -> None:
    seen = await call(stream(error=REFUSED, raises=raises))
    assert (seen.status, seen.text) == (503, '{"says":"no free slot"}')
    assert (seen.headers[b"retry-after"], seen.headers[b"content-type"]) == (b"1", b"application/json")
    assert seen.sent[-1].get("more_body", False) is False
    assert len(seen.sent) == 2, "nothing of the stream comes after it"


@pytest.mark.parametrize("holds", [True, False])
@runs
async def test_an_error_that_ends_a_begun_stream_is_raised(holds: bool) -> None:
    with pytest.raises(RuntimeError, match="response already started"):
        await call(stream(error=REFUSED, raises=True, after=2, holds=holds))


@runs
async def test_a_stream_begins_with_the_engines_first_output() -> None:
    seen = await call(stream())
    assert (seen.status, seen.parts) == (200, PARTS)
    assert seen.headers[b"content-type"].startswith(b"text/event-stream")
    assert min(seen.at) >= LATER_S


@pytest.mark.parametrize(("holds", "method"), [(False, "POST"), (True, "GET")])
@runs
async def test_without_an_adapter_or_a_post_nothing_is_held(holds: bool, method: str) -> None:
    seen = await call(stream(holds=holds), method)
    assert seen.parts == PARTS
    assert [at < LATER_S for at in seen.at] == [True, True, False, False, False, False, False]


@pytest.mark.parametrize(
    ("holds", "after", "text"),
    [(True, 2, "role 0 1 error: no free slot done"), (False, 0, "role error: no free slot done")],
)
@runs
async def test_an_error_in_a_begun_stream_stays_there(holds: bool, after: int, text: str) -> None:
    seen = await call(stream(holds=holds, error=REFUSED, after=after))
    assert (seen.status, seen.text) == (200, text)


@runs
async def test_a_stream_that_ends_without_an_output_is_sent() -> None:
    async def outputs() -> AsyncIterator[str]:
        yield "role "
        yield "done"

    seen = await call(holding(lambda: StreamingResponse(outputs())))
    assert (seen.status, seen.text) == (200, "role done")


@runs
async def test_a_whole_response_passes_in_one_piece() -> None:
    seen = await call(holding(lambda: PlainTextResponse("all of it", status_code=201)))
    assert (seen.status, seen.text) == (201, "all of it")


@runs
async def test_what_an_endpoint_raises_is_the_applications_to_answer() -> None:
    async def endpoint(request: Request) -> Response:
        present().is_held = True
        present().error = REFUSED
        raise REFUSED

    seen = await call(endpoint)
    assert (seen.status, seen.text) == (503, '{"says":"no free slot"}')


@pytest.mark.parametrize("error", [None, REFUSED])
@runs
async def test_background_tasks_run_after_the_response(error: Exception | None) -> None:
    ran: list[str] = []

    async def run() -> None:
        ran.append("ran")

    seen = await call(stream(error=error, background=BackgroundTask(run)))
    assert ran == ["ran"]
    assert seen.status == (200 if error is None else 503)


@runs
async def test_a_client_that_goes_away_ends_what_is_held() -> None:
    ended: list[str] = []

    async def outputs() -> AsyncIterator[str]:
        try:
            yield "role "
            await asyncio.sleep(LATER_S * 100)
        finally:
            ended.append("ended")

    with suppress(BaseExceptionGroup):
        seen = await call(holding(lambda: StreamingResponse(outputs())), hangs_up_after_s=LATER_S)
        assert seen.sent == [], "it was never begun"
    assert ended == ["ended"]
    assert asyncio.get_running_loop().time() == pytest.approx(LATER_S)


@runs
async def test_websockets_and_what_is_no_connection_pass() -> None:
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        present().is_held = True
        passed.append(scope["type"])
        await send({"type": "something"})

    async def nobody(scope: Any, error: Exception) -> Any:
        raise AssertionError("there is no error")

    seen = Connection()
    for kind in ("websocket", "lifespan"):
        await AnswerForAdapters(app, nobody)({"type": kind}, seen.receive, seen.send)
    assert passed == ["websocket", "lifespan"]
    assert len(seen.sent) == 2
