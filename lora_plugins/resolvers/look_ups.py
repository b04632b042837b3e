"""Limits on look-ups at a source: a known name never waits for unknown names, and a flood of unknown names is bounded.

Where the source does not answer, nobody waits for the source, see `breaker.py`.

A name that no source has had may be one of a flood. Each source has few places for unknown names, and each answer "no
such adapter" keeps its place for a moment, so that a flood takes a small part of the interpreter and asks the source at
most `absent_per_s` times a second. Other names wait, see `places.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lora_plugins.absence import Absence
from lora_plugins.errors import SourceUnavailable
from lora_plugins.events import Events
from lora_plugins.resolvers.breaker import BreakerLimits, BreakerOpen, SourceBreaker
from lora_plugins.resolvers.places import PlaceLimits, Places

_T = TypeVar("_T")
# Names found before: as many may wait as are served, each for as long as a look-up itself may take.
_KNOWN_WAITING, _KNOWN_WAIT_S = 10_000, 30.0


class LookUpsBusy(SourceUnavailable):
    """L006: too many names wait for a source, or this name has waited too long; the source was not asked."""

    is_of_one_request = True


@dataclass(frozen=True, slots=True)
class LookUpLimits:
    """The limits of one source.

    Attributes:
        at_once: look-ups of unknown names at once, and as many of known names.
        absent_per_s: how often the source may answer "no such adapter", beyond the first `at_once`.
        waiting: unknown names that may wait. wait_s: seconds until a waiting name is refused.
        breaker: when the source counts as one that does not answer.
    """

    at_once: int = 32
    absent_per_s: float = 100.0
    waiting: int = 500
    wait_s: float = 5.0
    breaker: BreakerLimits = field(default_factory=BreakerLimits)


class LookUps:
    """The look-ups at one source, with the label `source`. For one event loop."""

    def __init__(self, limits: LookUpLimits, source: str = "", events: Events | None = None) -> None:
        self._breaker = SourceBreaker(limits.breaker, source, events or Events())
        self._probes: set[asyncio.Task[Any]] = set()
        self._absent_per_s = limits.absent_per_s
        self._known = _places(
            PlaceLimits(limits.at_once, _KNOWN_WAITING, _KNOWN_WAIT_S), "a source that is slow to answer"
        )
        self._unknown = _places(
            PlaceLimits(limits.at_once, limits.waiting, limits.wait_s),
            "too many names that this server does not know, which wait to be looked up",
        )
        self._rests_until = 0.0

    async def run(
        self,
        look_up: Callable[[], Awaitable[_T]],
        *,
        is_known: bool,
        principal: Hashable = None,
    ) -> _T:
        """The answer of `look_up`, once a place for the name of `principal` is free.

        Raises:
            LookUpsBusy: the wait is over, or too many names wait.
            BreakerOpen: the source does not answer.
            Errors of `look_up`.
        """
        if self._breaker.is_open:
            if not self._breaker.admits():
                raise BreakerOpen.of_source()
            return await self._probe(look_up)
        if is_known:
            async with self._known.held(principal):
                return await self._ask(look_up)
        # No `held` here: after an absence, the place stays taken until a timer gives the place back.
        place = await self._unknown.enter(principal)
        is_absent = False
        try:
            found = await self._ask(look_up)
            is_absent = isinstance(found, Absence)
            return found
        finally:
            if is_absent:
                loop = asyncio.get_running_loop()
                # Places come back one at a time, 1/`absent_per_s` apart, whatever the number of answers at this moment.
                self._rests_until = max(loop.time(), self._rests_until) + 1 / self._absent_per_s
                loop.call_at(self._rests_until, self._unknown.leave, place)
            else:
                self._unknown.leave(place)

    async def _ask(self, look_up: Callable[[], Awaitable[_T]], *, is_probe: bool = False) -> _T:
        """The answer of `look_up`, and what the breaker learns from the answer."""
        # The breaker may have opened while the name waited for a place.
        if self._breaker.is_open and not is_probe:
            raise BreakerOpen.of_source()
        return await self._breaker.judged(look_up())

    async def _probe(self, look_up: Callable[[], Awaitable[_T]]) -> _T:
        """Ask in spite of an open breaker, where a look-up is due; the caller waits for a moment only.

        Takes no place: look-ups that hang may have all places.
        """
        task = asyncio.ensure_future(self._ask(look_up, is_probe=True))
        self._probes.add(task)
        task.add_done_callback(self._probe_ended)
        # The look-up goes on without its caller: a slow source must be able to close the breaker.
        done, _ = await asyncio.wait([task], timeout=self._breaker.limits.retry_s)
        if not done:
            raise BreakerOpen.of_source()
        return task.result()

    def _probe_ended(self, task: asyncio.Task[Any]) -> None:
        self._probes.discard(task)
        if not task.cancelled():
            task.exception()  # read the error: asyncio logs errors that nobody reads


def _places(limits: PlaceLimits, found: str) -> Places:
    expected = f"a turn within {limits.wait_s:g} s"
    return Places(limits, lambda *_: LookUpsBusy(found, expected=expected, remedy="ask again"))
