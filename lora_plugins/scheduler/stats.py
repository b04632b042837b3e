"""What the planner counts for metrics: whole numbers since the engine started."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lora_plugins.scheduler.adapter import Found

# From an activation that costs no copy to an adapter that is fetched again from a slow source.
BOUNDS_S = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Seconds:
    """A histogram of durations: `counts[i]` of at most `BOUNDS_S[i]`, above the bound before; the last above all."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.total_s += duration_s

    def plain(self) -> dict[str, Any]:
        """As an RPC can carry it."""
        return {"counts": list(self.counts), "total_s": self.total_s}


@dataclass(slots=True)
class Stats:
    """Counted by the planner as it plans; `waits` are from arrival to admission, by where the adapter was found."""

    waits: dict[Found, Seconds] = field(default_factory=lambda: {found: Seconds() for found in Found})
    load_seconds: Seconds = field(default_factory=Seconds)
    activate_seconds: Seconds = field(default_factory=Seconds)
    refused: Counter[str] = field(default_factory=Counter)  # requests by error code
    load_failures: int = 0
    host_evictions: int = 0
    host_evicted_bytes: int = 0
    slot_evictions: int = 0
    instant_activations: int = 0
    background_activations: int = 0
