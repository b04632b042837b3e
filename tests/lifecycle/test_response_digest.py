"""The header that says which version of an adapter computed a response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket

from lora_plugins.lifecycle.response import HEADER, AnswerForAdapters, Span, fingerprint, present, together

OLD, NEW = "a1" * 32, "b2" * 32
Endpoint = Callable[[Request], Awaitable[Response]]


def client_of(endpoint: Endpoint) -> TestClient:
    app = Starlette(routes=[Route("/", endpoint, methods=["GET", "POST"])])
    app.add_middleware(AnswerForAdapters, answer=None)  # type: ignore[arg-type]
    return TestClient(app)


def answering(*digests: str | None, status: int = 200) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        for digest in digests:
            present().note_version(digest)
        return JSONResponse({}, status)

    return endpoint


@pytest.mark.parametrize(
    ("digests", "said"),
    [
        ((OLD,), OLD),
        ((OLD, OLD), OLD),
        ((), None),
        ((None,), None),
        ((OLD, NEW), None),
        ((OLD, None), None),
        ((None, OLD), None),
    ],
)
def test_only_one_version_alone_is_said(digests: Sequence[str | None], said: str | None) -> None:
    assert client_of(answering(*digests)).post("/").headers.get(HEADER) == said


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_errors_say_no_version(status: int) -> None:
    seen = client_of(answering(OLD, status=status)).post("/")
    assert (seen.status_code, HEADER in seen.headers) == (status, False)


def test_other_methods_say_no_version() -> None:
    assert HEADER not in client_of(answering(OLD)).get("/").headers


def test_other_headers_and_the_body_stay() -> None:
    async def endpoint(request: Request) -> Response:
        present().note_version(OLD)
        return JSONResponse({"all": "of it"}, headers={"x-request-id": "7"})

    seen = client_of(endpoint).post("/")
    assert (seen.json(), seen.headers["x-request-id"], seen.headers[HEADER]) == ({"all": "of it"}, "7", OLD)


def streaming(*, fills: bool) -> Endpoint:
    async def parts() -> AsyncIterator[str]:
        for _ in range(3):
            yield f"{fingerprint()} "
            await asyncio.sleep(0)

    async def endpoint(request: Request) -> Response:
        present().note_version(OLD, fills_fingerprint=fills)
        return StreamingResponse(parts())

    return endpoint


def test_a_stream_says_it_before_and_in_every_part() -> None:
    seen = client_of(streaming(fills=True)).post("/")
    assert (seen.headers[HEADER], seen.text) == (OLD, f"{OLD} " * 3)


def test_where_vllm_has_a_fingerprint_ours_stays_out() -> None:
    seen = client_of(streaming(fills=False)).post("/")
    assert (seen.headers[HEADER], seen.text) == (OLD, "None " * 3)


def test_middleware_that_uses_tasks_of_its_own_changes_nothing() -> None:
    app = Starlette(routes=[Route("/", streaming(fills=True), methods=["POST"])])

    async def passing(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        return await call_next(request)

    app.add_middleware(BaseHTTPMiddleware, dispatch=passing)
    app.add_middleware(AnswerForAdapters, answer=None)  # type: ignore[arg-type]
    app.add_middleware(BaseHTTPMiddleware, dispatch=passing)
    seen = TestClient(app).post("/")
    assert (seen.headers[HEADER], seen.text) == (OLD, f"{OLD} " * 3)


def test_requests_at_once_each_say_their_own() -> None:
    barrier = asyncio.Barrier(2)

    async def app(scope, receive, send) -> None:
        present().note_version(scope["path"])
        await barrier.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(path: str) -> list[tuple[bytes, bytes]]:
        sent = []

        async def send(message) -> None:
            sent.append(message)

        await AnswerForAdapters(app, None)({"type": "http", "method": "POST", "path": path}, None, send)  # type: ignore[arg-type]
        return sent[0]["headers"]

    async def both() -> list[list[tuple[bytes, bytes]]]:
        return await asyncio.gather(ask(OLD), ask(NEW))

    assert asyncio.run(both()) == [[(HEADER.encode(), OLD.encode())], [(HEADER.encode(), NEW.encode())]]


def test_a_websocket_is_left_alone() -> None:
    async def echo(socket: WebSocket) -> None:
        present().note_version(OLD)
        await socket.accept()
        await socket.send_text(str(fingerprint()))
        await socket.close()

    app = Starlette(routes=[WebSocketRoute("/", echo)])
    app.add_middleware(AnswerForAdapters, answer=None)  # type: ignore[arg-type]
    with TestClient(app).websocket_connect("/") as socket:
        assert socket.receive_text() == "None"


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([(NEW, 0)], NEW),
        ([(OLD, 0), (NEW, 3)], OLD),
        ([(OLD, 0), (NEW, 0)], None),
    ],
    ids=["moved before it began", "moved", "two prompts"],
)
def test_the_header_says_what_computed_the_beginning(spans: list[Span], said: str | None) -> None:
    async def endpoint(request: Request) -> Response:
        present().note_version(OLD, fills_fingerprint=True)
        present().spans = spans
        return JSONResponse(fingerprint())

    seen = client_of(endpoint).post("/")
    assert seen.headers.get(HEADER) == said
    assert seen.json() == (said if len(spans) == 1 else None), "no one version is all of it"


def test_spans_of_several_answers_keep_their_order() -> None:
    assert together([(OLD, 0), (NEW, 4)], [[OLD, 0], [NEW, 2], [OLD, 3]]) == [(OLD, 0), (NEW, 2), (OLD, 3), (NEW, 4)]
    assert together([(NEW, 0)], [(OLD, 0)]) == [(NEW, 0), (OLD, 0)]


def test_outside_of_a_request_nothing_is_noted() -> None:
    present().note_version(OLD, fills_fingerprint=True)
    assert fingerprint() is None
