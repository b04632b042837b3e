"""How much of the engines' host memory and of the store the requests of one principal may use at once.

What is over a principal's share waits for its own requests that run, and is refused after a while. Others notice
nothing: whoever has no share, such as an administrator, never waits here.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
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
    """What the requests of one principal use: size and requests of each adapter; `waiting`, the first to come first."""

    sizes_bytes: dict[str, int] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


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
        try:
            await self._enter(share, use, adapter, size_bytes)
            use.requests[adapter] += 1
            use.sizes_bytes[adapter] = max(size_bytes, use.sizes_bytes.get(adapter, 0))
            try:
                yield
            finally:
                use.requests[adapter] -= 1
                if not use.requests[adapter]:
                    del use.requests[adapter], use.sizes_bytes[adapter]
        finally:
            for one in use.waiting:
                if not one.done():
                    one.set_result(None)
            if not use.requests and not use.waiting:
                self._uses.pop(share.label, None)

    async def _enter(self, share: Share, use: _Use, adapter: str, size_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._wait_s
        while not self._is_within(share, use, adapter, size_bytes):
            one = loop.create_future()
            use.waiting.append(one)
            try:
                async with asyncio.timeout_at(ends_at):
                    await one
            except TimeoutError:
                raise self._refusal(share, use) from None
            finally:
                use.waiting.remove(one)

    def _is_within(self, share: Share, use: _Use, adapter: str, size_bytes: int) -> bool:
        if not use.requests or adapter in use.requests:
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
