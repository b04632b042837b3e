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

    def put(self, adapter: Adapter) -> None:
        """Enter it, or note that something about it has changed."""
        entry = (*adapter.order, adapter.key, adapter)
        if self._entries.get(adapter) != entry:
            self.remove(adapter)
            self._entries[adapter] = entry
            insort(self._sorted, entry)

    def remove(self, adapter: Adapter) -> None:
        """Take it out, if it is there."""
        entry = self._entries.pop(adapter, None)
        if entry is not None:
            del self._sorted[bisect_left(self._sorted, entry)]

    def count_before(self, adapter: Adapter) -> int:
        """How many would be served before it."""
        return bisect_left(self._sorted, (*adapter.order, adapter.key))
