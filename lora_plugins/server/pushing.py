"""Pushes: an adapter in a request's body becomes the next version of a name: verified, loaded beside, and swapped.

Each name has one push at a time. The newest push that comes meanwhile waits, and replaces an older push that waits: a
trainer's earlier step is not worth loading.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.errors import NoFreeSlot, PushSuperseded
from lora_plugins.resolvers.sources.pushed import PushedAdapter
from lora_plugins.server.lifecycle import Lifecycle
from lora_plugins.server.swapping import KEPT_VERSIONS, VersionChange
from lora_plugins.store.errors import FullDisk, store_errors

_MINUTE_S = 60.0
# Writes the request's body to a directory; returns the SHA-256 of the whole body.
Receive = Callable[[Path], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class ServedPush:
    """A push whose version is served.

    Attributes:
        waited_s: seconds until the push of this name before had ended. received_s: seconds until all bytes were here.
        served_s: seconds until the version was verified, loaded, and swapped in.
    """

    change: VersionChange
    waited_s: float
    received_s: float
    served_s: float


class _Turns:
    """The pushes of one name: the running push has the object; `next` is the push that waits."""

    def __init__(self) -> None:
        self.next: asyncio.Future[None] | None = None

    def pass_on(self) -> bool:
        """Let the waiting push begin; False where no push waits."""
        following, self.next = self.next, None
        if following is None or following.done():
            return False
        following.set_result(None)
        return True


class Pushes:
    """Receives adapters for one server; for one event loop."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._turns: dict[str, _Turns] = {}
        self._times: dict[str, deque[float]] = {}  # of each principal's pushes within the last minute

    def count(self, label: str, per_minute: int) -> None:
        """Count a push of a principal, before a byte of the push is read.

        Raises:
            NoFreeSlot: the principal has pushed as often as it may within a minute.
        """
        now, times = time.monotonic(), self._times.setdefault(label, deque())
        while times and times[0] <= now - _MINUTE_S:
            times.popleft()
        if len(times) >= per_minute:
            refusal = NoFreeSlot(
                f"{len(times)} pushes of {label} within a minute",
                expected=f"{per_minute} at most",
                remedy="push again later, or have the operator set pushes_per_minute in the policy",
            )
            refusal.retry_after_s = math.ceil(times[0] + _MINUTE_S - now)
            raise refusal
        times.append(now)

    async def push(
        self,
        name: str,
        receive: Receive,
        *,
        expects: str | None = None,
        moves: bool = False,
        pins: bool = False,
        kept_versions: int = KEPT_VERSIONS,
    ) -> ServedPush:
        """Serve the files that `receive` writes as the next version of `name`.

        Args:
            name: without a revision.
            receive: writes the files.
            expects: the digest that must be served now, or `ANY_VERSION`; checked before and after receiving the bytes.
            moves: running requests go on with the new version, from one step on.
            pins: the version is pinned, too.
            kept_versions: number of earlier versions that stay in the store for `name@digest` and a rollback.

        Raises:
            PushSuperseded: a later push of this name came while this push waited.
            VersionMismatch: another version is served than expected.
            LoRAPluginsError: the version cannot be served. Nothing has changed then, and no file is left.
        """
        began = time.perf_counter()
        self._lifecycle.check_pushed(name, expects)
        async with self._turn(name):
            waited = time.perf_counter()
            # Another push may have changed the served version during the wait.
            self._lifecycle.check_pushed(name, expects)
            async with self._directory() as directory:
                with store_errors():
                    body_sha256 = await receive(directory)
                    pushed = await asyncio.to_thread(PushedAdapter.of, name, directory, body_sha256)
                received = time.perf_counter()
                change = await self._lifecycle.take(
                    name, pushed, expects=expects, moves=moves, pins=pins, kept_versions=kept_versions
                )
        served = time.perf_counter()
        return ServedPush(change, waited - began, received - waited, served - received)

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        turns = self._turns.get(name)
        if turns is None:
            turns = self._turns[name] = _Turns()
        else:
            await self._wait(name, turns)
        try:
            yield
        finally:
            self._pass_on(name, turns)

    async def _wait(self, name: str, turns: _Turns) -> None:
        if turns.next is not None and not turns.next.done():
            # Only the newest push may wait, so refuse the push that waited so far.
            turns.next.set_exception(
                PushSuperseded(
                    "a later push of this name",
                    adapter=name,
                    remedy="nothing, if the later push is yours; otherwise see what is served, and push with If-Match",
                )
            )
        mine = turns.next = asyncio.get_running_loop().create_future()
        try:
            await mine
        except BaseException:
            if turns.next is mine:
                turns.next = None
            elif mine.done() and not mine.cancelled() and mine.exception() is None:
                self._pass_on(name, turns)  # the turn came at the moment of the caller's cancellation
            raise

    def _pass_on(self, name: str, turns: _Turns) -> None:
        if not turns.pass_on():
            del self._turns[name]

    @asynccontextmanager
    async def _directory(self) -> AsyncIterator[Path]:
        """A directory of the store for the files received, removed at the end."""
        store = self._lifecycle.server.resolver.store
        directory = store.layout.new_temporary(store.processes.me())
        with store_errors():
            await asyncio.to_thread(directory.mkdir)
        try:
            yield directory
        except FullDisk:  # the body cannot be read twice, but make room for the next push
            arrived_bytes = sum(file.stat().st_size for file in directory.iterdir())
            # Without the part that has arrived, which hides what a quota leaves; the whole is larger.
            await asyncio.to_thread(store.remove_temporary, directory)
            await asyncio.to_thread(store.give_way, 2 * arrived_bytes + 1, 0)
            raise
        finally:
            # Shielded: a cancelled push must not leave its files.
            await asyncio.shield(asyncio.to_thread(store.remove_temporary, directory))
