"""Admission to a source: who may ask the source now, and who may fetch from it.

A known name never waits for unknown names, and a flood of unknown names is bounded. A name that no source has had may
be one of a flood: each source has few places for unknown names, and each answer "no such adapter" keeps its place for a
moment, so that a flood takes a small part of the interpreter and asks the source at most `absent_per_s` times a second.
Other names wait, see `fair_places.py`.

While the source does not answer, its names are refused at once, by a circuit breaker. Failures in a row open the
breaker, and so does one look-up that nobody answered within its whole deadline, unless the source has answered another
look-up since. An open breaker admits one look-up every `retry_s`, whether the look-up before has ended or not: a
connection that hangs after the end of an outage delays nobody. The first answer, also a late answer, closes the
breaker. A source may find adapters, but fail or hang when their files are fetched, so fetches have a breaker of their
own, which failures of several adapters in a row open: failures of one may be that adapter's fault.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from lora_plugins.absence import Absence
from lora_plugins.errors import LoRAPluginsError, SourceUnavailable
from lora_plugins.events import BreakerClosed, BreakerOpened, Events
from lora_plugins.resolvers.fair_places import Most, PlaceLimits, Places
from lora_plugins.resolvers.single_flight import SingleFlight
from lora_plugins.resolvers.sources.remote_failures import FailureKind, RemoteFailure, Transient
from lora_plugins.resolvers.sources.retries import NoAnswer
from lora_plugins.resolvers.sources.source import Source

_T = TypeVar("_T")
# Names found before: as many may wait as are served, each for as long as a look-up itself may take.
_KNOWN_WAITING, _KNOWN_WAIT_S = 10_000, 30.0
# Fetches from one source at once, of them those of one principal, and those from a source that does not answer.
_FETCHES, _OF_ONE, _PROBES = 8, 4, 4
_FETCHES_WAITING = 10_000


class LookUpsBusy(SourceUnavailable):
    """L006: too many names wait for a source, or this name has waited too long; the source was not asked."""

    is_of_one_request = True


class FetchesBusy(SourceUnavailable):
    """L006: too many adapters wait for a fetch, or one has waited too long; a later request may find a place."""

    is_of_one_request = True


class BreakerOpen(SourceUnavailable):
    """L006: the source has not answered the look-ups before this one, and was not asked."""

    is_of_one_request = True  # nothing to remember: the breaker refuses as fast, and closes at the first answer

    @classmethod
    def of_source(cls) -> Self:
        """The refusal, without the last failure's text, which may name an adapter of another caller."""
        return cls(
            "a source that does not answer, and is asked only now and then until it does",
            expected="an answer of the source",
            remedy="ask again; see the server's log for the failure",
        )


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and how often an open breaker admits a look-up.

    Attributes:
        failures: failed look-ups in a row; each look-up has tried several times. Where failures say of which adapter
            they are, those of one adapter count once.
        retry_s: seconds between look-ups that an open breaker admits, and for which such a look-up's caller waits.
        by_silence: whether one look-up without any answer is enough.
    """

    failures: int = 5
    retry_s: float = 1.0
    by_silence: bool = True


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
    breaker: BreakerLimits = BreakerLimits()


# A fetch may take minutes, and its deadline may end in the midst of a large file: no silence.
_OF_FETCHES = BreakerLimits(failures=3, retry_s=2.0, by_silence=False)


class Breaker:
    """Whether a source answers: learns from what it awaits, and emits events under `label`; `clock` is in seconds."""

    def __init__(
        self,
        limits: BreakerLimits,
        label: str = "",
        events: Events | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.clock = limits, clock
        self._label, self._events = label, events or Events()
        self._failed: set[Hashable] = set()
        self._answered_at = float("-inf")
        self._opened_at: float | None = None
        self._retry_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether look-ups are refused, all but one every `retry_s`."""
        return self._opened_at is not None

    def check(self) -> None:
        """Raise BreakerOpen where open: also after a wait for a place, in which the breaker may have opened."""
        if self.is_open:
            raise BreakerOpen.of_source()

    def admits(self) -> bool:
        """Whether an open breaker lets a look-up begin now; then no other look-up for `retry_s`."""
        now = self.clock()
        if now < self._retry_at:
            return False
        self._retry_at = now + self.limits.retry_s
        return True

    async def judged(self, answer: Awaitable[_T], of: Hashable = None) -> _T:
        """An answer of the source, about the adapter `of`; an error that is no outage is an answer too."""
        began_at = self.clock()
        try:
            found = await answer
        except LoRAPluginsError as error:
            if isinstance(error, SourceUnavailable) and is_outage(error):
                self.failed(began_at, error, of)
            else:
                self.answered()
            raise
        self.answered()
        return found

    def failed(self, began_at: float, error: SourceUnavailable, of: Hashable = None) -> None:
        """Note the failure of a look-up, or of the adapter `of`.

        Only failures that several tries have met count: another kind of failure is an answer.
        """
        if began_at < self._answered_at or self.is_open:  # the source has answered since, or has failed before
            return
        self._failed.add(object() if of is None else of)
        kind = error.kind if isinstance(error, RemoteFailure) else None
        is_silence = isinstance(error, NoAnswer) or kind is FailureKind.TIMEOUT
        if len(self._failed) >= self.limits.failures or (self.limits.by_silence and is_silence):
            self._opened_at = self.clock()
            self._retry_at = self._opened_at + self.limits.retry_s
            self._events.emit(BreakerOpened(self._label, error))

    def answered(self) -> None:
        """Note an answer."""
        self._answered_at = self.clock()
        self._failed.clear()
        opened_at, self._opened_at = self._opened_at, None
        if opened_at is not None:
            self._events.emit(BreakerClosed(self._label, self._answered_at - opened_at))


class LookUps:
    """The look-ups at one source, with the label `source`. For one event loop."""

    def __init__(self, limits: LookUpLimits, source: str = "", events: Events | None = None) -> None:
        self._breaker = Breaker(limits.breaker, source, events)
        self._probes: SingleFlight[object, Any] = SingleFlight()
        self._absent_per_s = limits.absent_per_s
        known = PlaceLimits(limits.at_once, _KNOWN_WAITING, _KNOWN_WAIT_S)
        self._known = Places.of(known, LookUpsBusy, "a source that is slow to answer")
        self._unknown = Places.of(
            PlaceLimits(limits.at_once, limits.waiting, limits.wait_s),
            LookUpsBusy,
            "too many names that this server does not know, which wait to be looked up",
        )
        self._rests_until = 0.0

    async def run(self, look_up: Callable[[], Awaitable[_T]], *, is_known: bool, principal: Hashable = None) -> _T:
        """The answer of `look_up`, once a place for the name of `principal` is free.

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
        """Ask in spite of an open breaker, where a look-up is due; the caller waits for a moment only.

        Takes no place: look-ups that hang may have all places.
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
        self._probes, self._probed = 0, asyncio.Event()  # set once the last probe has ended
        self._probed.set()

    @asynccontextmanager
    async def turn(self, principal: Hashable) -> AsyncIterator[None]:
        """Inside, `principal` may fetch an adapter.

        While the source does not answer, one fetch begins every two seconds, four at once at most. Other callers wait
        for its end, but two seconds at most.

        Raises:
            FetchesBusy: the wait for a place is over, or too many wait. BreakerOpen: the source does not answer.
        """
        if self.breaker.is_open and self._probes < _PROBES:
            if self.breaker.admits():
                self._probes += 1
                self._probed = ended = asyncio.Event()
                try:
                    yield  # without a place: fetches that hang may have all places
                finally:
                    self._probes -= 1
                    ended.set()
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._probed.wait(), self.breaker.limits.retry_s)
        self.breaker.check()
        async with self._places.held(principal):
            self.breaker.check()
            yield


def few_at_once(found: str, wait_s: float) -> Places:
    """Eight places, half of them at most for one principal, so that another finds a place at once."""
    return Places.of(PlaceLimits(_FETCHES, _FETCHES_WAITING, wait_s), FetchesBusy, found, Most(_OF_ONE))


def fetches_of(source: Source, wait_s: float, events: Events) -> Fetches:
    """The fetches from one source, so that a source that hangs blocks no other source."""
    places = few_at_once(f"fetches from {source.label} that have not ended", wait_s)
    return Fetches(places, Breaker(_OF_FETCHES, f"{source.label} (fetches)", events))


def is_outage(error: BaseException) -> bool:
    """Whether an error is about the source, and no answer about one adapter, such as a denial."""
    return isinstance(error, (Transient, NoAnswer))
