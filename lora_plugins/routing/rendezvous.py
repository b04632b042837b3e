"""Rendezvous hashing that finds the best replicas without looking at every replica.

Runs in each router, for `affinity.py`; in go replicas that join and leave, out come an adapter's best replicas in
order.

Every pair of an adapter and a replica has a fixed distance, and an adapter belongs to the nearest replicas. So every
router finds the same replicas; a joining replica takes only the adapters for which the replica is now nearest; a
leaving replica loses only its own adapters. With a hash of the pair as distance, each choice would hash every
replica. Here a replica has `POINTS` points on a circle and an adapter `PROBES`; the distance is from the nearest
probe to the nearest point, clockwise. Bisection in the sorted points finds the nearest replicas in O(PROBES log n).

Source of the probes: B. Appleton, M. O'Reilly, "Multi-probe consistent hashing", arXiv:1505.00062.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from hashlib import blake2b
from heapq import heapify, heapreplace

POINTS = 64
PROBES = 4
_CIRCLE = (1 << 64) - 1


def hashed(text: str) -> tuple[int, int]:
    """Return two numbers of 64 bits, the same in every process and on every machine."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


class Rendezvous:
    """The replicas of a cluster, and the best replicas for an adapter."""

    def __init__(self) -> None:
        self._points = array("Q")  # sorted
        self._owners: list[str] = []  # the owner of the point with the same index

    def add(self, replica: str) -> None:
        """Let a new replica take its share."""
        for point in _points(replica):
            at = bisect_left(self._points, point)
            self._points.insert(at, point)
            self._owners.insert(at, replica)

    def remove(self, replica: str) -> None:
        """Share a replica's adapters among the others."""
        # Linear, as joins and leaves are rare beside requests.
        kept = [(point, owner) for point, owner in zip(self._points, self._owners, strict=True) if owner != replica]
        self._points = array("Q", (point for point, _ in kept))
        self._owners = [owner for _, owner in kept]

    def walk(self, adapter: str) -> Iterator[str]:
        """Yield all replicas, best first; each further replica takes O(log n), until few are left."""
        points, owners = self._points, self._owners
        size = len(points)
        if not size:
            return
        start, step = hashed(adapter)
        # For each probe the nearest unvisited point: its distance and its index.
        nearest = []
        for _ in range(PROBES):
            at = bisect_left(points, start) % size
            nearest.append(((points[at] - start) & _CIRCLE, at))
            start = (start + step) & _CIRCLE
        heapify(nearest)
        seen: set[str] = set()
        while len(seen) < size // POINTS:
            distance, at = nearest[0]
            owner = owners[at]
            if owner not in seen:
                seen.add(owner)
                yield owner
            # The probe's next point, clockwise: its distance grows by the gap, so the heap stays in the order of
            # weights.
            following = (at + 1) % size
            heapreplace(nearest, (distance + ((points[following] - points[at]) & _CIRCLE), following))


def _points(replica: str) -> list[int]:
    return [hashed(f"{number}/{replica}")[0] for number in range(POINTS)]
