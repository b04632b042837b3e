"""The order in which waiting adapters are served: vLLM's priorities first, then first come, first served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from lora_plugins.scheduler.adapter import Adapter


class WaitingOrder:
    """Adapters in the order in which they are served; a look at the first takes constant time."""

    def __init__(self) -> None:
        self._entries: dict[Adapter, tuple[int, float, int, Adapter]] = {}
        self._sorted: list[tuple[int, float, int, Adapter]] = []  # priority, since, key: equal for no two

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, adapter: Adapter) -> bool:
        return adapter in self._entries

    def __iter__(self) -> Iterator[Adapter]:
        return (entry[3] for entry in self._sorted)

    def keep(self, adapter: Adapter, *, is_in: bool) -> None:
        """See that it is where it belongs, or not there."""
        known = self._entries.get(adapter)
        if known is None and not is_in:
            return
        entry = (*adapter.order, adapter.key, adapter) if is_in else None
        if known is not None and known != entry:
            del self._entries[adapter], self._sorted[bisect_left(self._sorted, known)]
        if entry is not None and known != entry:
            self._entries[adapter] = entry
            if self._sorted and self._sorted[-1] > entry:
                insort(self._sorted, entry)
            else:
                self._sorted.append(entry)  # as most do, which came last

    def count_before(self, adapter: Adapter) -> int:
        """How many would be served before it."""
        return bisect_left(self._sorted, (*adapter.order, adapter.key))
