"""The smallest of many ranked keys: waiting requests by their places, adapters in host memory by their values.

Runs in the engine core process, inside the planner, vLLM's queue and the eviction policy. Keys come with a rank, get
another rank, and leave; the answer is the key with the smallest rank. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Generator, Hashable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
_MOST_STALE = 64
_FEW = 20  # measured: sorting so many keys, squared, takes as long as passing over the other keys


class Ranking(Generic[Key]):
    """Keys and their ranks, in a heap; O(log n) for each change.

    A key that leaves, or gets another rank, stays in the heap as a stale entry, until the entry comes first or stale
    entries outnumber the others. Keys with equal ranks are compared, so ranks are unique or keys can be compared.

    Attributes:
        ranks: the present rank of each key.
    """

    def __init__(self) -> None:
        self.ranks: dict[Key, Any] = {}
        self._heap: list[tuple[Any, Key]] = []

    def put(self, key: Key, rank: Any) -> None:
        """Rank a key, new or present."""
        self.ranks[key] = rank
        heappush(self._heap, (rank, key))
        self._tidy()

    def remove(self, key: Key) -> None:
        """Forget a key, which must be present."""
        del self.ranks[key]
        self._tidy()

    def first(self) -> tuple[Any, Key] | None:
        """Return the smallest rank and its key; None without keys."""
        heap, ranks = self._heap, self.ranks
        # By identity: the heap has the very rank that `put` was given, unless the entry is stale.
        while heap and ranks.get(heap[0][1]) is not heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None

    def among(self, keys: Container[Key]) -> Generator[Key, None, None]:
        """Yield the present keys that are in `keys`, the smallest rank first, while no rank changes.

        O(log n) for each key, and for each key passed over on the way.
        """
        if isinstance(keys, Collection) and len(keys) ** 2 < _FEW * len(self.ranks):  # most would be passed over
            yield from sorted(self.ranks.keys() & keys, key=self.ranks.__getitem__)
            return
        taken = []
        try:
            while (entry := self.first()) is not None:
                taken.append(heappop(self._heap))
                if entry[1] in keys:
                    yield entry[1]
        finally:
            for entry in taken:
                heappush(self._heap, entry)

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self.ranks) + _MOST_STALE:
            self._heap = [(rank, key) for key, rank in self.ranks.items()]
            heapify(self._heap)
