"""Who may ask a source next: a name that is known never waits for those that are not, and a flood of those is bounded.

A name that nobody has had may be one of a flood. At one source so many are looked up at once, and each answer "no such
adapter" keeps its place for a moment, so that a flood takes a small part of the interpreter and asks the source no more
often than `absent_per_s`. Others wait, see `places.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from lora_plugins.absence import Absence
from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.places import PlaceLimits, Places

_T = TypeVar("_T")
# Names that were found before: as many wait as are served, each for as long as a look-up itself may take.
_KNOWN_WAITING, _KNOWN_WAIT_S = 10_000, 30.0


class LookUpsBusy(SourceUnavailable):
    """L006: more names wait for a source than may, or for too long; whether it has this one was not asked."""

    is_of_one_request = True


@dataclass(frozen=True, slots=True)
class LookUpLimits:
    """Of one source.

    Attributes:
        at_once: look-ups of names that are not known, and as many of those that are.
        absent_per_s: how often the source may answer that it has no such adapter, beyond the first `at_once`; None for
            no limit.
        waiting: names that are not known and wait. wait_s: for how long one does, in seconds.
    """

    at_once: int = 32
    absent_per_s: float | None = 100.0
    waiting: int = 500
    wait_s: float = 5.0


class LookUps:
    """Those at one source. For one event loop."""

    def __init__(self, limits: LookUpLimits) -> None:
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
        """What `look_up` answers once it is the turn of a name that `principal` asks for.

        Raises:
            LookUpsBusy: its wait is over, or too many wait.
            Whatever `look_up` raises.
        """
        if is_known:
            async with self._known.held(principal):
                return await look_up()
        place = await self._unknown.enter(principal)
        is_absent = False
        try:
            found = await look_up()
            is_absent = isinstance(found, Absence)
            return found
        finally:
            if is_absent and self._absent_per_s is not None:
                loop = asyncio.get_running_loop()
                self._rests_until = max(loop.time(), self._rests_until) + 1 / self._absent_per_s
                loop.call_at(self._rests_until, self._unknown.leave, place)
            else:
                self._unknown.leave(place)


def _places(limits: PlaceLimits, found: str) -> Places:
    expected = f"a turn within {limits.wait_s:g} s"
    return Places(limits, lambda *_: LookUpsBusy(found, expected=expected, remedy="ask again"))
