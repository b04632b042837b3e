"""Saying which version of an adapter computes a response: its digest, in a header. Pure ASGI: nothing of vLLM.

A version is noted where a request is given its adapter, before its response begins. A swap that comes later changes
nothing: the request goes on with the version that it was given.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from lora_plugins.server.response_start import Asgi, Message, Receive, Send

HEADER = "x-lora-digest"
_FIRST_ERROR = 400  # of the statuses


@dataclass(eq=False, slots=True)
class ComputedBy:
    """What computes the response to the present request.

    Attributes:
        digests: of all versions that were given to it; None stands for the base model, or for an unknown version.
        fills_fingerprint: whether `system_fingerprint` is to say it too.
    """

    digests: set[str | None] = field(default_factory=set)
    fills_fingerprint: bool = False

    @property
    def digest(self) -> str | None:
        """The one version that computes all of it; None where there is none, or where it is not the only one."""
        return next(iter(self.digests)) if len(self.digests) == 1 else None


_computed_by: ContextVar[ComputedBy | None] = ContextVar("lora_plugins_computed_by", default=None)


def note_version(digest: str | None, *, fills_fingerprint: bool = False) -> None:
    """The present request is given the version with this digest; outside of a request, nothing happens."""
    present = _computed_by.get()
    if present is not None:
        present.digests.add(digest)
        present.fills_fingerprint = fills_fingerprint


def fingerprint() -> str | None:
    """What to say as the `system_fingerprint` of the present response; None where vLLM says it, or nobody."""
    present = _computed_by.get()
    return present.digest if present is not None and present.fills_fingerprint else None


class SayDigest:
    """Adds the header to responses that are no errors."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a connection on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        present = ComputedBy()
        token = _computed_by.set(present)

        async def send_with_digest(message: Message) -> None:
            if message["type"] == "http.response.start" and present.digest and message["status"] < _FIRST_ERROR:
                message = {**message, "headers": [*message["headers"], (HEADER.encode(), present.digest.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_digest)
        finally:
            _computed_by.reset(token)
