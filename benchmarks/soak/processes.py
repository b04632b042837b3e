"""What the server's processes take: memory, threads and open files, sampled; and how fast memory grows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from benchmarks.soak.server import processes_of
from testbed.server import Server


@dataclass(frozen=True)
class Sample:
    """One process at one time."""

    at_s: float
    resident_mb: float
    threads: int
    files: int


class Processes:
    """The API server, the engine and the worker of one server."""

    def __init__(self, server: Server) -> None:
        self._processes = processes_of(server)
        self.samples: dict[str, list[Sample]] = {name: [] for name in self._processes}

    def sample(self, at_s: float) -> None:
        """Look at each; one that has ended has no sample."""
        for name, process in self._processes.items():
            try:
                with process.oneshot():
                    resident_mb = process.memory_info().rss / 1e6
                    self.samples[name].append(Sample(at_s, resident_mb, process.num_threads(), process.num_fds()))
            except psutil.NoSuchProcess:
                continue

    def ended(self) -> list[str]:
        """Those that run no more."""
        return [name for name, process in self._processes.items() if not process.is_running()]


def growth_mb_per_min(samples: Sequence[Sample]) -> float:
    """Theil and Sen's slope: the median of the slopes between pairs, which a single large piece does not move."""
    few = samples[:: max(1, len(samples) // 200)]
    slopes = [
        (later.resident_mb - sooner.resident_mb) / (later.at_s - sooner.at_s) * 60
        for i, sooner in enumerate(few)
        for later in few[i + 1 :]
        if later.at_s - sooner.at_s > (few[-1].at_s - few[0].at_s) / 4
    ]
    return statistics.median(slopes) if slopes else 0.0
