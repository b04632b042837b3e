"""Limits on concurrent fetches: a few from each source, and never all places for one principal."""

from __future__ import annotations

from functools import partial

from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.places import Most, PlaceLimits, Places
from lora_plugins.resolvers.sources.source import Source

_AT_ONCE, _OF_ONE = 8, 4
_WAITING = 10_000


class FetchesBusy(SourceUnavailable):
    """L006: too many adapters wait for a fetch, or one has waited too long; a later request may find a place."""

    is_of_one_request = True


class FetchPlaces:
    """The places of one resolver; each wait ends after `wait_s` seconds, with `FetchesBusy`.

    Attributes:
        reading: for adapters of the store that a process reads, apart from fetches.
        converting: for adapters that are rewritten into the engine's form.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._by_source: dict[int, Places] = {}  # sources of other packages need not be keys of a dict
        self.reading = self._places("adapters that are being read")
        self.converting = self._places("adapters that are being converted")

    def at(self, source: Source) -> Places:
        """The places of one source, so that a source that hangs blocks no other source."""
        found = self._by_source.get(id(source))
        if found is None:
            found = self._by_source[id(source)] = self._places(f"fetches from {source.label} that have not ended")
        return found

    def _places(self, found: str) -> Places:
        # Half of the places at most for one principal, so that another finds a place at once.
        limits = PlaceLimits(_AT_ONCE, _WAITING, self._wait_s)
        expected = f"a turn within {self._wait_s:g} s"
        refusal = partial(FetchesBusy, found, expected=expected, remedy="ask again")
        return Places(limits, lambda *_: refusal(), lambda _: Most(_OF_ONE))
