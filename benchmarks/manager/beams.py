"""Beam search beside 16 clients of other adapters with one slot, and alone: vLLM's manager against ours.

Six tokens of two beams, and a plain request of as many tokens in its place. All adapters are in host memory.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.manager import bed
from benchmarks.manager.arms import NAMES, Arm, servers
from benchmarks.manager.client import load, post, stream

HIDDEN, LAYERS, RANK = 1024, 8, 16
CROWD, TOKENS = 16, 6
KINDS = {"plain": {"ignore_eos": True}, "beams": {"use_beam_search": True, "n": 2, "ignore_eos": True}}


def measure(arms: Sequence[str], *, stretches: int, stretch_s: float) -> list[dict]:
    base = bed.base_model(HIDDEN, LAYERS)
    source = bed.adapter(base, RANK)
    arguments = ("--max-lora-rank", str(RANK), "--max-loras", "1", "--max-cpu-loras", str(CROWD + 2))
    rows = []
    with tempfile.TemporaryDirectory(dir=bed.CACHE) as home, servers(arms, base, Path(home), arguments) as running:
        adapters = [bed.link(source, Path(home) / f"a{number}") for number in range(CROWD + 1)]
        for arm in running:
            asyncio.run(_load_all(arm, adapters))
        for stretch in range(stretches):
            for crowd in (0, CROWD):
                for kind in KINDS:
                    for turn in range(len(running)):
                        arm = running[(stretch + turn) % len(running)]
                        took_s = asyncio.run(_stretch(arm, adapters, kind, crowd, stretch_s))
                        row = {"arm": arm.name, "kind": kind, "crowd": crowd, "stretch": stretch}
                        rows.append({**row, "took_ms": [round(one * 1e3, 1) for one in took_s]})
                        print(rows[-1], flush=True)
    return rows


async def _load_all(arm: Arm, adapters: list[Path]) -> None:
    for directory in adapters:
        await load(arm.port, directory.name, str(directory))
        await stream(arm.port, directory.name, 1, [], prompt=[40])
    # vLLM compiles what gives log probabilities at their first use.
    await post(arm.port, "/v1/completions", _body(adapters[-1], "beams"))


def _body(adapter: Path, kind: str) -> dict:
    return {"model": adapter.name, "prompt": [40], "max_tokens": TOKENS, "temperature": 0, **KINDS[kind]}


async def _stretch(arm: Arm, adapters: list[Path], kind: str, crowd: int, stretch_s: float) -> list[float]:
    """The times of one request after the other, while so many clients ask for adapters of their own."""
    body = _body(adapters[-1], kind)
    done = asyncio.Event()

    async def client(number: int) -> None:
        while not done.is_set():
            await stream(arm.port, adapters[number].name, 8, [], prompt=[41 + number])

    async def asker() -> list[float]:
        took_s, began = [], time.perf_counter()
        while not took_s or time.perf_counter() - began < stretch_s:
            sent = time.perf_counter()
            if (status := await post(arm.port, "/v1/completions", body)) != 200:
                raise RuntimeError(f"{arm.name}, {kind}: {status}")
            took_s.append(time.perf_counter() - sent)
        done.set()
        return took_s

    async with asyncio.TaskGroup() as group:
        for number in range(crowd):
            group.create_task(client(number))
        await asyncio.sleep(1.0)
        asking = group.create_task(asker())
    return asking.result()


def table(rows: list[dict]) -> str:
    lines = [
        "| clients beside it | manager | plain request: median | beam search: median, longest | beams by plain |",
        "|---|---|---|---|---|",
    ]
    for crowd in sorted({row["crowd"] for row in rows}):
        for arm in NAMES:
            some = [row for row in rows if (row["arm"], row["crowd"]) == (arm, crowd)]
            plain, beams = ([one for row in some if row["kind"] == kind for one in row["took_ms"]] for kind in KINDS)
            if plain and beams:
                median = statistics.median(beams)
                lines.append(
                    f"| {crowd} | {NAMES[arm]} | {statistics.median(plain):.0f} ms | {median:.0f}, {max(beams):.0f} ms "
                    f"| {median / statistics.median(plain):.1f}× |"
                )
    return "\n".join(lines)
