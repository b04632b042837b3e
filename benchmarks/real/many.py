"""Goal of R70, and the figures of docs/benchmarks/real.md, 100 under Zipf and 1,000 in host memory.

Many adapters: 100 under Zipf over 8 slots, with our plugins and on stock vLLM; 1,000 in host memory, and one.

Sixteen clients in a closed loop, as `benchmarks.real.traffic` has them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.manager.arms import Arm
from benchmarks.manager.bed import size_bytes
from benchmarks.manager.client import stream
from benchmarks.real.bed import MAX_RANK, OURS, SMALL, SMALL_RANK, STOCK, STREAMS, Bed, Figure
from benchmarks.real.traffic import Traffic, requests_per_s, worker_memory

ZIPF_ADAPTERS, ZIPF_SLOTS = 100, 8
HOST_ADAPTERS = 1000
STRETCH_S, QUICK_STRETCH_S = 8.0, 3.0
ZIPF = Traffic("Zipf", STREAMS, zipf=1.0)
ALL, ONE = Traffic("all", STREAMS), Traffic("one", STREAMS, only_first=True)
HOST_GOAL = 0.95
LATE = ("--stream-interval", "1000")  # the first token, and all others with the last one: clients cost less


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
            for turn in range(len(running)):
                arm = running[(number + turn) % len(running)]
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
        each = [speeds[kind, number] for number in rounds]
        found.append(
            Figure(f"{kind}: answers/s", f"{statistics.median(each):.2f}", f"{min(each):.2f} to {max(each):.2f}")
        )
    return found
