"""The HTTP response to a request for an adapter: when the response begins, and which version its headers name.

Runs in each API server as ASGI middleware around vLLM's application; `vllm_patches/api_server/` notes in `present()`,
the response to the request that the code runs for, which version answers, and which error.

vLLM sends a stream's status before asking the engine. Where a request names an adapter, this middleware keeps messages
back until `Response.has_begun`, or answers with the error instead: so an error has its own status.

The version is noted when a request gets its adapter, before the response begins. A later swap changes nothing, unless
running requests move to the new version: the engine then says which versions made the answer. Pure ASGI, no vLLM.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

Span = tuple[str, int]  # a version's digest, and the index of the first token that the version has made

HEADER = "x-lora-digest"
WARNING_HEADER = "x-lora-warning"
_LONGEST_WARNING = 1000  # characters


def route_path(scope: Scope) -> str:
    """The path that routes are compared with, as Starlette has it (`get_route_path`)."""
    path, root = scope["path"], scope.get("root_path", "")
    # Behind --root-path, ASGI servers differ in whether `path` begins with `root_path`.
    path = str(path.removeprefix(root) if path.startswith(f"{root}/") else path)
    # Starlette's patterns end in `$`, which also matches before a last line feed (`%0a`).
    return path.removesuffix("\n")


@dataclass(eq=False, slots=True)
class Response:
    """The response to the present request.

    Attributes:
        is_held: whether messages are kept back until `has_begun`: whether the engine has begun to answer.
        kept: the messages kept back.
        error: the error to answer instead.
        digests: of all versions that the request was given; None stands for the base model, or an unknown version.
        warnings: warnings about these versions.
        spans: the versions that have made the answer so far, over all prompts and choices.
        fills_fingerprint: whether `system_fingerprint` is to name the version too.
        headers: of an error that is answered by other means than its exception.
        client: a name for the client's request that no client can choose.
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
    client: str = field(default_factory=lambda: uuid4().hex)

    @property
    def digest(self) -> str | None:
        """The only version that all prompts and choices begin with; None without a version, or with several."""
        began_with = {digest for digest, token in self.spans if token == 0} or self.digests
        return next(iter(began_with)) if len(began_with) == 1 else None

    @property
    def has_moved(self) -> bool:
        """Whether more than one version has made the answer."""
        return len(self.spans) > 1

    def note_version(
        self, digest: str | None, *, warnings: Iterable[str] = (), fills_fingerprint: bool = False
    ) -> None:
        self.digests.add(digest)
        self.warnings |= dict.fromkeys(warnings)
        self.fills_fingerprint = fills_fingerprint


_present: ContextVar[Response | None] = ContextVar("lora_plugins_response", default=None)


def present() -> Response:
    """The response to the present request; a new object, which is never sent, outside a request."""
    return _present.get() or Response()


def is_for_request() -> bool:
    """Whether this code runs for a request, rather than for the start of the server."""
    return _present.get() is not None


def fingerprint() -> str | None:
    """The `system_fingerprint` of the present response; None where vLLM's value stays."""
    response = present()
    return response.digest if response.fills_fingerprint and not response.has_moved else None


def together(some: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The spans of several answers, or of one answer at two times, in the order of their tokens."""
    every = dict.fromkeys((digest, token) for spans in (some, others) for digest, token in spans)
    return sorted(every, key=lambda span: span[1])


@dataclass(eq=False)
class AnswerForAdapters:
    """ASGI middleware: see the module.

    Attributes:
        answer: makes the response for an error, as the application would for a raised error.
    """

    app: ASGIApp
    answer: Callable[[Scope, Exception], Awaitable[ASGIApp]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        response = Response()
        token = _present.set(response)

        async def send_when_begun(message: Message) -> None:
            if response.error is not None and response.is_held:
                # No byte has left yet, so the error can still have its own status. Later messages are the rest of the
                # response that the error replaces.
                if not response.has_begun:
                    response.has_begun = True
                    response.kept.clear()
                    await (await self.answer(scope, response.error))(scope, receive, send)
                return
            response.kept.append(message)
            # A whole body without a stream ends the wait, too.
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if response.has_begun or not response.is_held or is_last:
                kept, response.kept = response.kept, []
                response.is_held = False
                for one in kept:
                    await send(_with_headers(one, response))

        try:
            await self.app(scope, receive, send_when_begun)
        except Exception:
            # vLLM's responses route raises errors that other routes write into the stream.
            if response.error is None or not response.is_held or response.has_begun:
                raise
            await send_when_begun({"type": "http.response.body"})
        finally:
            _present.reset(token)


def _with_headers(message: Message, response: Response) -> Message:
    """Add headers to the start of a response: the digest and warnings, or the headers of an error."""
    if message["type"] != "http.response.start":
        return message
    said = {} if response.digest is None else {HEADER: response.digest}
    if response.warnings:
        said[WARNING_HEADER] = _one_line(response.warnings)
    added = response.headers if message["status"] >= 400 else said
    headers = [(name.lower().encode(), text.encode()) for name, text in added.items()]
    return {**message, "headers": [*message["headers"], *headers]}


def _one_line(texts: Iterable[str]) -> str:
    """Join texts to one line of printable ASCII, because headers allow no other characters."""
    characters = (c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in "; ".join(texts))
    return "".join(characters)[:_LONGEST_WARNING]
