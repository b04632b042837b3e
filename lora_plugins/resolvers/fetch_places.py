"""Limits on concurrent fetches: a few from each source, and never all places for one principal."""

from __future__ import annotations

from lora_plugins.errors import SourceUnavailable
from lora_plugins.events import Events
from lora_plugins.resolvers.admission import Breaker, BreakerLimits, Fetches
from lora_plugins.resolvers.places import Most, PlaceLimits, Places
from lora_plugins.resolvers.sources.source import Source

_AT_ONCE, _OF_ONE = 8, 4
_WAITING = 10_000
# A fetch may take minutes, and its deadline may end in the midst of a large file: no silence.
_BREAKER = BreakerLimits(failures=3, retry_s=2.0, by_silence=False)


class FetchesBusy(SourceUnavailable):
    """L006: too many adapters wait for a fetch, or one has waited too long; a later request may find a place."""

    is_of_one_request = True


class FetchPlaces:
    """The places of one resolver; each wait ends after `wait_s` seconds, with `FetchesBusy`.

    Attributes:
        reading: for adapters of the store that a process reads, apart from fetches.
        converting: for adapters that are rewritten into the engine's form.
    """

    def __init__(self, wait_s: float, events: Events) -> None:
        self._limits, self._events = PlaceLimits(_AT_ONCE, _WAITING, wait_s), events
        self._by_source: dict[int, Fetches] = {}  # sources of other packages need not be keys of a dict
        self.reading = self._places("adapters that are being read")
        self.converting = self._places("adapters that are being converted")

    def at(self, source: Source) -> Fetches:
        """The fetches from one source, so that a source that hangs blocks no other source."""
        found = self._by_source.get(id(source))
        if found is None:
            places = self._places(f"fetches from {source.label} that have not ended")
            breaker = Breaker(_BREAKER, f"{source.label} (fetches)", self._events)
            found = self._by_source[id(source)] = Fetches(places, breaker)
        return found

    def _places(self, found: str) -> Places:
        # Half of the places at most for one principal, so that another finds a place at once.
        return Places.of(self._limits, FetchesBusy, found, Most(_OF_ONE))
