"""The routing policy in use: each adapter stays on few replicas, and no replica is overloaded by the adapter.

Runs in each router (`ray/router.py`), which asks for the best replicas of each request, and says where requests went,
which have ended, and what replicas report. Computed in memory, without I/O.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from zlib import crc32

from lora_plugins.routing.load import LoadEstimator, ReplicaLoad
from lora_plugins.routing.rendezvous import Rendezvous
from lora_plugins.routing.residency import Report, Residency, Tier

# How many replicas `_further` looks at, beside as many as the adapter needs.
FURTHER = 3
# How many random replicas are compared for the base model, which every replica has.
COMPARED = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """When an adapter gets another replica.

    Attributes:
        per_replica: requests of an adapter, averaged over time, that a replica should have.
        least_bound: a replica may always have so many requests in flight.
        overload: beyond `least_bound`, a replica may have so many times the mean of all replicas.
        cool_down_s: how long an adapter must have needed fewer replicas before the adapter loses a replica.
    """

    per_replica: int = 6
    least_bound: int = 8
    overload: float = 1.25
    cool_down_s: float = 60.0


class AffinityPolicy:
    """Rendezvous hashing, with as many replicas for an adapter as its load needs, residency and bounded load.

    The empty name stands for the base model. Times are seconds of the caller's clock. `seed` is of the random choice
    among replicas for the base model.

    In this order: a replica with the adapter in a slot or in its host cache; while the adapter is on fewer replicas
    than its load needs, the next of its best replicas, a request at a time; a replica that loads the adapter; a replica
    with room, preferably with the adapter's files; a replica with the files; the best replica by hashing. No replica
    has more requests than `bound()`, as long as there is another. Among several replicas with the adapter, the replica
    with the fewest requests is chosen.

    A request looks only at the replicas with its adapter, or at a few of its best replicas; at more only where these
    are at their bound.
    """

    def __init__(self, limits: Limits | None = None, seed: int = 0) -> None:
        self._limits = limits or Limits()
        self._hashing = Rendezvous()
        self._load = ReplicaLoad()
        self._residency = Residency()
        self._estimator = LoadEstimator(self._limits.per_replica, cool_down_s=self._limits.cool_down_s)
        self._replicas: list[str] = []
        self._random = random.Random(seed)  # noqa: S311 - chooses among equal replicas for the base model's requests

    def join(self, replica: str) -> None:
        """Route to this replica too."""
        if replica not in self._replicas:
            self._replicas.append(replica)
            self._hashing.add(replica)
            self._load.join(replica)
            self._residency.join(replica)

    def leave(self, replica: str) -> None:
        """Route to this replica no longer, and forget its adapters."""
        if replica in self._replicas:
            self._replicas.remove(replica)
            self._hashing.remove(replica)
            self._load.leave(replica)
            self._residency.leave(replica)

    def bound(self) -> int:
        """Return how many requests a replica may have, the next request included."""
        count = max(1, len(self._replicas))
        return max(self._limits.least_bound, ceil(self._limits.overload * (self._load.total + 1) / count))

    def ranked(self, adapter: str, now_s: float, excluded: Collection[str] = ()) -> Sequence[str]:
        """Return a few replicas to try, best first, none of them `excluded`."""
        if not adapter:
            return self._least_loaded(excluded)
        # No adapter can be on more replicas than there are.
        wanted = min(self._estimator.replicas(adapter, now_s), len(self._replicas))
        where = self._residency.of(adapter)
        if excluded:
            where = {replica: tier for replica, tier in where.items() if replica not in excluded}
        load, bound = self._load.of, self.bound()
        ready = self._ready(adapter, where, wanted)
        allowed = [replica for replica in ready if load(replica) < bound]
        if allowed and len(ready) >= wanted:
            return allowed
        # Requests wait for a load in progress: another replica would read the same adapter again.
        loading = [replica for replica, tier in where.items() if tier is Tier.LOADING]
        allowed += [replica for replica in loading if load(replica) < bound]
        if loading and allowed:
            return allowed
        further = self._further(adapter, where, wanted, excluded, bound)
        if further is not None:
            return [further, *allowed]
        return allowed or self._least_loaded(excluded)

    def routed(self, adapter: str, replica: str, now_s: float) -> None:
        if self._load.routed(replica) and adapter:
            self._residency.routed(adapter, replica, now_s)
            self._estimator.routed(adapter, now_s)

    def completed(self, adapter: str, replica: str, now_s: float) -> None:
        self._load.completed(replica)
        if adapter:
            self._residency.completed(adapter, replica)
            self._estimator.completed(adapter, now_s)

    def reported(self, replica: str, report: Report, now_s: float) -> None:
        self._residency.reported(replica, report, now_s)
        if report.requests is not None:
            self._load.reported(replica, report.requests)

    def _ready(self, adapter: str, where: Mapping[str, Tier], wanted: int) -> list[str]:
        """Return replicas with the adapter in memory: the `wanted`, least loaded first, then surplus replicas."""
        ready = [replica for replica, tier in where.items() if tier <= Tier.HOST]
        # A fixed order, the same for every router: surplus replicas get no more requests, and their caches drop the
        # adapter.
        if len(ready) > wanted:
            ready.sort(key=lambda it: (where[it], crc32(f"{adapter}/{it}".encode("utf-8", "surrogatepass"))))
        return sorted(ready[:wanted], key=self._load.of) + ready[wanted:]

    def _further(
        self, adapter: str, there: Container[str], wanted: int, excluded: Collection[str], bound: int
    ) -> str | None:
        """Return the cheapest of the adapter's best replicas to load it; None if all are at their bound.

        `there`: replicas that have the adapter, or load it, and so are no choice.
        """
        stored = self._residency.stored(adapter)
        with_room = with_files = first = None
        left = wanted + FURTHER
        for replica in self._hashing.walk(adapter):
            # Room and files cost least; room alone costs a fetch; files alone cost an eviction.
            if replica not in there and replica not in excluded and self._load.of(replica) < bound:
                has_files = replica in stored
                if self._residency.has_room(replica):
                    if has_files or not stored:  # where no replica has the files, room is the best choice
                        return replica
                    with_room = with_room or replica
                elif has_files:
                    with_files = with_files or replica
                first = first or replica
            left -= 1
            # Past the limit the walk goes on only until one replica is below its bound.
            if left <= 0 and first is not None:
                break
        return with_room or with_files or first

    def _least_loaded(self, excluded: Collection[str]) -> list[str]:
        """Return the better of a few random replicas, in constant time for any number of replicas."""
        among = [replica for replica in self._replicas if replica not in excluded] if excluded else self._replicas
        return sorted(self._random.sample(among, min(COMPARED, len(among))), key=self._load.of)
