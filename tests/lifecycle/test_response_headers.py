"""The headers that say which version of an adapter computed a response, and that its base model is another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import zip_longest

import pytest
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from lora_plugins.lifecycle.response import (
    HEADER,
    WARNING_HEADER,
    AnswerForAdapters,
    Span,
    fingerprint,
    present,
    together,
)

OLD, NEW = "a1" * 32, "b2" * 32
Endpoint = Callable[[Request], Awaitable[Response]]


def client_of(endpoint: Endpoint) -> TestClient:
    app = Starlette(routes=[Route("/", endpoint, methods=["GET", "POST"])])
    app.add_middleware(AnswerForAdapters, answer=None)  # type: ignore[arg-type]
    return TestClient(app)


def answering(*digests: str | None, status: int = 200, warnings: Sequence[str] = ()) -> Endpoint:
    """Answers of these versions; each has the warning in its place."""

    async def endpoint(request: Request) -> Response:
        for digest, warning in zip_longest(digests, warnings):
            present().note_version(digest, warnings=() if warning is None else (warning,))
        return JSONResponse({}, status)

    return endpoint


@pytest.mark.parametrize(
    ("digests", "said"),
    [([OLD], OLD), ([OLD, OLD], OLD), *((some, None) for some in ([], [None], [OLD, NEW], [OLD, None], [None, OLD]))],
)
def test_only_one_version_alone_is_said(digests: Sequence[str | None], said: str | None) -> None:
    seen = client_of(answering(*digests)).post("/").headers
    assert (seen.get(HEADER), WARNING_HEADER in seen) == (said, False)


@pytest.mark.parametrize("status", [400, 503])
def test_errors_say_no_version_and_no_warning(status: int) -> None:
    seen = client_of(answering(OLD, status=status, warnings=["trained on another"])).post("/")
    assert (seen.status_code, {HEADER, WARNING_HEADER} & {*seen.headers}) == (status, set())


def test_several_versions_say_each_warning_once() -> None:
    said = client_of(answering(OLD, NEW, OLD, warnings=["one", "two", "one"])).post("/").headers
    assert said[WARNING_HEADER] == "one; two"


def test_a_warning_is_one_line_of_ascii() -> None:
    said = client_of(answering(OLD, warnings=["a\r\nx-other: é\u2028" + "long " * 1000])).post("/").headers
    assert said[WARNING_HEADER].startswith(r"a\r\nx-other: \xe9\u2028long")
    assert (said[HEADER], len(said[WARNING_HEADER]), "x-other" in said) == (OLD, 1000, False)


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


@pytest.mark.parametrize("fills", [True, False])
def test_a_stream_says_it_before_and_in_every_part(*, fills: bool) -> None:
    """Ours stays out where vLLM has a fingerprint."""
    seen = client_of(streaming(fills=fills)).post("/")
    assert (seen.headers[HEADER], seen.text) == (OLD, f"{OLD if fills else None} " * 3)


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


@pytest.mark.parametrize(
    ("spans", "said"),
    [([(NEW, 0)], NEW), ([(OLD, 0), (NEW, 3)], OLD), ([(OLD, 0), (NEW, 0)], None)],
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
