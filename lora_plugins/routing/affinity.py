"""The policy that is used: each adapter stays on few replicas, and none of them is overloaded for it."""

from __future__ import annotations

import random
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from zlib import crc32

from lora_plugins.routing.load import LoadEstimator, ReplicaLoad
from lora_plugins.routing.rendezvous import Rendezvous
from lora_plugins.routing.residency import Report, Residency, Tier

# How many replicas are considered beside those that an adapter should be on.
FURTHER = 3
# How many are compared for the base model, which every replica has.
COMPARED = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """When an adapter gets another replica.

    Attributes:
        per_replica: requests of one adapter, averaged over time, that one replica should have.
        least_bound: so many requests in flight are never too many for a replica.
        overload: beyond that, a replica may have this many times the mean of all.
        cool_down_s: how long an adapter must have needed fewer replicas before it has fewer.
    """

    per_replica: int = 6
    least_bound: int = 8
    overload: float = 1.25
    cool_down_s: float = 60.0


class AffinityPolicy:
    """Rendezvous hashing, with as many replicas for an adapter as its load needs, residency and bounded load.

    The empty name stands for the base model. Times are the caller's.

    In this order: a replica that has the adapter in a slot or in its host cache; while the adapter is on fewer replicas
    than its load needs, the next of its best ones, by one request at a time; one that is loading it; one that has room
    for it, and of these one that has its files; one that has its files; its best one by hashing. None of them with more
    requests than `bound()`, as long as there is another; among several that have it, the one with the fewest requests.

    A request looks at as many replicas as have its adapter, or at a few of its best ones; at more only where those are
    at their bound.
    """

    def __init__(self, limits: Limits | None = None, seed: int = 0) -> None:
        self._limits = limits or Limits()
        self._hashing = Rendezvous()
        self._load = ReplicaLoad()
        self._residency = Residency()
        self._estimator = LoadEstimator(self._limits.per_replica, cool_down_s=self._limits.cool_down_s)
        self._replicas: list[str] = []
        self._random = random.Random(seed)  # noqa: S311 - which of equal replicas the base model's requests go to

    def join(self, replica: str) -> None:
        """Route to this replica too."""
        if replica not in self._replicas:
            self._replicas.append(replica)
            self._hashing.add(replica)
            self._load.join(replica)
            self._residency.join(replica)

    def leave(self, replica: str) -> None:
        """Route to it no longer, and forget what it had."""
        if replica in self._replicas:
            self._replicas.remove(replica)
            self._hashing.remove(replica)
            self._load.leave(replica)
            self._residency.leave(replica)

    def bound(self) -> int:
        """How many requests a replica may have, the next one among them."""
        count = max(1, len(self._replicas))
        return max(self._limits.least_bound, ceil(self._limits.overload * (self._load.total + 1) / count))

    def home(self, adapter: str) -> str:
        """The best replica by hashing alone."""
        return next(self._hashing.walk(adapter))

    def ranked(self, adapter: str, now_s: float, excluded: Collection[str] = ()) -> Sequence[str]:
        """The replicas to try, best first; one alone where there is no reason to consider others."""
        if not adapter:
            return self._least_loaded(excluded)
        wanted = min(self._estimator.replicas(adapter, now_s), len(self._replicas))
        where = self._residency.of(adapter)
        if excluded:
            where = {replica: tier for replica, tier in where.items() if replica not in excluded}
        load, bound = self._load.of, self.bound()
        ready = self._ready(adapter, where, wanted)
        allowed = [replica for replica in ready if load(replica) < bound]
        if allowed and len(ready) >= wanted:
            return allowed
        loading = [replica for replica, tier in where.items() if tier is Tier.LOADING]
        if loading:
            allowed += [replica for replica in loading if load(replica) < bound]
            if allowed:
                return allowed
        further = self._further(adapter, where, wanted, excluded, bound)
        if further is not None:
            return [further, *allowed]
        return allowed or self._least_loaded(excluded)

    def routed(self, adapter: str, replica: str, now_s: float) -> None:
        """Note that a request went to a replica."""
        if self._load.routed(replica) and adapter:
            self._residency.routed(adapter, replica, now_s)
            self._estimator.routed(adapter, now_s)

    def completed(self, adapter: str, replica: str, now_s: float) -> None:
        """Note that a routed request has ended."""
        self._load.completed(replica)
        if adapter:
            self._residency.completed(adapter, replica)
            self._estimator.completed(adapter, now_s)

    def reported(self, replica: str, report: Report, now_s: float) -> None:
        """Note what a replica says of itself."""
        self._residency.reported(replica, report, now_s)
        if report.requests is not None:
            self._load.reported(replica, report.requests)

    def _ready(self, adapter: str, where: Mapping[str, Tier], wanted: int) -> list[str]:
        """Those that have it in memory: first as many as are wanted, the least loaded first; then what is left over."""
        ready = [replica for replica, tier in where.items() if tier <= Tier.HOST]
        if len(ready) > 1:
            if len(ready) > wanted:  # the same ones each time, so that it leaves the others
                ready.sort(
                    key=lambda replica: (where[replica], crc32(f"{adapter}/{replica}".encode("utf-8", "surrogatepass")))
                )
            ready[:wanted] = sorted(ready[:wanted], key=self._load.of)
        return ready

    def _further(
        self, adapter: str, there: Container[str], wanted: int, excluded: Collection[str], bound: int
    ) -> str | None:
        """The replica that should load it: of its best ones, where it is cheapest; None if all are at their bound."""
        stored = self._residency.stored(adapter)
        with_room = with_files = first = None
        left = wanted + FURTHER
        for replica in self._hashing.walk(adapter):
            if replica not in there and replica not in excluded and self._load.of(replica) < bound:
                has_files = replica in stored
                if self._residency.has_room(replica):
                    if has_files or not stored:
                        return replica
                    with_room = with_room or replica
                elif has_files:
                    with_files = with_files or replica
                first = first or replica
            left -= 1
            if left <= 0 and first is not None:
                break
        return with_room or with_files or first

    def _least_loaded(self, excluded: Collection[str]) -> list[str]:
        """The better of a few at random, whatever the number of replicas."""
        among = [replica for replica in self._replicas if replica not in excluded] if excluded else self._replicas
        return sorted(self._random.sample(among, min(COMPARED, len(among))), key=self._load.of)
