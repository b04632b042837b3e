"""Figures of docs/benchmarks/real.md, cold adapters beside streams, for R18 and R66.

`cold`: an adapter that the server has never heard of comes while eight streams of the base model run, with our plugins
and on vLLM with its own resolver, both servers up at once, in blocks that alternate (`benchmarks.manager.stall`).
`large`: the same with adapters of hundreds of MB, both with our kernels, as vLLM's would compute at the slots' rank.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.adapters import write_random_adapter
from benchmarks.manager import stall
from benchmarks.manager.bed import rotated, size_bytes
from benchmarks.real.bed import MAX_RANK, NAME, OURS, STOCK, STOCK_LOADS, Bed, Figure
from benchmarks.real.many import parallel

KINDS = ("cold", "base")  # of arrivals beside streams
BLOCKS, ARRIVALS, STREAMS = 5, 4, 8
LARGE_RANK = 256  # of all linear layers in float32: 313 MB
COLD_GOAL, GAP_GOAL = 0.5, 1.7


async def _found_by_its_name(port: int, name: str, path: str) -> None:
    """The first request has the server's resolver find the adapter."""


def cold(bed: Bed, rows: list[dict]) -> None:
    arrivals, blocks = (1, 1) if bed.is_quick else (ARRIVALS, BLOCKS)
    adapters = bed.adapters(2 * (1 + arrivals * blocks))
    slots = ("--max-loras", "4", "--max-cpu-loras", "16", "--max-lora-rank", str(MAX_RANK))
    _beside_streams(bed, rows, (OURS, STOCK), adapters, slots, blocks)


def large(bed: Bed, rows: list[dict]) -> None:
    rank, arrivals, blocks = (16, 1, 1) if bed.is_quick else (LARGE_RANK, 2, 3)
    adapters = _large_adapters(bed, 2 * (1 + arrivals * blocks), rank)
    slots = ("--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", str(rank))
    _beside_streams(bed, rows, (OURS, STOCK_LOADS), adapters, slots, blocks)


def _large_adapters(bed: Bed, count: int, rank: int) -> list[Path]:
    """Random ones of all linear layers, in float32; each differs from the others in its last number."""
    made = [bed.root / f"large-{number}" for number in range(count)]
    write_random_adapter(made[0], bed.base, rank)
    for number, directory in enumerate(made[1:], 1):
        shutil.copytree(made[0], directory)
        with (directory / "adapter_model.safetensors").open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(np.float32(number / 1e3).tobytes())
    return made


def _beside_streams(
    bed: Bed, rows: list[dict], arms: Sequence[str], adapters: Sequence[Path], slots: Sequence[str], blocks: int
) -> None:
    """Rows of blocks that alternate between two servers; each gets the same number of adapters in a block."""
    fresh, arrivals = iter(adapters), (len(adapters) // len(arms) - 1) // blocks
    size_mb = size_bytes(adapters[-1]) / 1e6
    with bed.servers(arms, *slots) as running:
        for arm in running:  # touches what is touched for the first time, and does not count
            asyncio.run(parallel(arm, [NAME] * STREAMS + [next(fresh).name]))
        for number in bed.rounds(blocks):
            for arm in rotated(running, number):
                block = [next(fresh) for _ in range(arrivals)]
                time.sleep(stall.SETTLE_S)
                measured = asyncio.run(
                    stall.block_of(arm, NAME, block, disk=True, count=STREAMS, bring=_found_by_its_name, kinds=KINDS)
                )
                rows += [{"arm": arm.name, "block": number, "size_mb": size_mb, **row} for row in measured]


def cold_figures(rows: list[dict]) -> list[Figure]:
    return _figures(rows, first_token=COLD_GOAL, gap=GAP_GOAL)


def large_figures(rows: list[dict]) -> list[Figure]:
    return _figures(rows)


def _figures(rows: list[dict], *, first_token: float | None = None, gap: float | None = None) -> list[Figure]:
    """First tokens of ours by the other server's, of blocks, then the streams' gaps of each; with goals at most."""
    found, medians = [], dict[tuple[str, int], float]()
    arms = list(dict.fromkeys((OURS, *(row["arm"] for row in rows))))
    for arm in arms:
        of_arm = [row for row in rows if row["arm"] == arm and row["kind"] == "cold"]
        if not of_arm:
            continue
        each_ms = [row["first_token_s"] * 1e3 for row in of_arm]
        found.append(Figure.of_each(f"{arm}: cold first token beside {STREAMS} streams", each_ms, ".0f", " ms"))
        for block in {row["block"] for row in of_arm}:
            medians[arm, block] = statistics.median(row["first_token_s"] for row in of_arm if row["block"] == block)
        for kind in KINDS:
            of_kind = stall.summary([row for row in rows if (row["arm"], row["kind"]) == (arm, kind)])
            goal = gap if (arm, kind) == (OURS, "cold") else None
            found.append(
                Figure(
                    f"{arm}: streams' p99 gap, {kind} request",
                    f"{of_kind['p99']:.2f}",
                    f"quiet p99 {of_kind['quiet_p99']:.2f}, largest {of_kind['max']:.2f}",
                    "" if goal is None else f"≤ {goal:g}",
                    None if goal is None else of_kind["p99"] <= goal,
                )
            )
            if kind == "cold":
                what = f"{arm}: an arrival's largest gap, median"
                found.append(Figure(what, f"{of_kind['max_of_each_median']:.2f}", f"n={len(of_arm)}"))
    both = [medians[OURS, block] / of_stock for (arm, block), of_stock in medians.items()
            if arm != OURS and (OURS, block) in medians]  # fmt: skip
    if both:
        size_mb = statistics.median(row["size_mb"] for row in rows)
        what = f"cold first token of {size_mb:.1f} MB, ours by stock's, of blocks"
        found.insert(0, Figure.of_ratios(what, both, at_most=first_token))
    return found
