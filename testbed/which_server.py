"""An ASGI middleware for `vllm serve --middleware`: each response says which of several API servers has sent it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

HEADER = "x-api-server"

Message = MutableMapping[str, Any]


class SayWhichServer:
    """Puts the number of its process into the header `x-api-server`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Pass a connection on."""

        async def saying(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [(name, value) for name, value in message["headers"] if name != HEADER.encode()]
                message = {**message, "headers": [*others, (HEADER.encode(), str(os.getpid()).encode())]}
            await send(message)

        await self._app(scope, receive, saying)
