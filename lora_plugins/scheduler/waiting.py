"""The order in which waiting adapters are served.

The adapter with the most held requests goes first, as it fills the batch best; one that has waited for longer than
`max_wait_s` goes before all that came later. So nobody is overtaken for longer than that. vLLM's priorities, where its
policy is "priority", come before both: this order holds among adapters of the best priority.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Class:
    """Adapters of one priority: by how many requests they hold, and by age."""

    counts: dict[int, dict[int, None]] = field(default_factory=dict)
    by_age: list[tuple[float, int]] = field(default_factory=list)  # (since, engine id), sorted


class WaitingOrder:
    """Adapters by engine id. A look at the first takes constant time, but for the number of distinct counts."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._classes: dict[int, _Class] = {}
        self._entries: dict[int, tuple[int, int, float]] = {}  # priority, count, since

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, engine_id: int) -> bool:
        return engine_id in self._entries

    def put(self, engine_id: int, since: float, count: int, priority: int = 0) -> None:
        """Enter it, or note that something about it has changed."""
        entry = (priority, count, since)
        if self._entries.get(engine_id) == entry:
            return
        self.remove(engine_id)
        self._entries[engine_id] = entry
        of_priority = self._classes.setdefault(priority, _Class())
        of_priority.counts.setdefault(count, {})[engine_id] = None
        insort(of_priority.by_age, (since, engine_id))

    def remove(self, engine_id: int) -> None:
        """Take it out, if it is there."""
        entry = self._entries.pop(engine_id, None)
        if entry is None:
            return
        priority, count, since = entry
        of_priority = self._classes[priority]
        counts, by_age = of_priority.counts, of_priority.by_age
        del by_age[bisect_left(by_age, (since, engine_id))]
        del counts[count][engine_id]
        if not counts[count]:
            del counts[count]
        if not counts:
            del self._classes[priority]

    def is_overdue(self, engine_id: int, now: float) -> bool:
        """Whether it has waited for so long that nobody who came later goes before it."""
        return self._entries[engine_id][2] <= now - self._max_wait_s

    def is_among_oldest(self, engine_id: int, since: float, count: int) -> bool:
        """Whether somebody who waits since then would be one of the `count` that have waited longest."""
        older = sum(bisect_left(of_priority.by_age, (since, engine_id)) for of_priority in self._classes.values())
        return older < count

    def since(self, engine_id: int) -> float:
        """Since when it waits."""
        return self._entries[engine_id][2]

    def next_overdue_at(self, now: float) -> float | None:
        """When the next one will be that is not yet."""
        found = []
        for of_priority in self._classes.values():
            at = bisect_right(of_priority.by_age, (now - self._max_wait_s, 1 << 63))
            found += [since + self._max_wait_s for since, _ in of_priority.by_age[at : at + 1]]
        return min(found, default=None)

    def first(self, now: float, but: Container[int] = ()) -> int | None:
        """Who is next, leaving out those in `but`."""
        for _, of_priority in sorted(self._classes.items(), key=lambda item: item[0]):
            for since, engine_id in of_priority.by_age:
                if since > now - self._max_wait_s:
                    break
                if engine_id not in but:
                    return engine_id
            for _, keys in sorted(of_priority.counts.items(), key=lambda item: item[0], reverse=True):
                for engine_id in keys:
                    if engine_id not in but:
                        return engine_id
        return None
