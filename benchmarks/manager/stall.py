"""Figure of README and docs/benchmarks/manager.md#a-cold-adapter-beside-running-streams, for R18: `make bench-manager`.

What running streams feel while cold adapters arrive: vLLM's own manager against ours.

One server for each arm, all up at once; blocks of a few arrivals alternate between them. Streams of the base model run
at a steady rate; an adapter that no process has seen is loaded and asked for a few tokens; a moment later it is asked
again, now resident, and then the base model is: what computing such a request costs the streams without any loading,
and without any adapter. Gaps between tokens are divided by the median gap of the same block before the first arrival.

Prints Markdown, draws docs/images/stall.svg and keeps benchmarks/results/stall.json. The rows of a run (`--sizes 40`)
replace those of the same sizes in the kept file, so that a long benchmark can be taken up again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.callers import gaps_s, load, stream
from benchmarks.manager import bed
from benchmarks.manager.bed import ARMS, NAMES, Arm, rotated, servers
from benchmarks.plots import OTHER, OURS, drawing
from benchmarks.record import RESULTS, keep

STREAMS = 4
SETTLE_S, QUIET_S, AFTER_S = 1.0, 2.5, 1.0
COLD_TOKENS = 2
COLD_PROMPT = [37, 38]  # so that what is computed for it is little beside the streams
KINDS = ("cold", "resident", "base")  # of arrivals


def measure(size_mb: int, rows: list[dict], *, blocks: int, arrivals: int) -> None:
    """Append the rows of one size: one for each arrival, of each kind and arm."""
    rank = bed.RANKS[size_mb]
    base = bed.base_model()
    source = bed.adapter(base, rank)
    bed.warm_page_cache(source)
    arguments = ("--max-lora-rank", str(rank), "--max-loras", "2", "--max-cpu-loras", "3")
    with (
        tempfile.TemporaryDirectory(dir=bed.CACHE) as home,
        servers([*ARMS], base, Path(home), arguments) as running,
    ):
        arrived = 0
        for block in range(-1, blocks):  # the first one touches what is touched for the first time, and does not count
            print(f"{size_mb} MB, block {block + 1} of {blocks}", flush=True)
            for arm in rotated(running, block):
                links = []
                for _ in range(arrivals):
                    arrived += 1
                    links.append(bed.link(source, Path(home) / f"cold-{arrived}"))
                measured = asyncio.run(block_of(arm, str(base), links))
                if block >= 0:
                    rows += [{"arm": arm.name, "size_mb": size_mb, "rank": rank, "block": block, **r} for r in measured]


async def block_of(
    arm: Arm,
    base: str,
    adapters: list[Path],
    *,
    disk: bool = False,
    count: int = STREAMS,
    bring: Callable[[int, str, str], Awaitable[None]] = load,
    kinds: Sequence[str] = KINDS,
) -> list[dict]:
    """A row for each kind of arrival of each adapter, beside `count` streams; `bring` makes an adapter known."""
    streams: list[list[float]] = [[] for _ in range(count)]
    running = [asyncio.create_task(stream(arm.port, base, 900, times)) for times in streams]
    rows = []
    try:
        await asyncio.sleep(SETTLE_S + QUIET_S)
        now = time.perf_counter()
        quiet = gaps_s(streams, now - QUIET_S, now)
        for directory in adapters:
            if disk:
                bed.drop_page_cache(directory)
            rows += [await _arrival(arm, directory, base, streams, quiet, kind, bring) for kind in kinds]
        if any(task.done() for task in running):
            raise RuntimeError("a steady stream ended too early")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return rows


async def _arrival(
    arm: Arm,
    directory: Path,
    base: str,
    streams: list[list[float]],
    quiet: list[float],
    kind: str,
    bring: Callable[[int, str, str], Awaitable[None]],
) -> dict:
    started = time.perf_counter()
    if kind == "cold":
        await bring(arm.port, directory.name, str(directory))
    answer: list[float] = []
    await stream(arm.port, base if kind == "base" else directory.name, COLD_TOKENS, answer, prompt=COLD_PROMPT)
    ended = time.perf_counter() + AFTER_S
    await asyncio.sleep(AFTER_S)
    loud = gaps_s(streams, started, ended)
    return {
        "kind": kind,
        "quiet_median_ms": statistics.median(quiet) * 1e3,
        "quiet_gaps_ms": [round(gap * 1e3, 2) for gap in quiet],
        "gaps_ms": [round(gap * 1e3, 2) for gap in loud],
        "first_token_s": answer[0] - started,
    }


def summary(rows: list[dict]) -> dict[str, float]:
    """Of one arm, size and kind of arrival; all gaps are multiples of their block's undisturbed median."""
    of_blocks = {row["block"]: row for row in rows}.values()
    quiet = [gap / row["quiet_median_ms"] for row in of_blocks for gap in row["quiet_gaps_ms"]]
    loud = [gap / row["quiet_median_ms"] for row in rows for gap in row["gaps_ms"]]
    each = [max(row["gaps_ms"]) / row["quiet_median_ms"] for row in rows]
    return {
        "arrivals": len(rows),
        "quiet_median_ms": statistics.median(row["quiet_median_ms"] for row in of_blocks),
        "quiet_p99": float(np.percentile(quiet, 99)),
        "quiet_max": max(quiet),
        "p99": float(np.percentile(loud, 99)),
        "max": max(loud),
        "max_of_each_median": statistics.median(each),
        "first_token_s": statistics.median(row["first_token_s"] for row in rows),
    }


def table(rows: list[dict]) -> str:
    head = (
        "adapter | manager | arrivals | quiet gap: median, p99, max | p99 gap | largest gap (median of each) "
        "| first token | resident: p99, max | resident: first token | base: p99, max"
    )
    lines = [f"| {head} |", "|---" * 10 + "|"]
    for size_mb in sorted({row["size_mb"] for row in rows}):
        for arm in NAMES:
            of_arm = [row for row in rows if (row["arm"], row["size_mb"]) == (arm, size_mb)]
            if not of_arm:
                continue
            cold, warm, base = (summary([row for row in of_arm if row["kind"] == kind]) for kind in KINDS)
            lines.append(
                f"| {size_mb} MB | {NAMES[arm]} | {cold['arrivals']} "
                f"| {cold['quiet_median_ms']:.0f} ms, {cold['quiet_p99']:.2f}×, {cold['quiet_max']:.2f}× "
                f"| {cold['p99']:.2f}× | {cold['max']:.2f}× ({cold['max_of_each_median']:.2f}×) "
                f"| {cold['first_token_s']:.2f} s "
                f"| {warm['p99']:.2f}×, {warm['max']:.2f}× | {warm['first_token_s']:.2f} s "
                f"| {base['p99']:.2f}×, {base['max']:.2f}× |"
            )
    return "\n".join(lines)


def merged(rows: list[dict]) -> list[dict]:
    """Keep `rows`, and earlier ones of other arms or sizes."""
    path = RESULTS / "stall.json"
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {(row["arm"], row["size_mb"]) for row in rows}
    rows = [row for row in earlier if (row["arm"], row["size_mb"]) not in new] + rows
    keep("stall", rows)
    return rows


def draw(rows: list[dict]) -> None:
    """Each cold adapter's largest gap between tokens of running streams."""
    arms = {"vllm+kernels": ("vLLM's manager", OTHER), "ours+kernels": ("lora_lru_manager", OURS)}
    sizes = sorted({row["size_mb"] for row in rows})
    with drawing("stall", "Largest gap between tokens while cold adapters arrive", figsize=(8, 3.6)) as (_, axis):
        for number, (arm, (name, colour)) in enumerate(arms.items()):
            for at, size_mb in enumerate(sizes):
                some = [row for row in rows if (row["arm"], row["size_mb"], row["kind"]) == (arm, size_mb, "cold")]
                if not some:
                    continue
                largest = [max(row["gaps_ms"]) / row["quiet_median_ms"] for row in some]
                x, median = at + (number - 0.5) * 0.4, statistics.median(largest)
                label = name if at == 0 else None
                axis.bar(x, median, 0.36, color=colour, alpha=0.45, label=label and f"{label}: median")
                spread = [x + 0.22 * (place / max(len(largest) - 1, 1) - 0.5) for place in range(len(largest))]
                axis.scatter(spread, largest, s=14, color=colour, label=label and f"{label}: each arrival")
                axis.text(x, 0.35, f"{median:.2f}×", ha="center", fontsize=9)
        axis.axhline(1, color="grey", lw=0.8, ls="--", label="undisturbed")
        axis.set_title("Running streams while a cold adapter arrives: largest gap between two tokens", fontsize=11)
        axis.set_xticks(range(len(sizes)), [f"{size_mb} MB" for size_mb in sizes])
        axis.set_xlabel("size of the adapter that arrives")
        axis.set_ylabel("× the undisturbed median gap")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8, loc="upper left")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", choices=bed.RANKS, default=[*bed.RANKS])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--arrivals", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the servers would outlive a time limit
    kept: list[dict] = []
    for size_mb in options.sizes:
        rows: list[dict] = []
        try:
            measure(size_mb, rows, blocks=options.blocks, arrivals=options.arrivals)
        finally:  # a time limit leaves what has been measured
            if rows:
                print(table(rows), flush=True)
                kept = merged(rows)
    print(table(kept))
    draw(kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
