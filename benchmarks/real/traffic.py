"""Clients in a closed loop, for docs/benchmarks/real.md: what they ask for, and how fast they get answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import psutil

from benchmarks.manager.arms import Arm
from benchmarks.manager.client import stream

PROMPT_TOKENS = 4
TOKENS = 16  # of an answer, on average
RAMP_S = 1.0  # at the beginning of a stretch, which does not count


@dataclass(frozen=True)
class Traffic:
    """Clients that each ask for what is drawn next.

    Attributes:
        zipf: the exponent by which adapters are drawn; 0 is uniform.
        only_first: all ask for the first adapter.
    """

    name: str
    clients: int
    zipf: float = 0.0
    only_first: bool = False

    def draws(self, adapters: int, seed: int) -> Iterator[tuple[int, int]]:
        """Adapters and numbers of tokens, half to one and a half times the mean, of all clients together."""
        rng = random.Random(f"{seed}-{self.name}")
        cumulated = list(accumulate((rank + 1) ** -self.zipf for rank in range(adapters)))
        while True:
            adapter = rng.choices(range(adapters), cum_weights=cumulated)[0]
            yield (0 if self.only_first else adapter), rng.randint(TOKENS // 2, TOKENS * 3 // 2)


@dataclass(frozen=True)
class Answered:
    """When one request's first token and its end came, in seconds since its stretch began."""

    first: float
    end: float

    def share(self, began: float, ended: float) -> float:
        """Which part of its answer came between these."""
        if self.first == self.end:
            return float(began <= self.end < ended)
        return max(0.0, min(self.end, ended) - max(self.first, began)) / (self.end - self.first)


async def requests_per_s(arm: Arm, adapters: Sequence[Path], traffic: Traffic, seed: int, stretch_s: float) -> float:
    """How many are answered a second in a stretch, after its first second; `seed` gives what clients ask for."""
    answered: list[Answered] = []
    draws = traffic.draws(len(adapters), seed)
    began = time.perf_counter()

    async def client(number: int) -> None:
        while time.perf_counter() - began < stretch_s:
            adapter, tokens = next(draws)
            times: list[float] = []
            prompt = [40 + (number * 7 + len(answered) + place) % 400 for place in range(PROMPT_TOKENS)]
            await stream(arm.port, adapters[adapter].name, tokens, times, prompt=prompt)
            answered.append(Answered(times[0] - began, times[-1] - began))

    await asyncio.gather(*(client(number) for number in range(traffic.clients)))
    return round(sum(one.share(RAMP_S, stretch_s) for one in answered) / (stretch_s - RAMP_S), 3)


def worker_memory(arm: Arm) -> dict[str, int]:
    """Bytes of the server's largest process, its worker."""
    children = psutil.Process(arm.server.process.pid).children(recursive=True)
    worker = max(children, key=lambda process: process.memory_info().rss)
    found = {}
    for line in Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name] = int(value.split()[0]) * 1024
    return {"pss_bytes": found["Pss"], "rss_bytes": found["Rss"], "anonymous_bytes": found["Anonymous"]}
