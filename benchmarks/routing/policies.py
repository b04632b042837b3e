"""Policies to compare with: what routers do that know neither residency nor an adapter's load."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from math import ceil

from lora_plugins.routing.load import ReplicaLoad
from lora_plugins.routing.rendezvous import hashed
from lora_plugins.routing.residency import Report

RING_POINTS = 100
_BITS = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2 ** 64 over the golden ratio


class Counting:
    """The part that all of them share: which replicas there are, and their requests."""

    def __init__(self, seed: int = 0) -> None:
        self._replicas: list[str] = []
        self._load = ReplicaLoad()
        self._random = random.Random(seed)

    def join(self, replica: str) -> None:
        """Route to this replica too."""
        if replica not in self._replicas:
            self._replicas.append(replica)
            self._load.join(replica)

    def leave(self, replica: str) -> None:
        """Route to it no longer."""
        if replica in self._replicas:
            self._replicas.remove(replica)
            self._load.leave(replica)

    def routed(self, adapter: str, replica: str, now_s: float) -> None:
        """Count a request."""
        self._load.routed(replica)

    def completed(self, adapter: str, replica: str, now_s: float) -> None:
        """Count a request less."""
        self._load.completed(replica)

    def reported(self, replica: str, report: Report, now_s: float) -> None:
        """Nothing: these do not know residency."""

    def _among(self, excluded: Collection[str]) -> list[str]:
        return [it for it in self._replicas if it not in excluded] if excluded else self._replicas


class RandomChoice(Counting):
    """Any replica."""

    def ranked(self, adapter: str, now_s: float, excluded: Collection[str] = ()) -> Sequence[str]:
        """Two at random."""
        among = self._among(excluded)
        return self._random.sample(among, min(2, len(among)))


class PowerOfTwo(RandomChoice):
    """The less loaded of two replicas, as Ray Serve chooses."""

    def ranked(self, adapter: str, now_s: float, excluded: Collection[str] = ()) -> Sequence[str]:
        """Two at random, the less loaded first."""
        return sorted(super().ranked(adapter, now_s, excluded), key=self._load.of)


class PlainRendezvous(Counting):
    """The replica with the highest hash of the pair, whatever its load; every replica is hashed for each request."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._hashes: dict[str, int] = {}

    def join(self, replica: str) -> None:
        """Hash its name once."""
        super().join(replica)
        self._hashes[replica] = hashed(replica)[0]

    def ranked(self, adapter: str, now_s: float, excluded: Collection[str] = ()) -> Sequence[str]:
        """The best one."""
        first, hashes = hashed(adapter)[0], self._hashes
        best, highest = "", -1
        for replica in self._among(excluded):
            weight = (first ^ hashes[replica]) * _ODD & _BITS
            weight = (weight ^ weight >> 32) * _ODD & _BITS
            if weight > highest:
                best, highest = replica, weight
        return [best] if best else []


class BoundedConsistentHashing(Counting):
    """The next replica on a ring with less than `overload` times the mean load.

    Source: V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018.
    """

    def __init__(self, overload: float = 1.25, seed: int = 0) -> None:
        super().__init__(seed)
        self._overload = overload
        self._ring: list[tuple[int, str]] = []

    def join(self, replica: str) -> None:
        """Put its points on the ring."""
        if replica not in self._replicas:
            super().join(replica)
            for number in range(RING_POINTS):
                insort(self._ring, (hashed(f"{number}/{replica}")[0], replica))

    def leave(self, replica: str) -> None:
        """Take its points off the ring."""
        super().leave(replica)
        self._ring = [(point, owner) for point, owner in self._ring if owner != replica]

    def ranked(self, adapter: str, now_s: float, excluded: Collection[str] = ()) -> Sequence[str]:
        """The first on the ring whose load is below the bound."""
        bound = ceil(self._overload * (self._load.total + 1) / max(1, len(self._replicas)))
        start = bisect_left(self._ring, (hashed(adapter)[0], ""))
        fallback: list[str] = []
        for at in range(len(self._ring)):
            replica = self._ring[(start + at) % len(self._ring)][1]
            if replica not in excluded:
                if self._load.of(replica) < bound:
                    return [replica]
                fallback = fallback or [replica]
        return fallback
