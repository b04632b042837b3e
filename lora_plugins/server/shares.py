"""How much of the engines' host memory and of the store the requests of one principal may use at once.

What is over a principal's share waits for its own requests that run, and is refused after a while. Others notice
nothing: whoever has no share, such as an administrator, never waits here.

Adapters enter first come, first served, so none starves behind smaller ones; a request for one in use enters at once,
as it takes no more of the share.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from lora_plugins.errors import NoFreeSlot

_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Share:
    """A principal's part of the whole, between 0 and 1; `label` says whose."""

    label: str
    part: float


@dataclass(slots=True)
class _Use:
    """What the requests of one principal use; who waits, by adapter, the first to come first: for none that is in use.

    A place that is given is counted for who waits there before its task runs.
    """

    sizes_bytes: dict[str, int] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    waiting: dict[str, dict[asyncio.Future[None], int]] = field(default_factory=dict)

    def enter(self, adapter: str, size_bytes: int) -> None:
        self.requests[adapter] += 1
        self.sizes_bytes[adapter] = max(size_bytes, self.sizes_bytes.get(adapter, 0))


class Shares:
    """Those of one API server. For one event loop."""

    def __init__(self, places: int, max_bytes: int | None, *, wait_s: float = _WAIT_S) -> None:
        """Divide `places` for adapters in host memory, and bytes of them; None for no limit of these."""
        self._places = places
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._uses: dict[str, _Use] = {}

    @asynccontextmanager
    async def using(self, share: Share | None, adapter: str, size_bytes: int = 0) -> AsyncIterator[None]:
        """Inside, a request of `share` uses an adapter, alone or beside others of its that do.

        One adapter is always allowed, however large.

        Raises:
            NoFreeSlot: after a while, with that it would be more than the share.
        """
        if share is None:
            yield
            return
        use = self._uses.setdefault(share.label, _Use())
        if adapter in use.requests or (not use.waiting and self._has_room(share, use, size_bytes)):
            use.enter(adapter, size_bytes)
        else:
            await self._wait(share, use, adapter, size_bytes)
        try:
            yield
        finally:
            self._leave(share, use, adapter)

    async def _wait(self, share: Share, use: _Use, adapter: str, size_bytes: int) -> None:
        place = asyncio.get_running_loop().create_future()
        use.waiting.setdefault(adapter, {})[place] = size_bytes
        try:
            async with asyncio.timeout(self._wait_s):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():  # it was given in the moment in which its task was cancelled
                self._leave(share, use, adapter)
            else:
                beside = use.waiting.get(adapter, {})
                beside.pop(place, None)
                if not beside:
                    use.waiting.pop(adapter, None)
                self._let_in(share, use)
            if isinstance(error, TimeoutError):
                raise self._refusal(share, use) from None
            raise

    def _leave(self, share: Share, use: _Use, adapter: str) -> None:
        use.requests[adapter] -= 1
        if not use.requests[adapter]:
            del use.requests[adapter], use.sizes_bytes[adapter]
            self._let_in(share, use)

    def _let_in(self, share: Share, use: _Use) -> None:
        """Let in those that wait and have room, and none past the first that has not."""
        while use.waiting:
            adapter, places = next(iter(use.waiting.items()))
            if not self._has_room(share, use, next(iter(places.values()))):
                return
            del use.waiting[adapter]
            for place, size_bytes in places.items():
                if not place.done():  # it is, where its task has been cancelled and has not run since
                    use.enter(adapter, size_bytes)
                    place.set_result(None)
        if not use.requests and self._uses.get(share.label) is use:
            del self._uses[share.label]

    def _has_room(self, share: Share, use: _Use, size_bytes: int) -> bool:
        if not use.requests:
            return True
        if len(use.requests) + 1 > self._most_places(share):
            return False
        return self._max_bytes is None or sum(use.sizes_bytes.values()) + size_bytes <= share.part * self._max_bytes

    def _most_places(self, share: Share) -> int:
        return max(1, int(share.part * self._places))

    def _refusal(self, share: Share, use: _Use) -> NoFreeSlot:
        return NoFreeSlot(
            f"{len(use.requests)} adapters of {share.label} in use at once, which is its share",
            expected=f"{self._most_places(share)} of {self._places} at most, and {share.part:.0%} of the bytes",
            remedy="ask again once the requests that run have ended, or have the operator set its share in the policy",
        )
