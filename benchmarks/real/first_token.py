"""Seconds to the first token of an adapter that is on the disk, in host memory, or in a slot; and beside streams.

`latency`: one request after the other to an idle server; before each, the server's own list says where the adapter is.
Two servers in turn: with our kernels a slot points to host memory, with vLLM's a slot is written as on a GPU.
`cold`: an adapter that the server has never heard of comes while eight streams of the base model run, with our plugins
and on vLLM with its own resolver, both servers up at once, in blocks that alternate (`benchmarks.manager.stall`).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np

from benchmarks.manager import bed as manager_bed
from benchmarks.manager import stall
from benchmarks.manager.arms import Arm
from benchmarks.manager.client import stream
from benchmarks.real.bed import COPIES, MAX_RANK, NAME, OURS, STOCK, Bed, Figure
from benchmarks.real.many import parallel
from testbed.client import PLAIN_HTTP

PROMPT = list(range(1000, 1016))
TIERS = {"disk": (), "slot": ("store", "host", "slot"), "host": ("store", "host")}
LABELS = {"base": "no adapter", "disk": "on the disk, never asked for", "host": "in host memory", "slot": "in a slot"}
KINDS = ("cold", "base")  # of arrivals beside streams
ADAPTERS, BLOCKS, ARRIVALS, STREAMS = 120, 5, 4, 8
COLD_GOAL, GAP_GOAL = 0.5, 1.7


def latency(bed: Bed, rows: list[dict]) -> None:
    adapters = bed.adapters(5 if bed.is_quick else ADAPTERS)
    slots = ("--max-loras", "2", "--max-cpu-loras", str(len(adapters)), "--max-lora-rank", str(MAX_RANK))
    with bed.servers((OURS, COPIES), *slots) as running:
        for arm in running:  # touches what no other adapter does again
            asyncio.run(parallel(arm, [NAME, adapters[0].name]))
        until = time.monotonic() + bed.seconds
        for number in range(1, len(adapters)):
            if not bed.is_quick and time.monotonic() > until:
                break
            for turn in range(len(running)):
                arm = running[(number + turn) % len(running)]
                rows += _asked(arm, adapters[: number + 1])


def _asked(arm: Arm, adapters: Sequence[Path]) -> list[dict]:
    """The base, the last adapter twice, and of those before it the last one that is in no slot."""
    name, rows = adapters[-1].name, []
    with httpx.Client(base_url=arm.server.url, verify=PLAIN_HTTP) as client:

        def tiers(name: str) -> tuple[str, ...]:
            answer = client.get(f"/v1/loras/{name}")
            return tuple(answer.json()["tiers"]) if answer.status_code == 200 else ()

        def ask(name: str, where: str) -> None:
            if where in TIERS and (found := tiers(name)) != TIERS[where]:
                raise RuntimeError(f"{name} is expected at {where}, and found at {found}")
            rows.append({"arm": arm.name, "where": where, "first_token_s": asyncio.run(first_token_s(arm, name))})

        manager_bed.drop_page_cache(adapters[-1])
        ask(NAME, "base")
        ask(name, "disk")
        ask(name, "slot")
        # The compiled kernels point to host memory: every adapter there has a slot.
        out = (before.name for before in reversed(adapters[:-1]) if tiers(before.name) == TIERS["host"])
        if arm.name == COPIES and (other := next(out, None)) is not None:
            ask(other, "host")
    return rows


async def first_token_s(arm: Arm, name: str) -> float:
    times: list[float] = []
    began = time.perf_counter()
    await stream(arm.port, name, 1, times, PROMPT)
    return times[0] - began


def latency_figures(rows: list[dict]) -> list[Figure]:
    found = []
    for arm in (OURS, COPIES):
        for where, label in LABELS.items():
            each = [row["first_token_s"] * 1e3 for row in rows if (row["arm"], row["where"]) == (arm, where)]
            if each:
                p50, p99 = np.percentile(each, [50, 99])
                spread = f"{min(each):.0f} to {max(each):.0f} ms, n={len(each)}"
                found.append(Figure(f"{arm}: first token, {label}: p50, p99", f"{p50:.0f}, {p99:.0f} ms", spread))
    return found


async def _found_by_its_name(port: int, name: str, path: str) -> None:
    """The first request has the server's resolver find the adapter."""


def cold(bed: Bed, rows: list[dict]) -> None:
    arms = (OURS, STOCK)
    arrivals, blocks = (1, 1) if bed.is_quick else (ARRIVALS, BLOCKS)
    fresh = iter(bed.adapters(len(arms) * (1 + arrivals * blocks)))
    slots = ("--max-loras", "4", "--max-cpu-loras", "16", "--max-lora-rank", str(MAX_RANK))
    with bed.servers(arms, *slots) as running:
        for arm in running:  # touches what is touched for the first time, and does not count
            asyncio.run(parallel(arm, [NAME] * STREAMS + [next(fresh).name]))
        for number in bed.rounds(blocks):
            for turn in range(len(running)):
                arm = running[(number + turn) % len(running)]
                adapters = [next(fresh) for _ in range(arrivals)]
                time.sleep(stall.SETTLE_S)
                measured = asyncio.run(
                    stall.block_of(arm, NAME, adapters, disk=True, count=STREAMS, bring=_found_by_its_name, kinds=KINDS)
                )
                rows += [{"arm": arm.name, "block": number, **row} for row in measured]


def cold_figures(rows: list[dict]) -> list[Figure]:
    found, medians = [], dict[tuple[str, int], float]()
    for arm in (OURS, STOCK):
        of_arm = [row for row in rows if row["arm"] == arm and row["kind"] == "cold"]
        if not of_arm:
            continue
        each = [row["first_token_s"] * 1e3 for row in of_arm]
        spread = f"{min(each):.0f} to {max(each):.0f} ms, n={len(each)}"
        found.append(
            Figure(f"{arm}: cold first token beside {STREAMS} streams", f"{statistics.median(each):.0f} ms", spread)
        )
        for block in {row["block"] for row in of_arm}:
            medians[arm, block] = statistics.median(row["first_token_s"] for row in of_arm if row["block"] == block)
        for kind in KINDS:
            of_kind = stall.summary([row for row in rows if (row["arm"], row["kind"]) == (arm, kind)])
            is_goal = (arm, kind) == (OURS, "cold")
            found.append(
                Figure(
                    f"{arm}: the streams' p99 gap by the quiet median, {kind} request",
                    f"{of_kind['p99']:.2f}",
                    f"quiet p99 {of_kind['quiet_p99']:.2f}, largest {of_kind['max']:.2f}",
                    f"≤ {GAP_GOAL:g}" if is_goal else "",
                    of_kind["p99"] <= GAP_GOAL if is_goal else None,
                )
            )
    both = [medians[OURS, block] / of_stock for (arm, block), of_stock in medians.items()
            if arm == STOCK and (OURS, block) in medians]  # fmt: skip
    if both:
        found.insert(0, Figure.of_ratios("cold first token, ours by stock's, of blocks", both, at_most=COLD_GOAL))
    return found
