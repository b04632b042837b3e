"""Places for work that only a few may do at once: each wait is bounded in time, and the queue in length.

Runs on the event loop of an API server, around look-ups, fetches, reads, pushes, and requests of principals with a
share. A caller enters on behalf of a principal (who has sent the request), perhaps after a wait, works, and leaves; or
gets the error that `Places` makes. The work is about a thing, such as an adapter.

The next place goes to the waiting principal with the fewest places; a full queue refuses the last caller of the
principal with the most waiting callers. Callers of one principal enter in order, so a large thing does not starve
behind smaller things. Where `Most` limits a principal to some of the places, others find places however long the
principal's work takes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from lora_plugins.errors import LoRAPluginsError


@dataclass(frozen=True, slots=True)
class PlaceLimits:
    """The number of places, and limits of the queue.

    Attributes:
        at_once: the number of places; None where only the places of each principal are limited.
        waiting: callers that may wait.
        wait_s: seconds until a waiting caller is refused.
    """

    at_once: int | None
    waiting: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Most:
    """Limits of one principal: places, and bytes of all things in the principal's places; None for no limit."""

    places: int | None = None
    size_bytes: float | None = None


@dataclass(eq=False, slots=True)
class Place:
    """The place of one caller, had or waited for; callers of one principal share a place for the same thing.

    Attributes:
        size_bytes: of the thing, for `Most.size_bytes`.
        number: the order of arrival among all callers.
        given: done once the caller has the place, or with the error of a refusal.
    """

    principal: Hashable
    thing: Hashable
    size_bytes: int
    number: int
    given: asyncio.Future[None]


@dataclass(slots=True)
class _Use:
    """The places of one principal, and its waiting callers.

    Attributes:
        held: the number of callers inside, by thing; the principal has one place for each thing.
        sizes_bytes: of the things in `held`, by thing.
        waiting: the waiting callers by thing, things and callers in order of arrival.
        count: the number of waiting callers.
    """

    held: Counter[Hashable] = field(default_factory=Counter)
    sizes_bytes: dict[Hashable, int] = field(default_factory=dict)
    waiting: dict[Hashable, dict[Place, None]] = field(default_factory=dict)
    count: int = 0

    def first(self) -> Place:
        return next(iter(next(iter(self.waiting.values()))))

    def last(self) -> Place:
        return next(reversed(next(reversed(self.waiting.values()))))


class Places:
    """The places for one kind of work. For one event loop.

    Args:
        refusal: makes the error for a caller whose wait is over, or where too many wait; called with the principal and
            the number of places that the principal has.
        most_of: returns the limits of a principal.
    """

    def __init__(
        self,
        limits: PlaceLimits,
        refusal: Callable[[Hashable, int], LoRAPluginsError],
        most_of: Callable[[Hashable], Most] = lambda _: Most(),
    ) -> None:
        self._limits = limits
        self._refusal = refusal
        self._most_of = most_of
        self._taken = self._waiting = 0  # places that are taken, and callers that wait
        self._numbers = itertools.count()
        self._uses: dict[Hashable, _Use] = {}  # by principal

    @classmethod
    def of(cls, limits: PlaceLimits, busy: type[LoRAPluginsError], found: str, most: Most | None = None) -> Places:
        """Places with the same limits `most` for all principals; None for no limits.

        A refusal is an error of the type `busy`, with the text `found`.
        """
        refusal = partial(busy, found, expected=f"a turn within {limits.wait_s:g} s", remedy="ask again")
        return cls(limits, lambda *_: refusal(), lambda _: most or Most())

    @asynccontextmanager
    async def held(
        self, principal: Hashable = None, thing: Hashable = None, size_bytes: int = 0
    ) -> AsyncIterator[None]:
        """Inside, `principal` has a place; raises what `enter` raises."""
        place = await self.enter(principal, thing, size_bytes)
        try:
            yield
        finally:
            self.leave(place)

    async def enter(self, principal: Hashable = None, thing: Hashable = None, size_bytes: int = 0) -> Place:
        """Take a place for `principal`, at once or when other callers have left.

        Callers of one principal share a place for the same `thing`; a caller with None shares with nobody. A principal
        without places gets a place for a thing of any size.

        Raises:
            LoRAPluginsError: of `refusal`: the wait is over, or too many wait.
        """
        loop = asyncio.get_running_loop()
        thing = object() if thing is None else thing
        place = Place(principal, thing, size_bytes, next(self._numbers), loop.create_future())
        use = self._uses.setdefault(principal, _Use())
        # A shared place needs no room. A new place does, and earlier callers of the principal go before.
        if thing in use.held or (not use.waiting and self._has_room(use, place)):
            self._take(use, place)
            return place
        use.waiting.setdefault(thing, {})[place] = None
        use.count += 1
        self._waiting += 1
        if self._waiting > self._limits.waiting:
            # Refuse a caller of the principal with the longest queue, so that a flood of one principal refuses nobody
            # else. Where this caller is refused, `place.given` has the error from here on.
            self._refuse(max(self._uses.values(), key=lambda use: use.count).last())
        # A timer in the place of `asyncio.timeout`: the error then comes by `given`, as with a full queue.
        timer = loop.call_later(self._limits.wait_s, self._refuse, place)
        try:
            await place.given
        except asyncio.CancelledError:
            if place.given.done() and not place.given.cancelled() and place.given.exception() is None:
                self.leave(place)  # the place was given in the moment before the cancellation
            else:
                self._forget(place)
            raise
        finally:
            timer.cancel()
        return place

    def leave(self, place: Place) -> None:
        """Leave a place; the last caller that shares the place frees it for the next caller."""
        use = self._uses[place.principal]
        use.held[place.thing] -= 1
        if not use.held[place.thing]:
            del use.held[place.thing], use.sizes_bytes[place.thing]
            self._taken -= 1
            self._let_in(place.principal)

    def _take(self, use: _Use, place: Place) -> None:
        # A shared place counts once. True counts as 1.
        self._taken += place.thing not in use.held
        use.held[place.thing] += 1
        # A new version of the same thing may be larger.
        use.sizes_bytes[place.thing] = max(place.size_bytes, use.sizes_bytes.get(place.thing, 0))

    def _has_room(self, use: _Use, place: Place) -> bool:
        if self._limits.at_once is not None and self._taken >= self._limits.at_once:
            return False
        if not use.held:  # a thing larger than all bytes of the principal must be able to enter alone
            return True
        most = self._most_of(place.principal)
        if most.places is not None and len(use.held) >= most.places:
            return False
        return most.size_bytes is None or sum(use.sizes_bytes.values()) + place.size_bytes <= most.size_bytes

    def _let_in(self, principal: Hashable) -> None:
        """Let in waiting callers with room, after a caller of `principal` has left or given up."""
        # Without common places, only callers of the same principal can have got room.
        uses = {principal: self._uses[principal]} if self._limits.at_once is None else self._uses
        while able := [use for use in uses.values() if use.waiting and self._has_room(use, use.first())]:
            use = min(able, key=lambda use: (len(use.held), use.first().number))
            # All callers for the thing enter together, because they share the place.
            for place in use.waiting.pop(use.first().thing):
                use.count -= 1
                self._waiting -= 1
                # `given` is cancelled already where the waiting task was cancelled and has not run since.
                if not place.given.done():
                    self._take(use, place)
                    place.given.set_result(None)
        use = self._uses[principal]
        if not use.held and not use.waiting:
            # There may be any number of principals over time.
            del self._uses[principal]

    def _refuse(self, place: Place) -> None:
        """End the wait of a place's caller with an error, unless the caller has the place or an error already."""
        if not place.given.done():
            place.given.set_exception(self._refusal(place.principal, len(self._uses[place.principal].held)))
            self._forget(place)

    def _forget(self, place: Place) -> None:
        """End the wait of a place's caller, if the caller still waits."""
        use = self._uses.get(place.principal, _Use())  # empty where the principal has left, and nobody waits
        of_thing = use.waiting.get(place.thing, {})
        if place in of_thing:
            del of_thing[place]
            if not of_thing:
                del use.waiting[place.thing]
            use.count -= 1
            self._waiting -= 1
            self._let_in(place.principal)
