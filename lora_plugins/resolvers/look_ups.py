"""Who may ask a source next: a name that is known never waits for those that are not, and a flood of those is bounded.

A name that nobody has had may be one of a flood. At one source so many are looked up at once, and each answer "no such
adapter" keeps its place for a moment, so that a flood takes a small part of the interpreter and asks the source no more
often than `absent_per_s`. Others wait, for a limited time and in limited number. Principals take turns: of those that
wait, the one that has the fewest places is next, and of the one with the most names waiting the last is refused. Names
of one principal are looked up as they came.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from lora_plugins.absence import Absence
from lora_plugins.errors import SourceUnavailable

_T = TypeVar("_T")


class LookUpsBusy(SourceUnavailable):
    """L006: more names that are not known here wait for a source than may; whether it has this one was not asked."""


@dataclass(frozen=True, slots=True)
class LookUpLimits:
    """Of one source.

    Attributes:
        at_once: look-ups of names that are not known, and as many of those that are.
        absent_per_s: how often the source may answer that it has no such adapter, beyond the first `at_once`; None for
            no limit.
        waiting: names that wait. wait_s: for how long one does, in seconds.
    """

    at_once: int = 32
    absent_per_s: float | None = 100.0
    waiting: int = 500
    wait_s: float = 5.0


@dataclass(eq=False, slots=True)
class _Waiting:
    principal: Hashable
    place: asyncio.Future[None]


class LookUps:
    """Those at one source. For one event loop."""

    def __init__(self, limits: LookUpLimits) -> None:
        self._limits = limits
        self._known = asyncio.Semaphore(limits.at_once)
        self._free = limits.at_once
        self._waiting: list[_Waiting] = []  # the first to come first
        self._rests_until = 0.0
        self._held: Counter[Hashable] = Counter()  # places, by principal

    async def run(
        self,
        look_up: Callable[[], Awaitable[_T]],
        *,
        is_known: bool,
        principal: Hashable = None,
    ) -> _T:
        """What `look_up` answers once it is the turn of a name that `principal` asks for.

        Raises:
            LookUpsBusy: its wait is over, or too many wait.
            Whatever `look_up` raises.
        """
        if is_known:
            async with self._known:
                return await look_up()
        await self._enter(principal)
        is_absent = False
        try:
            found = await look_up()
            is_absent = isinstance(found, Absence)
            return found
        finally:
            self._leave(principal, rests=is_absent)

    async def _enter(self, principal: Hashable) -> None:
        if self._free:  # nobody waits
            self._free -= 1
            self._held[principal] += 1
            return
        loop = asyncio.get_running_loop()
        one = _Waiting(principal, loop.create_future())
        self._waiting.append(one)
        if len(self._waiting) > self._limits.waiting:
            ((most, _),) = Counter(waiting.principal for waiting in self._waiting).most_common(1)
            self._refuse(next(waiting for waiting in reversed(self._waiting) if waiting.principal == most))
        timer = loop.call_later(self._limits.wait_s, self._refuse, one)
        try:
            await one.place
        except asyncio.CancelledError:
            if one in self._waiting:
                self._waiting.remove(one)
            elif one.place.done() and not one.place.cancelled() and one.place.exception() is None:
                self._leave(principal, rests=False)  # it got its place in the moment in which it was cancelled
            raise
        finally:
            timer.cancel()

    def _leave(self, principal: Hashable, *, rests: bool) -> None:
        if not rests or self._limits.absent_per_s is None:
            self._give_place(principal)
            return
        loop = asyncio.get_running_loop()
        self._rests_until = max(loop.time(), self._rests_until) + 1 / self._limits.absent_per_s
        loop.call_at(self._rests_until, self._give_place, principal)

    def _give_place(self, principal: Hashable) -> None:
        """Give the place of `principal` to who has the fewest, the first of those to come."""
        self._held -= Counter({principal: 1})
        while self._waiting:
            one = min(self._waiting, key=lambda waiting: self._held[waiting.principal])
            self._waiting.remove(one)
            if not one.place.done():  # it is, where its task has been cancelled and has not run since
                self._held[one.principal] += 1
                one.place.set_result(None)
                return
        self._free += 1

    def _refuse(self, one: _Waiting) -> None:
        if one.place.done():
            return
        self._waiting.remove(one)
        one.place.set_exception(
            LookUpsBusy(
                "too many names that this server does not know, which wait to be looked up",
                expected=f"a turn within {self._limits.wait_s:g} s",
                remedy="ask again",
            )
        )
