"""Limits on concurrent fetches: a few from each source, and never all places for one principal.

A source may find adapters, but fail or hang when their files are fetched. So fetches have a breaker of their own, which
failures of several adapters in a row open: failures of one may be that adapter's fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from functools import partial

from lora_plugins.errors import SourceUnavailable
from lora_plugins.events import Events
from lora_plugins.resolvers.breaker import BreakerLimits, BreakerOpen, SourceBreaker
from lora_plugins.resolvers.places import Most, PlaceLimits, Places
from lora_plugins.resolvers.sources.source import Source

_AT_ONCE, _OF_ONE = 8, 4
_WAITING = 10_000
# A fetch may take minutes, and its deadline may end in the midst of a large file: no silence.
_BREAKER = BreakerLimits(failures=3, retry_s=2.0, by_silence=False)
_PROBES = 4


class FetchesBusy(SourceUnavailable):
    """L006: too many adapters wait for a fetch, or one has waited too long; a later request may find a place."""

    is_of_one_request = True


class Fetches:
    """The fetches from one source: their places, and their breaker. For one event loop."""

    def __init__(self, places: Places, breaker: SourceBreaker) -> None:
        self._places, self.breaker = places, breaker
        self._probes = 0
        self._probed = asyncio.Event()  # set once the last probe has ended
        self._probed.set()

    @asynccontextmanager
    async def turn(self, principal: Hashable, is_here: Callable[[], Awaitable[bool]]) -> AsyncIterator[None]:
        """Inside, `principal` may fetch an adapter; one that `is_here`, in the store, waits for nothing.

        While the source does not answer, one fetch begins every two seconds, four at once at most. Other callers wait
        for its end, but two seconds at most.

        Raises:
            FetchesBusy: the wait for a place is over, or too many wait. BreakerOpen: the source does not answer.
        """
        if await is_here():
            yield
            return
        if self.breaker.is_open:
            if self._probes < _PROBES and self.breaker.admits():
                async with self._probe():  # without a place: fetches that hang may have all places
                    yield
                return
            if self._probes < _PROBES:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._probed.wait(), self.breaker.limits.retry_s)
            if self.breaker.is_open:
                raise BreakerOpen.of_source()
        async with self._places.held(principal):
            # The breaker may have opened while the adapter waited for a place.
            if self.breaker.is_open:
                raise BreakerOpen.of_source()
            yield

    @asynccontextmanager
    async def _probe(self) -> AsyncIterator[None]:
        self._probes += 1
        self._probed = ended = asyncio.Event()
        try:
            yield
        finally:
            self._probes -= 1
            ended.set()


class FetchPlaces:
    """The places of one resolver; each wait ends after `wait_s` seconds, with `FetchesBusy`.

    Attributes:
        reading: for adapters of the store that a process reads, apart from fetches.
        converting: for adapters that are rewritten into the engine's form.
    """

    def __init__(self, wait_s: float, events: Events) -> None:
        self._wait_s, self._events = wait_s, events
        self._by_source: dict[int, Fetches] = {}  # sources of other packages need not be keys of a dict
        self.reading = self._places("adapters that are being read")
        self.converting = self._places("adapters that are being converted")

    def at(self, source: Source) -> Fetches:
        """The fetches from one source, so that a source that hangs blocks no other source."""
        found = self._by_source.get(id(source))
        if found is None:
            places = self._places(f"fetches from {source.label} that have not ended")
            breaker = SourceBreaker(_BREAKER, f"{source.label} (fetches)", self._events)
            found = self._by_source[id(source)] = Fetches(places, breaker)
        return found

    def _places(self, found: str) -> Places:
        # Half of the places at most for one principal, so that another finds a place at once.
        limits = PlaceLimits(_AT_ONCE, _WAITING, self._wait_s)
        expected = f"a turn within {self._wait_s:g} s"
        refusal = partial(FetchesBusy, found, expected=expected, remedy="ask again")
        return Places(limits, lambda *_: refusal(), lambda _: Most(_OF_ONE))
