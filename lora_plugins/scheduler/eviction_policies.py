"""Which adapter leaves the host cache when another needs its room; a policy holds and frees no memory itself.

Runs in the engine core process, for `host_cache.py`; `LORA_PLUGINS_HOST_POLICY` chooses the policy. A policy is
notified of every arrival, use and departure, and names the best victim among the adapters that may leave; the caller
leaves out pinned adapters and adapters in use. A request waits for every load, so no policy refuses a newcomer: a
policy that distrusts newcomers names them as its next victims. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Generator
from typing import Any, Generic, Protocol

from lora_plugins.scheduler.ranking import Key, Ranking


class EvictionPolicy(Protocol[Key]):
    """Ranks the adapters of one cache; a key is the adapter's identity, and an adapter comes back under its key."""

    def added(self, key: Key, size_bytes: int, cost_s: float) -> None:
        """Note that `key` was loaded; a load counts as a use. If `key` is there already, the load replaces the adapter.

        `size_bytes` is the adapter's share of the cache, `cost_s` the seconds that another load would take.
        """

    def used(self, key: Key) -> None:
        """Note that a request uses `key`; a key that is not there is left alone."""

    def removed(self, key: Key) -> None:
        """Note that `key` left the cache, evicted or not; a key that is not there is left alone."""

    def victims(self, among: Container[Key]) -> Generator[Key, None, None]:
        """Yield the keys to evict among `among`, the first victim first, while nothing is added, used or removed.

        Victims stay until `removed` is called. O(log n) for each key, and for each key passed over on the way.
        """


class Lru(Generic[Key]):
    """Evicts the least recently used adapter; blind to size and cost."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()  # least recently used first

    def added(self, key: Key, size_bytes: int, cost_s: float) -> None:  # noqa: ARG002 - the protocol's signature
        self._order[key] = None
        self._order.move_to_end(key)

    def used(self, key: Key) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def removed(self, key: Key) -> None:
        self._order.pop(key, None)

    def victims(self, among: Container[Key]) -> Generator[Key, None, None]:
        """Yield the least recently used key first; O(1) for each key."""
        return (key for key in self._order if key in among)


class Lrfu(Generic[Key]):
    """Evicts the adapter that saves the fewest seconds of loading per byte; older uses count less.

    Value = (sum over uses of 2 ** -age) * cost / size. Ages are in half-lives of `half_life` uses for each key there,
    so the memory's length follows the cache's: longer suits steady popularity, shorter suits bursts and moving hot sets
    (`benchmarks/policies.py` measures half-lives). Every value shrinks alike, so only uses change the order: the
    rank is log2 of the value at time 0. The last `REMEMBERED` evicted keys keep their uses: an adapter that comes back
    again and again is not a newcomer each time.

    Source: D. Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently
    Used Policies", IEEE Transactions on Computers 50(12), 2001; weighed by cost / size as GreedyDual-Size does.
    """

    REMEMBERED = 2048

    def __init__(self, half_life: float = 3.0) -> None:
        self._half_life = half_life
        self._uses: dict[Key, float] = {}  # log2 of the sum, at time 0
        self._density: dict[Key, float] = {}  # log2 of seconds per byte
        self._evicted: OrderedDict[Key, float] = OrderedDict()  # uses of evicted keys, first evicted first
        self._now = 0.0  # half-lives
        self._tick = 0  # of the last use: orders equal values, so that keys are never compared
        self._ranking: Ranking[Key] = Ranking()

    def added(self, key: Key, size_bytes: int, cost_s: float) -> None:
        self._uses[key] = self._uses.get(key, self._evicted.pop(key, -math.inf))
        # Above zero and below infinity whatever was measured, so that ranks can be compared.
        self._density[key] = math.log2(min(max(1e-6, cost_s), 1e6) / max(1, size_bytes))
        self._use(key)

    def used(self, key: Key) -> None:
        if key in self._uses:
            self._use(key)

    def removed(self, key: Key) -> None:
        """Note a departure; the uses are remembered for a while."""
        if key in self._uses:
            self._ranking.remove(key)
            del self._density[key]
            self._evicted[key] = self._uses.pop(key)
        if len(self._evicted) > self.REMEMBERED:
            self._evicted.popitem(last=False)

    def victims(self, among: Container[Key]) -> Generator[Key, None, None]:
        """Yield the key of the lowest value first, the least recently used of equal keys."""
        return self._ranking.among(among)

    def _use(self, key: Key) -> None:
        self._now += 1 / (self._half_life * len(self._uses))
        self._tick += 1
        # log2(2 ** a + 2 ** b) by the larger exponent: 2 ** a alone overflows after 1024 half-lives.
        high, low = max(self._now, self._uses[key]), min(self._now, self._uses[key])
        self._uses[key] = high + math.log2(1 + 2 ** (low - high))
        self._ranking.put(key, (self._uses[key] + self._density[key], self._tick))


POLICIES: dict[str, Callable[[], EvictionPolicy[Any]]] = {"lru": Lru, "lrfu": Lrfu}  # `settings.HOST_POLICIES`


def make_policy(name: str) -> EvictionPolicy[Key]:
    """Return a new policy by its name, a choice of `LORA_PLUGINS_HOST_POLICY`."""
    return POLICIES[name]()
