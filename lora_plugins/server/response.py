"""The response to a request for an adapter: when it starts, and which version it says has computed it.

A stream's status is sent before the engine is asked. Where a request names an adapter, this middleware keeps what is
sent until `Response.has_begun`, or answers with the error in its place: so an error has its own status.

A version is noted where a request is given its adapter, before its response begins. A swap that comes later changes
nothing, unless it moves what runs: the engine then says which versions made the answer. Pure ASGI: nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Asgi = Callable[[Message, Receive, Send], Awaitable[None]]

Span = tuple[str, int]  # a version's digest, and the token of an answer that it began with

HEADER = "x-lora-digest"
WARNING_HEADER = "x-lora-warning"
_LONGEST_WARNING = 1000  # characters
_FIRST_ERROR = 400  # of the statuses


@dataclass(eq=False, slots=True)
class Response:
    """The response to the present request.

    Attributes:
        is_held: whether its start is held back. has_begun: whether the engine has begun to answer.
        error: what to answer instead.
        digests: of all versions that it was given; None stands for the base model, or for an unknown version.
        warnings: what is to be said of these versions.
        spans: the versions that have made what was answered until now, of all its prompts and choices.
        fills_fingerprint: whether `system_fingerprint` is to say the version too.
        headers: of an error that is answered by other means than its exception.
    """

    is_held: bool = False
    has_begun: bool = False
    error: Exception | None = None
    digests: set[str | None] = field(default_factory=set)
    warnings: dict[str, None] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    fills_fingerprint: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    kept: list[Message] = field(default_factory=list)

    @property
    def digest(self) -> str | None:
        """The one version that all of it begins with; None where there is none, or several."""
        began_with = {digest for digest, token in self.spans if token == 0} or self.digests
        return next(iter(began_with)) if len(began_with) == 1 else None

    @property
    def has_moved(self) -> bool:
        """Whether more than one version has made it."""
        return len(self.spans) > 1

    def note_version(
        self, digest: str | None, *, warnings: Iterable[str] = (), fills_fingerprint: bool = False
    ) -> None:
        """It is given the version with this digest, of which this is to be said."""
        self.digests.add(digest)
        self.warnings |= dict.fromkeys(warnings)
        self.fills_fingerprint = fills_fingerprint


_present: ContextVar[Response | None] = ContextVar("lora_plugins_response", default=None)


def present() -> Response:
    """The response to the present request; one that nobody sends where there is no request."""
    return _present.get() or Response()


def is_for_request() -> bool:
    """Whether this code runs for a request, and not for the start of the server."""
    return _present.get() is not None


def fingerprint() -> str | None:
    """What to say as the `system_fingerprint` of the present response; None where vLLM says it, or nobody."""
    response = present()
    return response.digest if response.fills_fingerprint and not response.has_moved else None


def together(some: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The spans of several answers, or of one and what is known of it now, in the order of their tokens."""
    every = dict.fromkeys((digest, token) for spans in (some, others) for digest, token in spans)
    return sorted(every, key=lambda span: span[1])


class AnswerForAdapters:
    """ASGI middleware: see the module.

    Args:
        answer: makes the response for an error, as the application would for one that is raised.
    """

    def __init__(self, app: Asgi, answer: Callable[[Message, Exception], Awaitable[Asgi]]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a connection on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        response = Response()
        token = _present.set(response)

        async def send_when_begun(message: Message) -> None:
            if response.error is not None and response.is_held and not response.has_begun:
                response.has_begun, error = True, response.error
                response.kept.clear()
                await (await self._answer(scope, error))(scope, receive, send)
                return
            if response.error is not None and response.is_held:
                return  # what follows belongs to the response that was not sent
            response.kept.append(message)
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if response.has_begun or not response.is_held or is_last:
                kept, response.kept = response.kept, []
                response.is_held = False
                for one in kept:
                    await send(_with_headers(one, response))

        try:
            await self._app(scope, receive, send_when_begun)
        except Exception:
            # vLLM's responses route raises what its others write into the stream.
            if response.error is None or not response.is_held or response.has_begun:
                raise
            await send_when_begun({"type": "http.response.body"})
        finally:
            _present.reset(token)


def _with_headers(message: Message, response: Response) -> Message:
    """The start of a response says the digest, that of an error what is to be said with the error."""
    if message["type"] != "http.response.start":
        return message
    said = {} if response.digest is None else {HEADER: response.digest}
    if response.warnings:
        said[WARNING_HEADER] = _one_line(response.warnings)
    added = response.headers if message["status"] >= _FIRST_ERROR else said
    headers = [(name.lower().encode(), text.encode()) for name, text in added.items()]
    return {**message, "headers": [*message["headers"], *headers]}


def _one_line(texts: Iterable[str]) -> str:
    """In printable ASCII, as headers are."""
    characters = (c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in "; ".join(texts))
    return "".join(characters)[:_LONGEST_WARNING]
