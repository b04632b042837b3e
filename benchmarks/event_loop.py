"""How late an event loop is while something runs beside it, for R62: `make bench-scale` and `make bench-verify`.

A task of the loop sleeps for a millisecond again and again; how much later than that it goes on is how late the loop
is. Beside wall time stands the CPU time of the whole process: what it used between two turns of the loop is what kept
the loop waiting, whoever else uses the machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self


class Lateness:
    """How late the turns of this loop are while the block runs, in seconds of wall and of CPU time."""

    def __init__(self) -> None:
        self.late_s: list[tuple[float, float]] = []
        self._is_over = False

    async def __aenter__(self) -> Self:
        self._turning = asyncio.create_task(self._turn())
        await asyncio.sleep(0.05)
        self.late_s.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.002)  # a turn that is late ends first
        self._is_over = True
        await self._turning

    async def _turn(self) -> None:
        while not self._is_over:
            began, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            late_s, cpu_s = time.perf_counter() - began - 0.001, time.process_time() - cpu
            self.late_s.append((late_s, min(late_s, cpu_s)))

    @property
    def longest(self) -> tuple[float, float]:
        return max(late for late, _ in self.late_s), max(cpu for _, cpu in self.late_s)


Run = tuple[float, float, float, float]


async def timed(work: Callable[[], Awaitable[Any]]) -> Run:
    """Seconds that it took, CPU time, and how late the loop was meanwhile, in both; all in seconds."""
    async with Lateness() as lateness:
        started, cpu = time.perf_counter(), time.process_time()
        await work()
        took_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    return took_s, cpu_s, *lateness.longest
