"""Admission to a source: who may ask the source now for a name, and who may fetch an adapter from it.

Runs on the event loop of an API server. `search.py` runs each look-up through the `LookUps` of its source, and
`versions.py` runs each fetch through the source's `Fetches`; callers wait there for a place, or are refused.

A known name never waits for unknown names, and a flood of unknown names is bounded. A name that no source has had may
be one of a flood: each source has few places for unknown names, and each answer "no such adapter" keeps its place for a
moment, so that a flood takes a small part of the interpreter and asks the source at most `absent_per_s` times a second.
How waiting callers take turns is in `fair_places.py`.

While the source does not answer, callers are refused at once, by a circuit breaker (`breaker.py`). A source may find
adapters, but fail or hang when their files are fetched, so fetches have a breaker of their own, which failures of
several adapters in a row open: failures of one may be that adapter's fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lora_plugins.absence import Absence
from lora_plugins.errors import SourceUnavailable
from lora_plugins.events import Events
from lora_plugins.resolvers.breaker import Breaker, BreakerLimits, BreakerOpen
from lora_plugins.resolvers.fair_places import Most, PlaceLimits, Places
from lora_plugins.resolvers.single_flight import SingleFlight
from lora_plugins.resolvers.sources.source import Source

_T = TypeVar("_T")
_WAITING = 10_000  # known names and fetches that may wait: as many as are served
_KNOWN_WAIT_S = 30.0  # as long as a look-up itself may take
_FETCHES = 8  # from one source at once
_FETCHES_OF_ONE = 4  # of these, for one principal
_PROBES = 4  # fetches at once from a source that does not answer
# A fetch may take minutes, and its deadline may end in the midst of a large file: no silence.
_BREAKER_OF_FETCHES = BreakerLimits(failures=3, retry_s=2.0, by_silence=False)


class LookUpsBusy(SourceUnavailable):
    """L006: too many names wait for a source, or this name has waited too long; the source was not asked."""

    is_of_one_request = True


class FetchesBusy(SourceUnavailable):
    """L006: too many adapters wait for a fetch, or one has waited too long; a later request may find a place."""

    is_of_one_request = True


@dataclass(frozen=True, slots=True)
class LookUpLimits(PlaceLimits):
    """The limits of look-ups of unknown names at one source; as many known names are looked up at once.

    Attributes:
        absent_per_s: how often the source may answer "no such adapter", beyond the first `at_once`.
    """

    at_once: int | None = 32
    waiting: int = 500
    wait_s: float = 5.0
    absent_per_s: float = 100.0


class LookUps:
    """The look-ups at one source, with the label `source`: their places, and their breaker. For one event loop."""

    def __init__(self, limits: LookUpLimits, source: str = "", events: Events | None = None) -> None:
        self._breaker = Breaker(BreakerLimits(), source, events)
        self._probes: SingleFlight[object, Any] = SingleFlight()  # each with a key of its own: they go on alone
        self._absent_per_s = limits.absent_per_s
        known = replace(limits, waiting=_WAITING, wait_s=_KNOWN_WAIT_S)
        self._known = Places.of(known, LookUpsBusy, "a source that is slow to answer")
        flood = "too many names that this server does not know, which wait to be looked up"
        self._unknown = Places.of(limits, LookUpsBusy, flood)
        self._rests_until = 0.0  # when the last place that rests after an absence comes back, in the loop's time

    async def run(self, look_up: Callable[[], Awaitable[_T]], *, is_known: bool, principal: Hashable = None) -> _T:
        """The answer of `look_up`, once a place for a name that `principal` has asked for is free.

        Raises:
            LookUpsBusy: the wait is over, or too many names wait.
            BreakerOpen: the source does not answer.
            Errors of `look_up`.
        """
        if self._breaker.is_open:
            return await self._probe(look_up)
        places = self._known if is_known else self._unknown
        # No `held` here: after an absence, the place stays taken until a timer gives the place back.
        place, found = await places.enter(principal), None
        try:
            self._breaker.check()
            found = await self._breaker.judged(look_up())
            return found
        finally:
            if isinstance(found, Absence) and not is_known:
                loop = asyncio.get_running_loop()
                # Places come back one at a time, 1/`absent_per_s` apart, whatever the number of answers at this moment.
                self._rests_until = max(loop.time(), self._rests_until) + 1 / self._absent_per_s
                loop.call_at(self._rests_until, places.leave, place)
            else:
                places.leave(place)

    async def _probe(self, look_up: Callable[[], Awaitable[_T]]) -> _T:
        """Ask in spite of an open breaker, if a look-up is due; the caller waits for `retry_s` at most.

        The look-up takes no place: look-ups that hang may have all places.
        """
        if self._breaker.admits():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._breaker.limits.retry_s):
                    # The look-up goes on without its caller: a slow source must be able to close the breaker.
                    found: _T = await self._probes.run(object(), lambda: self._breaker.judged(look_up()))
                    return found
        raise BreakerOpen.of_source()


class Fetches:
    """The fetches from one source: their places, and their breaker. For one event loop."""

    def __init__(self, places: Places, breaker: Breaker) -> None:
        self._places, self.breaker = places, breaker
        self._probes = 0  # fetches that run in spite of an open breaker
        self._last_probe_ended = asyncio.Event()
        self._last_probe_ended.set()  # before the first probe there is none to wait for

    @asynccontextmanager
    async def turn(self, principal: Hashable) -> AsyncIterator[None]:
        """Inside, `principal` may fetch an adapter.

        While the breaker is open, one fetch (a probe) begins every two seconds, four at once at most. Other callers
        wait for the end of the last probe, but two seconds at most, and are refused if the breaker is open then.

        Raises:
            FetchesBusy: the wait for a place is over, or too many wait. BreakerOpen: the source does not answer.
        """
        if self.breaker.is_open and self._probes < _PROBES:
            if self.breaker.admits():
                self._probes += 1
                self._last_probe_ended = ended = asyncio.Event()
                try:
                    yield  # without a place: fetches that hang may have all places
                finally:
                    self._probes -= 1
                    ended.set()
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._last_probe_ended.wait(), self.breaker.limits.retry_s)
        self.breaker.check()
        async with self._places.held(principal):
            self.breaker.check()
            yield


def few_at_once(found: str, wait_s: float) -> Places:
    """Eight places, half of them at most for one principal, so that another finds a place at once."""
    return Places.of(PlaceLimits(_FETCHES, _WAITING, wait_s), FetchesBusy, found, Most(_FETCHES_OF_ONE))


def fetches_of(source: Source, wait_s: float, events: Events) -> Fetches:
    """The fetches from one source, so that a source that hangs blocks no other source."""
    places = few_at_once(f"fetches from {source.label} that have not ended", wait_s)
    return Fetches(places, Breaker(_BREAKER_OF_FETCHES, f"{source.label} (fetches)", events))
