"""Goal of R70, and the figures of docs/benchmarks/real.md, 100 under Zipf and 1,000 in host memory.

Many adapters: 100 under Zipf over 8 slots, with our plugins and on stock vLLM; 1,000 in host memory, and one.

Sixteen clients in a closed loop: each asks again as soon as it has its answer.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import psutil

from benchmarks.callers import stream
from benchmarks.manager.bed import Arm, rotated, size_bytes
from benchmarks.real.bed import MAX_RANK, OURS, SMALL, SMALL_RANK, STOCK, STREAMS, Bed, Figure

ZIPF_ADAPTERS, ZIPF_SLOTS = 100, 8
HOST_ADAPTERS = 1000
STRETCH_S, QUICK_STRETCH_S = 8.0, 3.0
PROMPT_TOKENS = 4
TOKENS = 16  # of an answer, on average
RAMP_S = 1.0  # at the beginning of a stretch, which does not count
HOST_GOAL = 0.95
LATE = ("--stream-interval", "1000")  # the first token, and all others with the last one: clients cost less


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


ZIPF = Traffic("Zipf", STREAMS, zipf=1.0)
ALL, ONE = Traffic("all", STREAMS), Traffic("one", STREAMS, only_first=True)


async def parallel(arm: Arm, names: Iterable[str]) -> None:
    """A token of each, as many at once as the server computes."""
    places = asyncio.Semaphore(STREAMS)

    async def ask(name: str) -> None:
        async with places:
            await stream(arm.port, name, 1, [], prompt=[40])

    await asyncio.gather(*(ask(name) for name in names))


def _speed(bed: Bed, arm: Arm, adapters: list[Path], traffic: Traffic, number: int) -> float:
    stretch_s = QUICK_STRETCH_S if bed.is_quick else STRETCH_S
    return asyncio.run(requests_per_s(arm, adapters, traffic, number, stretch_s))


def zipf(bed: Bed, rows: list[dict]) -> None:
    adapters = bed.adapters(20 if bed.is_quick else ZIPF_ADAPTERS)
    slots = ("--max-loras", str(ZIPF_SLOTS), "--max-cpu-loras", str(len(adapters)), "--max-lora-rank", str(MAX_RANK))
    with bed.servers((OURS, STOCK), *slots, *LATE) as running:
        for arm in running:
            asyncio.run(parallel(arm, [directory.name for directory in adapters]))
        for number in bed.rounds():
            for arm in rotated(running, number):
                speed = _speed(bed, arm, adapters, ZIPF, number)
                rows.append({"arm": arm.name, "round": number, "adapters": len(adapters), "requests_per_s": speed})


def zipf_figures(rows: list[dict]) -> list[Figure]:
    count = rows[0]["adapters"] if rows else 0
    what = f"{count} adapters under Zipf, {ZIPF_SLOTS} slots"
    return _compared(rows, "arm", (OURS, STOCK), f"{what}: throughput, ours by stock's", None)


def thousand(bed: Bed, rows: list[dict]) -> None:
    adapters = bed.adapters(48 if bed.is_quick else HOST_ADAPTERS, SMALL)
    slots = ("--max-loras", str(STREAMS), "--max-cpu-loras", str(len(adapters)), "--max-lora-rank", str(SMALL_RANK))
    with bed.servers([OURS], *slots, *LATE) as (arm,):
        names = [directory.name for directory in adapters]
        asyncio.run(parallel(arm, names[:STREAMS] * 2))
        before = worker_memory(arm)
        asyncio.run(parallel(arm, names[STREAMS:]))
        after = worker_memory(arm)
        rows.append(
            {
                "loaded": len(adapters) - STREAMS,
                "file_bytes": statistics.mean(size_bytes(directory) for directory in adapters[STREAMS:]),
                **{name: after[name] - before[name] for name in after},
            }
        )
        for number in bed.rounds():
            for traffic in (ALL, ONE) if number % 2 == 0 else (ONE, ALL):
                speed = _speed(bed, arm, adapters, traffic, number)
                rows.append({"adapters": len(adapters) if traffic is ALL else 1, "traffic": traffic.name,
                             "round": number, "requests_per_s": speed})  # fmt: skip


def thousand_figures(rows: list[dict]) -> list[Figure]:
    speeds = [row for row in rows if "traffic" in row]
    count = max((row["adapters"] for row in speeds), default=0)
    label = f"{count} adapters in host memory: share of one's throughput"
    found = _compared(speeds, "traffic", (ALL.name, ONE.name), label, HOST_GOAL)
    for row in rows:
        if "loaded" in row:
            each_mb = row["rss_bytes"] / row["loaded"] / 1e6
            spread = f"file {row['file_bytes'] / 1e6:.2f} MB, n={row['loaded']}"
            found.append(Figure("resident memory of the worker for an adapter", f"{each_mb:.2f} MB", spread))
    return found


def _compared(
    rows: Sequence[dict], key: str, both: tuple[str, str], label: str, at_least: float | None
) -> list[Figure]:
    """The ratio of two kinds of rows, round by round, then each by itself."""
    speeds = {(row[key], row["round"]): row["requests_per_s"] for row in rows}
    rounds = [number for kind, number in speeds if kind == both[0] and (both[1], number) in speeds]
    if not rounds:
        return []
    ratios = [speeds[both[0], number] / speeds[both[1], number] for number in rounds]
    found = [Figure.of_ratios(label, ratios, at_least=at_least)]
    for kind in both:
        found.append(Figure.of_each(f"{kind}: answers/s", [speeds[kind, number] for number in rounds], ".2f"))
    return found
