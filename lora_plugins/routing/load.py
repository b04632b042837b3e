"""Requests of each replica, and how many replicas an adapter needs.

Runs in each router, for `affinity.py`. In go the requests that this router sends, their ends, and the numbers that
replicas report; out come the requests in flight at a replica, and the number of replicas for an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cachetools import LRUCache

# Adapters whose load is remembered; a rarer adapter needs a single replica anyway.
REMEMBERED = 65_536
BUCKET_S = 1.0
SMOOTHING = 0.25


@dataclass(slots=True)
class _Requests:
    """A replica's requests in flight; `most` of ours since the last report, `most_before` between the last two."""

    ours: int = 0
    others: int = 0
    most: int = 0
    most_before: int = 0


class ReplicaLoad:
    """Requests in flight by replica: this router's own, and the requests of other routers."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Requests] = {}
        self.total = 0

    def of(self, replica: str) -> int:
        """Return the requests in flight at a replica; 0 for an unknown replica."""
        requests = self._replicas.get(replica)
        return 0 if requests is None else requests.ours + requests.others

    def join(self, replica: str) -> None:
        self._replicas.setdefault(replica, _Requests())

    def leave(self, replica: str) -> None:
        """Forget a replica; its requests are in flight no longer."""
        self.total -= self.of(replica)
        self._replicas.pop(replica, None)

    def routed(self, replica: str) -> bool:
        """Count a request more; False for an unknown replica."""
        if (requests := self._replicas.get(replica)) is None:
            return False
        requests.ours += 1
        requests.most = max(requests.most, requests.ours)
        self.total += 1
        return True

    def completed(self, replica: str) -> None:
        """Count a request less; a replica that has left, or has no request, counts nothing."""
        requests = self._replicas.get(replica)
        if requests is not None and requests.ours > 0:
            requests.ours -= 1
            self.total -= 1

    def reported(self, replica: str, count: int) -> None:
        """Note a replica's requests from all routers together: a number above ours belongs to other routers.

        A report is older than this router's counts: ours count as the most since the last report but one.
        """
        if (requests := self._replicas.get(replica)) is not None:
            # Never below 0: a report may be older than requests that have ended since.
            others = max(0, count - max(requests.most_before, requests.most, requests.ours))
            requests.most_before, requests.most = requests.most, requests.ours
            self.total += others - requests.others
            requests.others = others


@dataclass(slots=True)
class _Demand:
    """An adapter's requests; `busy_s` are the request-seconds of the current bucket."""

    bucket: int
    seen_s: float
    in_flight: int = 0
    busy_s: float = 0.0
    average: float = 0.0
    replicas: int = 1
    fewer_since_s: float | None = None


class LoadEstimator:
    """How many replicas each adapter should be on, by the adapter's requests in flight.

    Requests are averaged over buckets of `BUCKET_S`, and the averages exponentially: each new average has the weight
    `SMOOTHING`, so a single burst does not spread an adapter. An adapter gets more replicas at once, and fewer only
    after `cool_down_s` in which fewer would have done at all times. Of more than `REMEMBERED` adapters the least
    recently used is forgotten, and is on a single replica again.
    """

    def __init__(self, per_replica: int, *, cool_down_s: float = 60.0) -> None:
        self._per_replica, self._cool_down_s = per_replica, cool_down_s
        self._demands: LRUCache[str, _Demand] = LRUCache(REMEMBERED)

    def routed(self, adapter: str, now_s: float) -> None:
        demand = self._demands.get(adapter)
        if demand is None:
            demand = self._demands[adapter] = _Demand(int(now_s // BUCKET_S), now_s)
        self._advance(demand, now_s)
        demand.in_flight += 1

    def completed(self, adapter: str, now_s: float) -> None:
        demand = self._demands.get(adapter)
        if demand is not None:
            self._advance(demand, now_s)
            demand.in_flight = max(0, demand.in_flight - 1)

    def replicas(self, adapter: str, now_s: float) -> int:
        """Return how many replicas the adapter should be on, at least 1."""
        demand = self._demands.get(adapter)
        if demand is None:
            return 1
        self._advance(demand, now_s)
        wanted = max(1, ceil(demand.average / self._per_replica))
        if wanted >= demand.replicas:
            demand.replicas, demand.fewer_since_s = wanted, None
        elif demand.fewer_since_s is None:
            demand.fewer_since_s = now_s
        elif now_s - demand.fewer_since_s >= self._cool_down_s:
            demand.replicas, demand.fewer_since_s = wanted, None
        return demand.replicas

    def _advance(self, demand: _Demand, now_s: float) -> None:
        # No time has passed since the last call.
        if now_s <= demand.seen_s:
            return
        bucket = int(now_s // BUCKET_S)
        if bucket > demand.bucket:
            ends_s = (demand.bucket + 1) * BUCKET_S
            demand.busy_s += demand.in_flight * max(0.0, ends_s - demand.seen_s)
            demand.average = (1 - SMOOTHING) * demand.average + SMOOTHING * demand.busy_s / BUCKET_S
            # In the buckets between, the same number of requests was in flight all the time.
            kept = (1 - SMOOTHING) ** (bucket - demand.bucket - 1)
            demand.average = kept * demand.average + (1 - kept) * demand.in_flight
            demand.bucket, demand.busy_s, demand.seen_s = bucket, 0.0, bucket * BUCKET_S
        demand.busy_s += demand.in_flight * (now_s - demand.seen_s)
        demand.seen_s = now_s
