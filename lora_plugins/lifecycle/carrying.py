"""Carry HTTP requests that change or list served adapters from followers to the leader, unchanged.

Runs in each API server as ASGI middleware around vLLM's application, because a load balancer, or the kernel, chooses
the server of a request, and only the leader changes what is served (`leader.py`). A follower sends a carried request to
the leader on a connection of its own, body and all, and passes the leader's response on. The leader's application
handles the request like a direct request: with the same headers and the same caller, so authentication and policy
decide the same. Pure ASGI, no vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.lifecycle.follower import Follower, gone
from lora_plugins.lifecycle.leader import Frame, Leader, receive, send
from lora_plugins.lifecycle.response import route_path
from lora_plugins.log import logger

# Routes of this package; of vLLM; of SageMaker; and vLLM's list of models, so that all servers list the same order.
_PATHS = ("/v1/loras/", "/v1/load_lora_adapter/", "/v1/unload_lora_adapter/", "/adapters/", "/v1/models/")
# Fields of an ASGI scope that msgpack can carry: a scope also has the application and its state.
_PLAIN_FIELDS = ("type", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string")


@dataclass(eq=False)
class CarryToLeader:
    """ASGI middleware of each API server: a follower carries; the leader answers when all followers have its changes.

    Attributes:
        role: returns the leader, or the follower, that this process is.
        answer: makes the response for an error, as the application would for a raised error.
    """

    app: ASGIApp
    role: Callable[[], Leader | Follower]
    answer: Callable[[Scope, LoRAPluginsError], Awaitable[ASGIApp]]

    async def __call__(self, scope: Scope, receive_: Receive, send_: Send) -> None:
        """Handle one connection, or the application's life, which begins when all is there to serve."""
        is_carried = scope["type"] == "http" and f"{route_path(scope)}/".startswith(_PATHS)
        try:
            if isinstance(role := self.role(), Follower):
                if is_carried:
                    await _carry(role, scope, receive_, send_)
                    return
                if scope["type"] == "lifespan":
                    role.note_start()
            elif is_carried and scope["method"] != "GET":
                send_ = _when_all_have(role, send_)
            await self.app(scope, receive_, send_)
        except LoRAPluginsError as error:
            await (await self.answer(scope, error))(scope, receive_, send_)


async def answer_carried(
    app: ASGIApp, first: Frame, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Have the leader's application answer a carried request."""
    scope = {
        **first["scope"],
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "headers": _pairs(first["scope"]["headers"]),
        "client": first["scope"]["client"] and tuple(first["scope"]["client"]),
        "server": first["scope"]["server"] and tuple(first["scope"]["server"]),
        # `state` is of one process: a carried request begins with an empty state.
        "state": {},
    }

    async def receive_() -> Message:
        # A follower that is gone is a client that has gone away.
        return await receive(reader) or {"type": "http.disconnect"}

    has_begun = is_whole = False

    async def send_(message: Message) -> None:
        nonlocal has_begun, is_whole
        has_begun = True
        is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
        await _write(writer, message)

    try:
        await app(scope, receive_, send_)
    except Exception:  # noqa: BLE001 - the follower's client gets an answer, as from uvicorn
        logger.exception("A carried request failed: %s", scope.get("path"))
        if not has_begun:
            await send_({"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"text/plain")]})
            await send_({"type": "http.response.body", "body": b"Internal Server Error"})
    # The follower closes: it may still write the request, and a write to a closed connection would lose the answer.
    # No frames: the application may have left off in the midst of one, as at a slow body.
    with suppress(ConnectionError):
        while is_whole and await reader.read(1 << 16):
            pass


async def _write(writer: asyncio.StreamWriter, message: Message) -> None:
    send(writer, dict(message))
    with suppress(ConnectionError):
        await writer.drain()


def _pairs(headers: list[list[bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI's tuples: msgpack has lists only."""
    return [(name, value) for name, value in headers]


def _when_all_have(leader: Leader, send_: Send) -> Send:
    async def send_when_all_have(message: Message) -> None:
        # The administrator's next request may reach any server, so hold the answer until every follower has the change.
        if message["type"] == "http.response.start":
            await leader.all_have()
        await send_(message)

    return send_when_all_have


async def _carry(follower: Follower, scope: Scope, receive_: Receive, send_: Send) -> None:
    """Have the leader answer a follower's request; `send_` gets the leader's response."""
    reader, writer = await follower.open()

    async def pass_on() -> None:
        while True:
            message = await receive_()
            await _write(writer, message)
            if message["type"] == "http.disconnect":
                return

    plain: dict[str, Any] = {name: scope[name] for name in _PLAIN_FIELDS if name in scope}
    plain |= {"headers": list(scope["headers"]), "client": scope.get("client"), "server": scope.get("server")}
    send(writer, {"scope": plain})
    # In a task, because a client may go away, or send its body, while the leader answers.
    passing = asyncio.create_task(pass_on())
    has_begun = False
    try:
        while (message := await receive(reader)) is not None:
            has_begun = True
            if "headers" in message:
                # The follower's own stack adds its request id: `--enable-request-id-headers`.
                pairs = _pairs(message["headers"])
                message["headers"] = [pair for pair in pairs if pair[0].lower() != b"x-request-id"]
            await send_(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                return
        # After the first message of a response no second response may begin, so a cut response stays cut.
        if not has_begun:
            raise gone()
    finally:
        passing.cancel()
        writer.close()
