"""More adapters than slots, all in host memory: requests/s and first-token times, vLLM's manager against ours.

A closed loop of clients draws adapters by a Zipf law or evenly. Two servers, up at once, get the same requests in the
same order; stretches of them alternate.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.manager import bed
from benchmarks.manager.arms import NAMES, Arm, servers
from benchmarks.manager.client import load, stream

ADAPTERS, SLOTS, CLIENTS = 16, 4, 12
PROMPT_TOKENS, NEW_TOKENS = 4, 8
HIDDEN, LAYERS = 1024, 8
DRAWS = ("zipf", "uniform")


def draws(kind: str, seed: int) -> Iterator[int]:
    generator = random.Random(seed)
    weights = [1 / (n + 1) if kind == "zipf" else 1.0 for n in range(ADAPTERS)]
    while True:
        yield generator.choices(range(ADAPTERS), weights)[0]


def measure(rank: int, arms: Sequence[str], *, stretches: int, stretch_s: float) -> list[dict]:
    base = bed.base_model(HIDDEN, LAYERS)
    source = bed.adapter(base, rank)
    arguments = ("--max-lora-rank", str(rank), "--max-loras", str(SLOTS), "--max-cpu-loras", str(ADAPTERS + 2))
    rows = []
    with tempfile.TemporaryDirectory(dir=bed.CACHE) as home, servers(arms, base, Path(home), arguments) as running:
        adapters = [bed.link(source, Path(home) / f"a{number}") for number in range(ADAPTERS)]
        for arm in running:
            asyncio.run(_load_all(arm, adapters))
        for stretch in range(stretches):
            for kind in DRAWS:
                for turn in range(len(running)):
                    arm = running[(stretch + turn) % len(running)]
                    print(f"stretch {stretch + 1} of {stretches}, {kind}, {arm.name}", flush=True)
                    seconds, firsts = asyncio.run(_stretch(arm, adapters, draws(kind, stretch), stretch_s))
                    rows.append(
                        {
                            "arm": arm.name,
                            "draw": kind,
                            "rank": rank,
                            "size_bytes": bed.size_bytes(source),
                            "stretch": stretch,
                            "seconds": seconds,
                            "first_token_ms": [round(first * 1e3, 1) for first in firsts],
                        }
                    )
    return rows


async def _load_all(arm: Arm, adapters: list[Path]) -> None:
    for directory in adapters:
        await load(arm.port, directory.name, str(directory))
        await stream(arm.port, directory.name, 1, [], prompt=[40])


async def _stretch(arm: Arm, adapters: list[Path], names: Iterator[int], stretch_s: float) -> tuple[float, list[float]]:
    firsts: list[float] = []
    started = time.perf_counter()
    counter = itertools.count()

    async def client() -> None:
        while time.perf_counter() - started < stretch_s:
            begun = time.perf_counter()
            times: list[float] = []
            prompt = [40 + next(counter) % 400 for _ in range(PROMPT_TOKENS)]
            await stream(arm.port, adapters[next(names)].name, NEW_TOKENS, times, prompt=prompt)
            firsts.append(times[0] - begun)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return time.perf_counter() - started, firsts


def table(rows: list[dict]) -> str:
    lines = [
        "| adapters | drawn | manager | requests/s | against vLLM's | first token: median | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for rank in sorted({row["rank"] for row in rows}):
        for kind in DRAWS:
            rates: dict[str, float] = {}
            for arm in NAMES:
                some = [row for row in rows if (row["arm"], row["draw"], row["rank"]) == (arm, kind, rank)]
                if not some:
                    continue
                rates[arm] = sum(len(row["first_token_ms"]) for row in some) / sum(row["seconds"] for row in some)
                reference = rates.get("vllm+kernels" if "kernels" in arm else "vllm", rates[arm])
                firsts = [first for row in some for first in row["first_token_ms"]]
                lines.append(
                    f"| {ADAPTERS} of {some[0]['size_bytes'] / 1e6:.0f} MB, {SLOTS} slots | {kind} | {NAMES[arm]} "
                    f"| {rates[arm]:.2f} | {rates[arm] / reference:.2f}× | {statistics.median(firsts):.0f} ms "
                    f"| {float(np.percentile(firsts, 99)):.0f} ms |"
                )
    return "\n".join(lines)
