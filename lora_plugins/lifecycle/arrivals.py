"""Limits for the bodies of pushes while they arrive, so that no sender fills the store or holds all places.

Runs in the event loop of the leading API server, for `pushing.py`: pieces of an HTTP body go in, and come out once they
may be written. A principal has a few places for bodies, each body must keep a least rate, and has room in the store
before its bytes come; a body that does not say its size gets room in steps. The bodies of a principal together take at
most its share of the store's budget (`principal_limits.Share`), so they evict no more than that.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import cast

from lora_plugins.errors import NoFreeSlot, SlowBody
from lora_plugins.lifecycle.principal_limits import Share
from lora_plugins.resolvers.fair_places import Most, PlaceLimits, Places
from lora_plugins.store.store import Store

_AT_ONCE, _OF_ONE, _WAITING = 8, 4, 10_000  # bodies that arrive; of these, of one principal; bodies that wait
_LEAST_BYTES, _LEAST_S = 1 << 20, 30.0  # each MiB of a body must come in so many seconds
_STEP_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a push of `sender`, which `owns` some names; `size_bytes` is None where the body does not say."""

    pieces: AsyncIterator[bytes]
    size_bytes: int | None
    sender: Share
    owns: Callable[[str], bool]


class BodyRoom(AsyncExitStack):
    """The room of one body in the store, until the end of the block; other processes see the room as taken.

    `aclose` ends the room before: from there on, the store counts the body's bytes as those of a version.

    Args:
        left_bytes: what a body of some size leaves of its sender's share; None for no limit.
    """

    def __init__(self, store: Store, left_bytes: Callable[[int], int | None]) -> None:
        super().__init__()
        self._store, self._left_bytes = store, left_bytes
        self.size_bytes = 0

    async def grow(self, size_bytes: int, spare_bytes: int = 0) -> None:
        """Have room for so many bytes in all, and for spare bytes as far as the share goes.

        Raises:
            OutOfMemory: more than is left of the sender's share of the store's budget.
            NoFreeSlot: the store has no room now.
        """
        left_bytes = self._left_bytes(size_bytes)
        size_bytes += spare_bytes if left_bytes is None else min(spare_bytes, left_bytes)
        more_bytes = size_bytes - self.size_bytes
        await self.enter_async_context(self._store.reserve(more_bytes))
        self.size_bytes = size_bytes


class Arrivals:
    """The places for bodies that arrive, and their limits. For one event loop.

    Args:
        timeout_s: the longest wait for a place, and the longest silence of a sender.
        max_body_bytes: counted for a body that does not say its size.
        most_s: the longest time for a whole body; None for no limit.
    """

    def __init__(self, store: Store, timeout_s: float, max_body_bytes: int, most_s: float | None = None) -> None:
        self._store, self._timeout_s, self._max_body_bytes = store, timeout_s, max_body_bytes
        self._most_s = math.inf if most_s is None else most_s
        # Half of the places at most for one principal, so that another finds a place at once.
        self._places = Places(
            PlaceLimits(_AT_ONCE, _WAITING, timeout_s),
            self._refusal,
            lambda sender: Most(_OF_ONE, self.most_bytes(cast(Share, sender))),
        )

    def place(self, body: Body) -> AbstractAsyncContextManager[None]:
        """Inside, a body may be received; raises NoFreeSlot where the wait is over, or too many wait."""
        size_bytes = self._max_body_bytes if body.size_bytes is None else body.size_bytes
        return self._places.held(body.sender, size_bytes=size_bytes)

    def most_bytes(self, sender: Share) -> int | None:
        """The share of a sender in the store's budget; None without a limit."""
        return int(sender.part * self._store.max_bytes) if sender.is_limit else None

    async def pieces(self, body: Body, room: BodyRoom) -> AsyncIterator[bytes]:
        """The pieces of a body, which grow its room; only waits for the sender count as time.

        Raises:
            SlowBody: no byte comes, or a MiB or the whole body takes too long.
            OutOfMemory, NoFreeSlot: of `BodyRoom.grow`.
        """
        await room.grow(body.size_bytes or 0, _STEP_BYTES if body.size_bytes is None else 0)
        # Seconds are left for the bytes up to `due_bytes` (`due_s`), and for the whole body (`left_s`).
        received_bytes, due_bytes, due_s, left_s = 0, _LEAST_BYTES, _LEAST_S, self._most_s
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(min(self._timeout_s, due_s, left_s)):
                    piece = await anext(body.pieces)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise SlowBody(
                    f"a body of which {received_bytes} bytes have come",
                    expected=f"{_LEAST_BYTES} bytes every {_LEAST_S:g} s, no silence of {self._timeout_s:g} s"
                    + (f", and the whole within {self._most_s:g} s" if self._most_s < math.inf else ""),
                    remedy="push again, on a faster connection, or raise LORA_PLUGINS_FETCH_MAX_S where it is set",
                ) from None
            waited_s = time.monotonic() - began
            left_s, due_s = left_s - waited_s, due_s - waited_s
            received_bytes += len(piece)
            if received_bytes >= due_bytes:
                due_bytes, due_s = received_bytes + _LEAST_BYTES, _LEAST_S
            if received_bytes > room.size_bytes:
                await room.grow(received_bytes, max(_STEP_BYTES, received_bytes // 8))
            yield piece

    def _refusal(self, sender: Hashable, in_use: int) -> NoFreeSlot:
        return NoFreeSlot(
            f"{in_use} pushes of {cast(Share, sender).label or 'this server'} that arrive",
            expected=f"{_OF_ONE} of a key at once, {_AT_ONCE} in all, and a turn within {self._timeout_s:g} s",
            remedy="push again later",
        )
