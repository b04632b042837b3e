"""Adapters sorted by the places of their first waiting requests: the order in which adapters get room and slots.

Runs in the engine core process, for the planner, which keeps one such order of absent adapters, one of adapters in host
memory, and one of adapters that vLLM has not passed over yet. In go adapters whose place has changed; out come all
adapters in order, and how many come before an adapter.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.request_queue import Order


class WaitingOrder:
    """Waiting adapters in the order in which vLLM would run their first requests."""

    def __init__(self) -> None:
        self._entries: dict[Adapter, tuple[Order, int, Adapter]] = {}
        self._sorted: list[tuple[Order, int, Adapter]] = []  # order and key: equal for no two

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, adapter: Adapter) -> bool:
        return adapter in self._entries

    def __iter__(self) -> Iterator[Adapter]:
        return (entry[2] for entry in self._sorted)

    def keep(self, adapter: Adapter, *, is_in: bool) -> None:
        """Put an adapter where its present order says, or take it out."""
        known = self._entries.get(adapter)
        if known is None and not is_in:
            return
        entry = (adapter.order, adapter.key, adapter) if is_in else None
        if known is not None and known != entry:
            del self._entries[adapter], self._sorted[bisect_left(self._sorted, known)]
        if entry is not None and known != entry:
            self._entries[adapter] = entry
            insort(self._sorted, entry)

    def count_before(self, adapter: Adapter) -> int:
        """Return how many adapters come before one, which need not be in the order."""
        return bisect_left(self._sorted, (adapter.order, adapter.key))
