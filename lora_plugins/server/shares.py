"""How much of the engines' host memory and of the store the requests of one principal may use at once.

What is over a principal's share waits for its own requests that run, and is refused after a while. Others notice
nothing: whoever has no share, such as an administrator, never waits here. A request for an adapter in use enters at
once, as it takes no more of the share.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

from lora_plugins.errors import NoFreeSlot
from lora_plugins.resolvers.places import Most, PlaceLimits, Places

_WAIT_S = 30.0
_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class Share:
    """A principal's part of the whole, between 0 and 1, which a new policy may change; `label` says whose."""

    label: str
    part: float = field(compare=False)


class Shares:
    """Those of all API servers of one deployment, in the first. For one event loop."""

    def __init__(self, places: int, max_bytes: int | None, *, wait_s: float = _WAIT_S) -> None:
        """Divide `places` for adapters in host memory, and bytes of them; None for no limit of these."""
        self._all = places
        self._max_bytes = max_bytes
        self._places = Places(PlaceLimits(None, _WAITING, wait_s), self._refusal, self._most_of)

    @asynccontextmanager
    async def using(self, share: Share | None, adapter: str, size_bytes: int = 0) -> AsyncIterator[None]:
        """Inside, a request of `share` uses an adapter, alone or beside others of its that do.

        One adapter is always allowed, however large.

        Raises:
            NoFreeSlot: after a while, with that it would be more than the share; at once, if too many wait.
        """
        if share is None:
            yield
            return
        async with self._places.held(share, adapter, size_bytes):
            yield

    def _most_of(self, share: Hashable) -> Most:
        part = cast(Share, share).part
        return Most(max(1, int(part * self._all)), None if self._max_bytes is None else part * self._max_bytes)

    def _refusal(self, share: Hashable, in_use: int) -> NoFreeSlot:
        label, part, most = cast(Share, share).label, cast(Share, share).part, self._most_of(share).places
        return NoFreeSlot(
            f"{in_use} adapters of {label} in use at once, which is its share",
            expected=f"{most} of {self._all} at most, and {part:.0%} of the bytes",
            remedy="ask again once the requests that run have ended, or have the operator set its share in the policy",
        )
