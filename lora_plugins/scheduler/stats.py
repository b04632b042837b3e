"""The planner's measures: counts for metrics since the engine started, and how long steps and copies take.

Taken in the engine core process. `Stats` goes to API servers as it is (`messages.PlannerFigures`), for `/metrics`;
`StepTimes` stays with the planner, and decides how a slot is written.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum

# From an activation that costs no copy to an adapter that is fetched again from a slow source.
BOUNDS_S = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_AVERAGED = 20


class FoundIn(StrEnum):
    """Where an adapter was when a request for it came: in a slot, in host memory, or on disk at best."""

    SLOT = "slot"
    HOST = "host"
    STORE = "store"


@dataclass(slots=True)
class Histogram:
    """Counts of durations: `counts[i]` up to `BOUNDS_S[i]` and above the bound before; the last above all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def observe(self, duration_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.total_s += duration_s


@dataclass(slots=True)
class Stats:
    """Counts and durations since the engine started.

    Attributes:
        wait_seconds: from a request's arrival until vLLM runs the request, by where its adapter was found.
        refused: requests, by error code.
        short_of: the flag whose value has made requests wait although memory was left; empty where none has.
    """

    wait_seconds: dict[FoundIn, Histogram] = field(default_factory=lambda: {found: Histogram() for found in FoundIn})
    load_seconds: Histogram = field(default_factory=Histogram)
    activate_seconds: Histogram = field(default_factory=Histogram)
    refused: dict[str, int] = field(default_factory=dict)
    load_failures: int = 0
    host_evictions: int = 0
    host_evicted_bytes: int = 0
    slot_evictions: int = 0
    instant_activations: int = 0
    background_activations: int = 0
    short_of: str = ""


class StepTimes:
    """Means of the last steps with requests, and of the last copies into slots, by byte.

    A copy in the background leaves other requests alone, and costs its adapter a step or two without the slot. A copy
    before a step delays all requests that run. So a copy that is short beside a step is made before the step.
    """

    def __init__(self) -> None:
        self._step_s = 0.0
        self._s_per_byte: float | None = None
        self._began_at: float | None = None

    def step_begins(self, now: float, *, is_running: bool) -> None:
        """Note that a step begins, and whether requests run in the step."""
        if self._began_at is not None:
            self._step_s += (now - self._began_at - self._step_s) / _AVERAGED
        self._began_at = now if is_running else None

    def copied(self, size_bytes: int, copy_s: float) -> None:
        """Note that a slot was written in the background."""
        s_per_byte = copy_s / max(1, size_bytes)
        before = s_per_byte if self._s_per_byte is None else self._s_per_byte
        self._s_per_byte = before + (s_per_byte - before) / _AVERAGED

    def is_short(self, size_bytes: int, running: int) -> bool:
        """Return whether a copy costs the `running` adapters together less than a step costs the copy's adapter."""
        return self._s_per_byte is not None and self._s_per_byte * size_bytes * running <= self._step_s
