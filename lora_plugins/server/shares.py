"""Limits on the engines' host memory and the store, for the running requests of one principal.

A request above its principal's share waits for other requests of the principal to end, and is refused after a while.
Other principals notice nothing: a caller without a share, such as an administrator, never waits here. A request for an
adapter that the principal already uses enters at once, because the request takes no more of the share.
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
    """A principal's part of the whole, between 0 and 1, which a new policy may change; `label` names the principal."""

    label: str
    part: float = field(compare=False)


class Shares:
    """The shares of all API servers of one deployment, counted in the first. For one event loop."""

    def __init__(self, places: int, max_bytes: int | None, *, wait_s: float = _WAIT_S) -> None:
        """Divide `places` for adapters in host memory, and `max_bytes` of adapters; None for no limit of bytes."""
        self._all = places
        self._max_bytes = max_bytes
        # No limit over all principals here: the engines' own slots and memory are that limit.
        self._places = Places(PlaceLimits(None, _WAITING, wait_s), self._refusal, self._most_of)

    @asynccontextmanager
    async def using(self, share: Share | None, adapter: str, size_bytes: int = 0) -> AsyncIterator[None]:
        """Inside, a request of `share` uses an adapter, alone or beside other requests of the principal.

        One adapter is always allowed, however large.

        Raises:
            NoFreeSlot: after a while, where the adapter would exceed the share; at once, where too many requests wait.
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
