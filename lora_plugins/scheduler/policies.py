"""Which adapter leaves a tier when another needs its room; pure bookkeeping that neither holds nor frees anything.

A policy is told of every arrival, use and departure, and names the best victim among those that may go; what is pinned
or leased, the caller leaves out. Every load is for a request that waits for it, so none refuses a newcomer: a policy
that distrusts newcomers names them as its next victims. Not thread-safe: the owner of the tier calls under its lock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

from lora_plugins.errors import InvalidSettings

Key = TypeVar("Key", bound=Hashable)
Among = Callable[[Key], bool] | Container[Key]


class EvictionPolicy(Protocol[Key]):
    """Ranks the adapters of one tier; a key is the adapter's identity, the same one whenever it comes back."""

    def added(self, key: Key, size_bytes: int, cost_s: float) -> None:
        """Note that `key` was loaded, which counts as a use; one that is already there has been replaced.

        `size_bytes` is what it holds of the tier, `cost_s` the seconds that loading it again would take.
        """

    def used(self, key: Key) -> None:
        """Note that a request uses `key`; a key that is not there is left alone."""

    def removed(self, key: Key) -> None:
        """Note that `key` left the tier, evicted or not; a key that is not there is left alone."""

    def victim(self, among: Among[Key]) -> Key | None:
        """The key to evict first of those that `among` accepts or contains, or None if there is none.

        It stays until `removed` is called. O(log n) amortised, once for each key passed over on the way.
        """

    def __len__(self) -> int:
        """How many keys are there."""


class Lru(Generic[Key]):
    """Evicts what was used longest ago; blind to size and cost."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()  # longest unused first

    def added(self, key: Key, size_bytes: int, cost_s: float) -> None:  # noqa: ARG002 - the protocol's signature
        """Note a load."""
        self._order[key] = None
        self._order.move_to_end(key)

    def used(self, key: Key) -> None:
        """Note a use."""
        if key in self._order:
            self._order.move_to_end(key)

    def removed(self, key: Key) -> None:
        """Note a departure."""
        self._order.pop(key, None)

    def victim(self, among: Among[Key]) -> Key | None:
        """The longest unused one; O(1) for each key passed over."""
        accepts = _test(among)
        return next((key for key in self._order if accepts(key)), None)

    def __len__(self) -> int:
        return len(self._order)


class _Ranking(Generic[Key]):
    """Keys by rank, lowest first, and the longest unused first where ranks are equal.

    A heap with lazy deletion: a key whose rank changes is pushed anew, entries that no longer hold are skipped, and
    the heap is rebuilt once they outnumber the keys.
    """

    def __init__(self) -> None:
        self._ranks: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._tick = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: Key) -> bool:
        return key in self._ranks

    def put(self, key: Key, rank: float) -> None:
        self._tick += 1  # unique, so that the heap never compares keys
        self._ranks[key] = (rank, self._tick)
        heappush(self._heap, (rank, self._tick, key))
        self._tidy()

    def drop(self, key: Key) -> None:
        if self._ranks.pop(key, None) is not None:
            self._tidy()

    def rank(self, key: Key) -> float:
        return self._ranks[key][0]

    def lowest(self, among: Among[Key]) -> Key | None:
        accepts = _test(among)
        passed_over: list[tuple[float, int, Key]] = []
        try:
            while self._heap:
                rank, tick, key = self._heap[0]
                if self._ranks.get(key) == (rank, tick):
                    if accepts(key):
                        return key
                    passed_over.append(self._heap[0])
                heappop(self._heap)
            return None
        finally:
            for entry in passed_over:
                heappush(self._heap, entry)

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._ranks) + 16:
            self._heap = [(rank, tick, key) for key, (rank, tick) in self._ranks.items()]
            heapify(self._heap)


class Lfu(Generic[Key]):
    """Evicts what was used least often since it was loaded; for comparison, as it never forgets a past favourite."""

    def __init__(self) -> None:
        self._ranking: _Ranking[Key] = _Ranking()

    def added(self, key: Key, size_bytes: int, cost_s: float) -> None:  # noqa: ARG002 - the protocol's signature
        """Note a load."""
        self._ranking.put(key, 1)

    def used(self, key: Key) -> None:
        """Note a use."""
        if key in self._ranking:
            self._ranking.put(key, self._ranking.rank(key) + 1)

    def removed(self, key: Key) -> None:
        """Note a departure; the count is forgotten."""
        self._ranking.drop(key)

    def victim(self, among: Among[Key]) -> Key | None:
        """The one with the fewest uses."""
        return self._ranking.lowest(among)

    def __len__(self) -> int:
        return len(self._ranking)


class Gdsf(Generic[Key]):
    """GreedyDual-Size-Frequency: evicts what saves the fewest seconds of loading per byte, aged by a clock.

    Priority = clock at the last use + uses since loaded * cost / size; the clock is the last victim's priority.

    Source: L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy",
    HP Laboratories HPL-98-69R1, 1998.
    """

    def __init__(self) -> None:
        self._ranking: _Ranking[Key] = _Ranking()
        self._uses: dict[Key, int] = {}
        self._density: dict[Key, float] = {}
        self._clock = 0.0

    def added(self, key: Key, size_bytes: int, cost_s: float) -> None:
        """Note a load."""
        self._uses[key] = 0
        self._density[key] = _density(size_bytes, cost_s)
        self._use(key)

    def used(self, key: Key) -> None:
        """Note a use."""
        if key in self._uses:
            self._use(key)

    def removed(self, key: Key) -> None:
        """Note a departure; the count is forgotten."""
        self._ranking.drop(key)
        self._uses.pop(key, None)
        self._density.pop(key, None)

    def victim(self, among: Among[Key]) -> Key | None:
        """The one with the lowest priority, to which the clock moves."""
        key = self._ranking.lowest(among)
        if key is not None:
            self._clock = max(self._clock, self._ranking.rank(key))
        return key

    def __len__(self) -> int:
        return len(self._ranking)

    def _use(self, key: Key) -> None:
        self._uses[key] += 1
        self._ranking.put(key, self._clock + self._uses[key] * self._density[key])


class Lrfu(Generic[Key]):
    """Evicts what saves the fewest seconds of loading per byte, by uses that count less the longer they lie back.

    Value = (sum over uses of 2 ** -age) * cost / size. Ages are in half-lives of `half_life` uses for each key there,
    so the memory's length follows the tier's: longer suits steady popularity, shorter suits bursts and moving hot sets
    (benchmarks/policies.py measures it). Every value shrinks alike, so the order changes by uses alone and a heap can
    hold it: the rank is log2 of the value at time 0. The last `REMEMBERED` evicted keys keep their uses: an adapter
    that comes back again and again is not a newcomer each time.

    Source: D. Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently
    Used Policies", IEEE Transactions on Computers 50(12), 2001; weighed by cost / size as GreedyDual-Size does.
    """

    REMEMBERED = 2048

    def __init__(self, half_life: float = 3.0) -> None:
        self._half_life = half_life
        self._ranking: _Ranking[Key] = _Ranking()
        self._uses: dict[Key, float] = {}  # log2 of the sum, at time 0
        self._density: dict[Key, float] = {}  # log2
        self._gone: OrderedDict[Key, float] = OrderedDict()  # uses of evicted keys, first evicted first
        self._now = 0.0  # half-lives

    def added(self, key: Key, size_bytes: int, cost_s: float) -> None:
        """Note a load."""
        self._uses[key] = self._uses.get(key, self._gone.pop(key, -math.inf))
        self._density[key] = math.log2(_density(size_bytes, cost_s))
        self._use(key)

    def used(self, key: Key) -> None:
        """Note a use."""
        if key in self._uses:
            self._use(key)

    def removed(self, key: Key) -> None:
        """Note a departure; the uses are remembered for a while."""
        if key not in self._uses:
            return
        self._ranking.drop(key)
        self._density.pop(key)
        self._gone[key] = self._uses.pop(key)
        if len(self._gone) > self.REMEMBERED:
            self._gone.popitem(last=False)

    def victim(self, among: Among[Key]) -> Key | None:
        """The one with the lowest value."""
        return self._ranking.lowest(among)

    def __len__(self) -> int:
        return len(self._ranking)

    def _use(self, key: Key) -> None:
        self._now += 1 / (self._half_life * len(self._uses))
        high, low = max(self._now, self._uses[key]), min(self._now, self._uses[key])
        self._uses[key] = high + math.log2(1 + 2 ** (low - high))
        self._ranking.put(key, self._uses[key] + self._density[key])


_POLICIES: dict[str, Callable[[], EvictionPolicy[Any]]] = {"lru": Lru, "lfu": Lfu, "gdsf": Gdsf, "lrfu": Lrfu}
NAMES = tuple(_POLICIES)


def make_policy(name: str) -> EvictionPolicy[Key]:
    """A new policy by its name, one of `NAMES`.

    Raises:
        InvalidSettings: no policy has this name.
    """
    if name not in _POLICIES:
        raise InvalidSettings(
            f"eviction policy '{name}'", expected=" or ".join(NAMES), remedy="name one of these, or none for 'lru'"
        )
    return _POLICIES[name]()


def _density(size_bytes: int, cost_s: float) -> float:
    """Seconds per byte; above zero and below infinity whatever was measured, so that ranks can be compared."""
    return min(max(1e-6, cost_s), 1e6) / max(1, size_bytes)


def _test(among: Among[Key]) -> Callable[[Key], bool]:
    return among if callable(among) else among.__contains__
