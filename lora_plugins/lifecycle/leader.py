"""The leader: the one of several API servers that changes the served adapters, and has the others follow.

`vllm serve` starts all API servers on one host, as children of one process. The first, the leader, has the only
lifecycle: the leader gives engine ids, leases versions for names, and runs every change. Each other, a follower, keeps
a copy of the leader's table of names. A change is one message with a number. Followers apply changes in the order of
their numbers, and confirm the numbers; an administrator gets an answer when each follower has all earlier changes.

A follower that connects first gets the whole table. The leader does not wait for a closed connection: its process has
died, or ends itself. A single API server is a leader without followers.

Messages (`Frame`) are msgpack maps with a length of 4 bytes in front, on a Unix socket. The leader sends
`{change: NUMBER, name, adapter}`, `{all: NUMBER}` behind the whole table, `{ready}`, `{relieve: NUMBER}`,
`{abort: IDS}` and answers `{id, …}`. A follower sends `{follows: ITS NUMBER}` first, then `{has: NUMBER}` for all
changes up to the number, `{call: NAME, …}`, with an `id` where an answer is wanted, and `{end: ID}`, after which the
leader frees what the call holds. A connection for one carried request (`carrying.py`) begins with `{scope}`.
"""

from __future__ import annotations

import asyncio
from collections import UserDict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, SourceUnavailable
from lora_plugins.lifecycle.background_tasks import background
from lora_plugins.log import logger

SOCKET = "api-servers.sock"
Frame = dict[str, Any]
_ALL_HAVE_S = 60.0
# Both ends are processes of one release, so the format has no version.
_LENGTH_BYTES = 4
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Frame)

Call = Callable[[Frame, AsyncExitStack], Awaitable[Frame]]  # the stack closes when the follower ends the call
Carried = Callable[[Frame, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ToldTable(UserDict[str, Any]):
    """vLLM's table of names in the leader: every change is sent to followers before the change has any other effect."""

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._tell = tell

    def __setitem__(self, name: str, request: Any) -> None:
        self._tell(name, request)
        super().__setitem__(name, request)

    def __delitem__(self, name: str) -> None:
        # First, because an unknown name raises KeyError here, and followers must get no change then.
        super().__delitem__(name)
        self._tell(name, None)


class Leader:
    """Sends changes to followers, and answers their calls. A single API server leads, and nobody follows.

    Args:
        plain_of: the message for one of vLLM's requests; None where another process cannot have the adapter.
        on_gone: called with the number of an API server that follows no more.

    Attributes:
        table: the served names.
        number: the number of the last change.
    """

    def __init__(
        self, plain_of: Callable[[Any], Frame | None] = lambda _: None, on_gone: Callable[[int], None] = lambda _: None
    ) -> None:
        self.table = ToldTable(self._tell)
        self.number = 0
        self.plain_of, self._on_gone = plain_of, on_gone
        self._followers: dict[asyncio.StreamWriter, int] = {}  # with the last change that each has confirmed
        self._has_confirmed = asyncio.Condition()  # or is gone
        self._server: asyncio.Server | None = None
        self._is_ready = False

    async def listen(self, folder: Path, call: Call, carried: Carried) -> None:
        """Begin to answer followers: calls with the result of `call`, carried requests by `carried`."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                first = await receive(reader)
                if first is not None and "scope" in first:
                    await carried(first, reader, writer)
                elif first is not None:
                    await self._follow(reader, writer, call)
                    self._on_gone(first["follows"])
            finally:
                writer.close()

        # Given a coroutine function, asyncio logs a traceback for each open connection when the process ends.
        self._server = await asyncio.start_unix_server(
            lambda *streams: background(connected(*streams)), folder / SOCKET
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for follower in self._followers:
            follower.close()

    def say_ready(self) -> None:
        """Tell followers that every adapter of the start is served or has failed."""
        self._is_ready = True
        self._send_all({"ready": True})

    async def relieve(self) -> None:
        """Have followers end leases of adapters without running requests, and wait; raises as `all_have`."""
        self.number += 1
        self._send_all({"relieve": self.number})
        await self.all_have()

    def abort(self, request_ids: list[str]) -> None:
        """Have each follower end its own requests among `request_ids`."""
        self._send_all({"abort": request_ids})

    async def all_have(self) -> None:
        """Wait until each follower has every change made so far.

        Raises:
            SourceUnavailable: a follower has not confirmed within a minute; the changes are made, and will reach the
            follower.
        """
        # As of now: changes that come during the wait are other callers', and who follows later gets the whole table.
        number, followers = self.number, list(self._followers)
        try:
            async with asyncio.timeout(_ALL_HAVE_S), self._has_confirmed:
                await self._has_confirmed.wait_for(
                    lambda: all(self._followers.get(follower, number) >= number for follower in followers)
                )
        except TimeoutError:
            raise SourceUnavailable(
                f"an API server that has not taken up a change within {_ALL_HAVE_S:.0f} s; the others have it",
                expected="all API servers of this deployment",
                remedy="look at what is served (GET /v1/loras), and call again",
            ) from None

    def _tell(self, name: str, request: Any) -> None:
        adapter = None if request is None else self.plain_of(request)
        if adapter is None and request is not None:
            raise InvalidAdapter(
                "an adapter that only this process has",
                expected="one in a directory, which every API server can name",
                remedy="serve it with --api-server-count 1",
                adapter=name,
            )
        self.number += 1
        self._send_all(_change(self.number, name, adapter))

    def _send_all(self, frame: Frame) -> None:
        for follower in self._followers:
            send(follower, frame)

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: Call) -> None:
        # No await between the table and `add`: a change in between would never reach this follower.
        calls = dict[int, asyncio.Task[None]]()
        for name, request in self.table.items():
            send(writer, _change(self.number, name, self.plain_of(request)))
        send(writer, {"all": self.number})
        if self._is_ready:
            send(writer, {"ready": True})
        self._followers[writer] = 0
        try:
            while (frame := await receive(reader)) is not None:
                if "has" in frame:
                    self._followers[writer] = frame["has"]
                    await self._notify()
                elif "end" in frame:
                    # The task waits in `_answer` with what the call holds; its cancellation closes the stack.
                    calls.pop(frame["end"]).cancel()
                elif "id" in frame:
                    calls[frame["id"]] = background(_answer(writer, frame, call))
                else:
                    background(_answer(writer, frame, call))
        finally:
            for one in calls.values():
                one.cancel()
            del self._followers[writer]
            await self._notify()

    async def _notify(self) -> None:
        """Have `all_have` look at what each follower has confirmed."""
        async with self._has_confirmed:
            self._has_confirmed.notify_all()


def _change(number: int, name: str, adapter: Frame | None) -> Frame:
    return {"change": number, "name": name, "adapter": adapter}


async def _answer(writer: asyncio.StreamWriter, frame: Frame, call: Call) -> None:
    async with AsyncExitStack() as held:
        try:
            answer = await call(frame, held)
        except LoRAPluginsError as error:
            answer = {"refused": error.plain()}
        except Exception:  # noqa: BLE001 - the follower gets the failure as its answer
            logger.exception("An API server's call '%s' failed", frame.get("call"))
            answer = {"failed": True}
        if "id" in frame:
            send(writer, {**answer, "id": frame["id"]})
            await asyncio.Future()  # keep `held` open until the follower ends the call, or closes the connection


def send(writer: asyncio.StreamWriter | None, frame: Frame) -> None:
    """Queue a message behind earlier messages; a closed connection, or none, is no error."""
    if writer is not None and not writer.is_closing():
        body = _encoder.encode(frame)
        writer.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)


async def receive(reader: asyncio.StreamReader) -> Frame | None:
    """Return the next message; None where the other side has closed the connection."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        return _decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
