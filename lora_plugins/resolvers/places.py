"""Places for what only a few may do at once: each wait is bounded in time, and the queue in length.

Principals take turns: of those that wait, the principal with the fewest places is next, and of the principal with the
most names waiting the last is refused. Those of one principal enter as they came. Where `of_one` is less than
`at_once`, no principal holds all places, however long it keeps them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lora_plugins.errors import LoRAPluginsError


@dataclass(frozen=True, slots=True)
class PlaceLimits:
    """How many places there are, and who may wait for them.

    Attributes:
        at_once: places. of_one: those of one principal at most; None for all.
        waiting: how many wait at most. wait_s: for how long each does, in seconds.
    """

    at_once: int
    waiting: int
    wait_s: float
    of_one: int | None = None


@dataclass(eq=False, slots=True)
class _Waiting:
    principal: Hashable
    number: int
    place: asyncio.Future[None]


class Places:
    """Those of one kind of work. For one event loop.

    Args:
        refusal: makes the error of whoever has waited too long, or of one too many that wait.
    """

    def __init__(self, limits: PlaceLimits, refusal: Callable[[], LoRAPluginsError]) -> None:
        self._limits = limits
        self._refusal = refusal
        self._free = limits.at_once
        self._most = limits.at_once if limits.of_one is None else limits.of_one
        self._waiting: dict[Hashable, deque[_Waiting]] = {}  # by principal, the first to come first
        self._numbers = itertools.count()
        self._held: Counter[Hashable] = Counter()  # places, by principal

    @asynccontextmanager
    async def held(self, principal: Hashable = None) -> AsyncIterator[None]:
        """Inside, `principal` has a place; raises what `enter` raises."""
        await self.enter(principal)
        try:
            yield
        finally:
            self.leave(principal)

    async def enter(self, principal: Hashable) -> None:
        """Take a place for `principal`, at once or when others have left theirs.

        Raises:
            LoRAPluginsError: of `refusal`: the wait is over, or too many wait.
        """
        if self._free and self._held[principal] < self._most:  # nobody waits who could enter
            self._free -= 1
            self._held[principal] += 1
            return
        loop = asyncio.get_running_loop()
        one = _Waiting(principal, next(self._numbers), loop.create_future())
        self._waiting.setdefault(principal, deque()).append(one)
        if sum(map(len, self._waiting.values())) > self._limits.waiting:
            self._refuse(max(self._waiting.values(), key=len)[-1])
        timer = loop.call_later(self._limits.wait_s, self._refuse, one)
        try:
            await one.place
        except asyncio.CancelledError:
            if not one.place.done() or one.place.cancelled():
                self._forget(one)
            elif one.place.exception() is None:
                self.leave(principal)  # it got its place in the moment in which it was cancelled
            raise
        finally:
            timer.cancel()

    def leave(self, principal: Hashable) -> None:
        """Give a place of `principal` to whoever is next."""
        self._held -= Counter({principal: 1})
        self._free += 1
        while self._free:
            able = [queue[0] for principal, queue in self._waiting.items() if self._held[principal] < self._most]
            if not able:
                return
            one = min(able, key=lambda waiting: (self._held[waiting.principal], waiting.number))
            self._forget(one)
            if not one.place.done():  # it is, where its task has been cancelled and has not run since
                self._free -= 1
                self._held[one.principal] += 1
                one.place.set_result(None)

    def _refuse(self, one: _Waiting) -> None:
        if not one.place.done():
            self._forget(one)
            one.place.set_exception(self._refusal())

    def _forget(self, one: _Waiting) -> None:
        """End its wait, if it has not ended."""
        queue = self._waiting.get(one.principal, deque())
        if one in queue:
            queue.remove(one)
        if not queue:
            self._waiting.pop(one.principal, None)
