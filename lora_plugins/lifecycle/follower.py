"""The follower: an API server that serves the names of the leader's table (`leader.py`), and changes none.

Runs in the event loop of each API server of `vllm serve` but the first, which is the leader. The leader's messages
(*frames*) come in and change the table; calls go out, such as a call to resolve an unknown name. `leader.py` describes
the frames. A follower that loses its connection empties its table, and ends its process (`end_without_leader`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import sys
import time
from collections import UserDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from lora_plugins.errors import LoRAPluginsError, SourceUnavailable, error_of
from lora_plugins.lifecycle.leader import SOCKET, Frame, receive, send
from lora_plugins.log import logger

_RETRY_S = 0.05
_USED_AGAIN_S = 1.0  # between two reports of use of one adapter
# `vllm serve` ends all its API servers together, and the leader may end first: wait for this process's own shutdown.
_OWN_END_S = 5.0
_REMEMBERED = 10_000  # engine ids


class FollowedTable(UserDict[str, Any]):
    """vLLM's table of names in a follower: read-only for vLLM; `Follower` writes to `data` what the leader says."""

    # A UserDict's `pop`, `update`, `setdefault` and `clear` call these two methods, so they are refused too.
    def __setitem__(self, name: str, request: Any) -> None:
        raise not_here(name)

    def __delitem__(self, name: str) -> None:
        raise not_here(name)


@dataclass(eq=False)
class Follower:
    """Keeps a copy of the leader's table.

    Attributes:
        request_of: makes vLLM's `LoRARequest` from the leader's description of an adapter.
        on_change: called after each change with a name, and the request that the table had for the name before, or
            None.
        abort: ends this process's requests among the given request ids; ids of other processes are ignored.
        relieve: ends the leases of adapters without running requests.
        on_loss: called once the connection is lost, unless `close` has closed the connection.
        table: the served names; a copy of the leader's table. Empty once the connection is lost.
    """

    request_of: Callable[[Frame], Any]
    on_change: Callable[[str, Any], None]
    abort: Callable[[list[str]], None]
    relieve: Callable[[], Awaitable[None]]
    on_loss: Callable[[], None]
    table: FollowedTable = field(default_factory=FollowedTable)
    _folder: Path = Path()
    _writer: asyncio.StreamWriter | None = None
    _reading: asyncio.Task[None] | None = None
    # The leader has sent the whole table, and has served the adapters of the start. Both are set at a loss too, so that
    # waiting callers go on.
    _has_all: asyncio.Event = field(default_factory=asyncio.Event)
    _is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    _is_lost: bool = False
    _is_closed: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _answers: dict[int, asyncio.Future[Frame]] = field(default_factory=dict)  # of calls under way, by number
    # When `used` last reported each engine id, by time.monotonic().
    _told_used: LRUCache[int, float] = field(default_factory=lambda: LRUCache(_REMEMBERED))

    async def connect(self, folder: Path, number: int) -> None:
        """Follow the leader of this folder, once the leader listens; returns with the whole table.

        `number`: vLLM's number of this API server.

        Raises:
            SourceUnavailable: the connection is lost.
        """
        self._folder = folder
        while True:  # no deadline: vLLM ends this process where the leader cannot start
            try:
                reader, self._writer = await asyncio.open_unix_connection(folder / SOCKET)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_RETRY_S)
        # This frame marks the connection as a follower's: a connection of `open` begins with the scope of an HTTP
        # request for the leader to answer.
        send(self._writer, {"follows": number})
        self._reading = asyncio.create_task(self._read(reader))
        await self._reached(self._has_all)

    def close(self) -> None:
        """Follow no more; the table empties."""
        self._is_closed = True
        if self._writer is not None:
            self._writer.close()

    def note_start(self) -> None:
        """Note in the folder that this process begins to serve: from now on, its death ends no other process."""
        with suppress(OSError):  # without the note, this process's death ends all API servers, as in vLLM
            _note_of(self._folder, os.getpid()).touch()

    async def ready(self) -> None:
        """Wait until the leader has served, or tried, all adapters of the start.

        Raises:
            SourceUnavailable: the connection is lost.
        """
        await self._reached(self._is_ready)

    async def call(self, name: str, /, **arguments: Any) -> Frame:
        """Have the leader do something; the leader's changes are in the table on return. Raises as `lasting`."""
        async with self.lasting(name, **arguments) as frame:
            return frame

    @asynccontextmanager
    async def lasting(self, name: str, /, **arguments: Any) -> AsyncIterator[Frame]:
        """Call the leader, and yield its answer; inside, this process keeps what the answer grants, such as a place.

        Raises:
            LoRAPluginsError: the leader's refusal. SourceUnavailable: the leader is gone, or the call failed.
        """
        number = next(self._numbers)
        self._send({"call": name, "id": number, **arguments})
        # No await comes between sending the call and this line, so the answer cannot be read before its future exists.
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            frame: Frame = await answer
            if "refused" in frame:
                raise error_of(frame["refused"])
            if frame.get("failed"):
                raise SourceUnavailable(
                    "the first API server, which could not answer",
                    expected="its answer",
                    remedy="see the server's log, and ask again",
                )
            yield frame
        finally:
            del self._answers[number]
            # Also on cancellation, so that the leader ends a call that nobody awaits any more.
            send(self._writer, {"end": number})

    def used(self, engine_id: int) -> None:
        """Tell the leader about requests for an adapter, at most once a second for each adapter."""
        now = time.monotonic()
        if now - self._told_used.get(engine_id, -math.inf) >= _USED_AGAIN_S:
            self._told_used[engine_id] = now
            self.tell("used", engine_id=engine_id)

    def tell(self, name: str, /, **arguments: Any) -> None:
        """Have the leader do something, and wait for no answer.

        Raises:
            SourceUnavailable: the leader is gone.
        """
        self._send({"call": name, **arguments})

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a further connection to the leader, to pass on one HTTP request.

        Raises:
            SourceUnavailable: the leader is gone.
        """
        try:
            return await asyncio.open_unix_connection(self._folder / SOCKET)
        except OSError:
            raise gone() from None

    async def _reached(self, event: asyncio.Event) -> None:
        await event.wait()
        if self._is_lost:
            raise gone()

    def _send(self, frame: Frame) -> None:
        if self._writer is None or self._writer.is_closing():
            raise gone()
        send(self._writer, frame)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await receive(reader)) is not None:
                await self._take(frame)
        except Exception:  # noqa: BLE001 - logged; this process then serves no adapters
            logger.exception("What the first API server says cannot be followed")
        finally:
            self._lose()
        # A cancellation does not reach this line: the process ends anyway then.
        if not self._is_closed:
            self.on_loss()

    def _lose(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self.table.data.clear()  # names may have changed: serving no version is better than a wrong version
        self._is_lost = True
        self._has_all.set()
        self._is_ready.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(gone())
        logger.info("The connection to the first API server is lost: this one serves no adapters any more")

    async def _take(self, frame: Frame) -> None:
        if "change" in frame:
            # While the whole table is being sent, the leader waits for no acknowledgement (`has`) of a single change:
            # the answer to `all` acknowledges them together.
            self._change(frame["name"], frame["adapter"])
            if self._has_all.is_set():
                send(self._writer, {"has": frame["change"]})
        elif "relieve" in frame:  # await here, and in no task: `has` acknowledges this frame and all frames before
            try:
                await self.relieve()
            except Exception:  # noqa: BLE001 - the leases end later; go on following the leader's changes
                logger.exception("Leases of adapters without requests could not be ended")
            send(self._writer, {"has": frame["relieve"]})
        elif "id" in frame:  # the answer to a call, whose caller may have left
            if (answer := self._answers.get(frame["id"])) is not None and not answer.done():
                answer.set_result(frame)
        elif "abort" in frame:
            self.abort(frame["abort"])
        elif "all" in frame:
            send(self._writer, {"has": frame["all"]})
            self._has_all.set()
        elif "ready" in frame:
            self._is_ready.set()

    def _change(self, name: str, adapter: Frame | None) -> None:
        """Change the table as the leader says; `adapter` is None where the name is served no longer."""
        before = self.table.get(name)
        if adapter is None:
            self.table.data.pop(name, None)
        else:
            self.table.data[name] = self.request_of(adapter)
        self.on_change(name, before)


def has_started(folder: Path, pid: int) -> bool:
    """Return whether this process has begun to serve, as a follower of this folder's leader."""
    return _note_of(folder, pid).exists()


def _note_of(folder: Path, pid: int) -> Path:
    return folder / f"serves-{pid}"


async def end_without_leader(is_ending: Callable[[], bool]) -> None:
    """End this process as failed, unless `is_ending` says within seconds that vLLM shuts the process down.

    vLLM's supervisor sees the exit code. An exception would only end a task of the event loop, and not the process.
    """
    await asyncio.sleep(_OWN_END_S)
    if is_ending():
        return
    logger.error("This API server has lost the first one, which knows what is served, and ends")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def not_here(name: str) -> LoRAPluginsError:
    """The error where code other than `Follower` changes a follower's table."""
    return LoRAPluginsError(
        "a change of what is served, past the first API server",
        expected="the routes of /v1/loras, which the first API server answers",
        remedy="use these, or set --api-server-count 1",
        adapter=name,
    )


def gone() -> SourceUnavailable:
    """The error where the leader does not answer."""
    return SourceUnavailable(
        "no first API server any more, which knows what is served",
        expected="all API servers of this deployment",
        remedy="ask again once vllm serve has been started again",
    )
