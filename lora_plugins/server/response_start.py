"""Holding a streamed response's start back until the engine has begun to answer, so that an error has its own status.

A stream's status is sent before the engine is asked. Where a request names an adapter, this middleware keeps what is
sent until `Pending.begun`, or answers with the error in its place. Pure ASGI: nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Asgi = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(eq=False, slots=True)
class Pending:
    """The response to the present request.

    Attributes:
        is_held: whether its start is held back. has_begun: whether the engine has begun to answer.
        error: what to answer instead.
    """

    is_held: bool = False
    has_begun: bool = False
    error: Exception | None = None
    kept: list[Message] = field(default_factory=list)


_pending: ContextVar[Pending | None] = ContextVar("lora_plugins_pending", default=None)


def pending() -> Pending:
    """The response to the present request; one that nobody sends where there is no request."""
    return _pending.get() or Pending()


class HoldResponseStart:
    """See the module.

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
        response = Pending()
        token = _pending.set(response)

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
                    await send(one)

        try:
            await self._app(scope, receive, send_when_begun)
        except Exception:
            # vLLM's responses route raises what its others write into the stream.
            if response.error is None or not response.is_held or response.has_begun:
                raise
            await send_when_begun({"type": "http.response.body"})
        finally:
            _pending.reset(token)
