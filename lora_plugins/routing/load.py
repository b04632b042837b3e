"""Requests of each replica, and how many replicas an adapter needs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import ceil

# Adapters whose load is remembered; a rarer adapter needs a single replica anyway.
REMEMBERED = 65_536


class ReplicaLoad:
    """Requests in flight by replica: this router's own, and the requests of other routers."""

    def __init__(self) -> None:
        self._ours: dict[str, int] = {}
        self._others: dict[str, int] = {}
        self._peaks: dict[str, tuple[int, int]] = {}  # of our requests: before the last report, and since
        self.total = 0

    def of(self, replica: str) -> int:
        """Return the requests in flight at a replica; 0 for an unknown replica."""
        return self._ours.get(replica, 0) + self._others.get(replica, 0)

    def join(self, replica: str) -> None:
        """Count for this replica."""
        self._ours.setdefault(replica, 0)
        self._others.setdefault(replica, 0)

    def leave(self, replica: str) -> None:
        """Forget a replica; its requests are in flight no longer."""
        self.total -= self._ours.pop(replica, 0) + self._others.pop(replica, 0)
        self._peaks.pop(replica, None)

    def routed(self, replica: str) -> bool:
        """Count a request more; False for an unknown replica."""
        if replica not in self._ours:
            return False
        self._ours[replica] += 1
        self.total += 1
        before, since = self._peaks.get(replica, (0, 0))
        self._peaks[replica] = before, max(since, self._ours[replica])
        return True

    def completed(self, replica: str) -> None:
        """Count a request less; a replica that has left, or has no request, counts nothing."""
        if self._ours.get(replica, 0) > 0:
            self._ours[replica] -= 1
            self.total -= 1

    def reported(self, replica: str, requests: int) -> None:
        """Note a replica's requests from all routers together: a number above ours belongs to other routers.

        A report is older than this router's counts: ours count as the most since the last report but one.
        """
        if replica in self._others:
            ours = self._ours[replica]
            before, since = self._peaks.get(replica, (0, 0))
            # Never below 0: a report may be older than requests that have ended since.
            others = max(0, requests - max(before, since, ours))
            self._peaks[replica] = since, ours
            self.total += others - self._others[replica]
            self._others[replica] = others


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

    Requests are averaged over buckets of `bucket_s`, and the averages exponentially: each new average has the weight
    `smoothing`, so a single burst does not spread an adapter. An adapter gets more replicas at once, and fewer only
    after `cool_down_s` in which fewer would have done at all times. Of more than `REMEMBERED` adapters the least
    recently used is forgotten, and is on a single replica again.
    """

    def __init__(
        self, per_replica: int, *, bucket_s: float = 1.0, smoothing: float = 0.25, cool_down_s: float = 60.0
    ) -> None:
        self._per_replica = per_replica
        self._bucket_s = bucket_s
        self._keep = 1.0 - smoothing
        self._cool_down_s = cool_down_s
        self._demands: OrderedDict[str, _Demand] = OrderedDict()  # the least recently used first

    def routed(self, adapter: str, now_s: float) -> None:
        """Count a request."""
        demand = self._demands.get(adapter)
        if demand is None:
            demand = self._demands[adapter] = _Demand(int(now_s // self._bucket_s), now_s)
            if len(self._demands) > REMEMBERED:
                self._demands.popitem(last=False)
        else:
            self._demands.move_to_end(adapter)
            self._advance(demand, now_s)
        demand.in_flight += 1

    def completed(self, adapter: str, now_s: float) -> None:
        """Count a request less."""
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
        bucket = int(now_s // self._bucket_s)
        if bucket > demand.bucket:
            ends_s = (demand.bucket + 1) * self._bucket_s
            demand.busy_s += demand.in_flight * max(0.0, ends_s - demand.seen_s)
            demand.average = self._keep * demand.average + (1 - self._keep) * demand.busy_s / self._bucket_s
            # In the buckets between, the same number of requests was in flight all the time.
            kept = self._keep ** (bucket - demand.bucket - 1)
            demand.average = kept * demand.average + (1 - kept) * demand.in_flight
            demand.bucket, demand.busy_s, demand.seen_s = bucket, 0.0, bucket * self._bucket_s
        demand.busy_s += demand.in_flight * (now_s - demand.seen_s)
        demand.seen_s = now_s
