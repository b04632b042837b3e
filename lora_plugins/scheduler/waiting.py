"""The order in which waiting adapters are served: vLLM's priorities first, then first come, first served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container


class WaitingOrder:
    """Adapters by engine id. A look at the first takes constant time."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, float, int]] = {}
        self._sorted: list[tuple[int, float, int]] = []  # priority, since, engine id

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, engine_id: int) -> bool:
        return engine_id in self._entries

    def put(self, engine_id: int, since: float, priority: int = 0) -> None:
        """Enter it, or note that something about it has changed."""
        entry = (priority, since, engine_id)
        if self._entries.get(engine_id) != entry:
            self.remove(engine_id)
            self._entries[engine_id] = entry
            insort(self._sorted, entry)

    def remove(self, engine_id: int) -> None:
        """Take it out, if it is there."""
        entry = self._entries.pop(engine_id, None)
        if entry is not None:
            del self._sorted[bisect_left(self._sorted, entry)]

    def first(self, but: Container[int] = ()) -> int | None:
        """Who is next, leaving out those in `but`."""
        return next((engine_id for _, _, engine_id in self._sorted if engine_id not in but), None)

    def count_before(self, engine_id: int, since: float, priority: int = 0) -> int:
        """How many would be served before an adapter that waits since then."""
        return bisect_left(self._sorted, (priority, since, engine_id))
