"""What a worker counts for the API server's metrics: whole numbers since it started, and who is where.

Counting is done in the engine loop, so it is an addition here and there, and no more; the API server asks for the sums.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from lora_plugins.manager.host_tier import HostTier, Stage

# From a flip of a slot (microseconds) to an adapter that is fetched anew from a slow source.
BOUNDS_S = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Seconds:
    """A histogram of durations: `counts[i]` of at most `BOUNDS_S[i]`, above the bound before; the last above all.

    Two threads may observe at once; at worst one of the two is lost then.
    """

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


def counters(tier: HostTier, manager: Any, loading: Seconds) -> dict[str, Any]:
    """The group `counters` of `get_lora_metrics()`.

    `loaded` has a row for each adapter that is staged: name, whether a slot has it, whether it is pinned.
    """
    entries = tier.snapshot()
    return {
        "loaded": [
            (entry.name, manager.is_ready(entry.adapter_id), entry.pinned)
            for entry in entries
            if entry.stage is Stage.STAGED
        ],
        "slots": manager.lora_slots,
        "host_max_adapters": manager.capacity,
        "host_max_bytes": tier.max_bytes,
        "host_bytes": sum(entry.size_bytes for entry in entries),
        "host_leased": sum(bool(entry.leases) for entry in entries),
        "host_evictions": tier.evictions,
        "host_evicted_bytes": tier.evicted_bytes,
        "load_failures": tier.failures,
        "slot_flips": manager.flips,
        "slot_copies": manager.copies_in_loop,
        "slot_evictions": manager.slot_evictions,
        "load_seconds": loading.plain(),
        "activate_seconds": manager.activating.plain(),
    }
