"""Figure of docs/benchmarks/index.md#pushes, for R60: `make bench-live`.

One adapter is paused beside eight that run: what the eight notice, and whether a resume loses anything.

    make bench-live                                           # pauses of 60 s
    python -m benchmarks.live.pause --seconds 5 --rounds 2

Each of eight clients asks for an adapter of its own, one answer after the other. Phases alternate, in order: without,
with, with, without: in a phase `with`, a ninth adapter is paused (`keep`) while answers of it run, and further requests
for it are held; in a phase `without`, nobody asks for the ninth. Only answers between the pause's answer and the resume
count. After each resume, all requests for the ninth must be answered as PEFT does.

Keeps its figures beside those of `benchmarks/live/pushes.py`; returns 1 where an answer was wrong or lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.record import keep
from lora_plugins.client import pause_async, push_async, resume_async
from testbed.bed import MAX_TOKENS, Bed, prepare
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.server import Server, plugged, vllm_server

RUNNING, KEPT, HELD, LONG = 8, 2, 8, 900
PAUSED, ORIGINAL = "paused", "sql"
GOAL = 1.05


def p99_s(latencies_s: list[float]) -> float:
    return statistics.quantiles(latencies_s, n=100)[98]


async def ask(client: httpx.AsyncClient, name: str, tokens: int) -> list[int]:
    body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])


async def run_on(client: httpx.AsyncClient, bed: Bed, name: str, original: str, latencies_s: list[float]) -> None:
    """Ask until this is cancelled; note how long each right answer takes."""
    while True:
        began = time.perf_counter()
        if await ask(client, name, MAX_TOKENS) != bed.answers[original]:
            raise AssertionError(f"a wrong answer of {name} beside a pause")
        latencies_s.append(time.perf_counter() - began)


async def until_held(client: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(60):
        while (await client.get(f"/v1/loras/{PAUSED}")).json()["requests_held"] < count:
            await asyncio.sleep(0.01)


async def measure(server: Server, bed: Bed, seconds: float, rounds: int) -> dict[str, Any]:
    """Latencies of the eight by phase, and how the ninth's requests ended."""
    phases: dict[str, list[list[float]]] = {"without": [], "with": []}
    ends: Counter[str] = Counter()
    latencies_s: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=seconds + 600, limits=limits) as client:
        names = [(f"running-{number}", DEMO_ADAPTERS[number % len(DEMO_ADAPTERS)].name) for number in range(RUNNING)]
        for name, original in [*names, (PAUSED, ORIGINAL)]:
            await push_async(name, bed.adapters / original, servers=[server.url])
            await ask(client, name, MAX_TOKENS)
        running = [asyncio.create_task(run_on(client, bed, *one, latencies_s)) for one in names]
        await asyncio.sleep(2)
        for kind in ("without", "with", "with", "without") * rounds:
            asked: list[asyncio.Task[list[int]]] = []
            if kind == "with":
                asked += [asyncio.create_task(ask(client, PAUSED, LONG)) for _ in range(KEPT)]
                await asyncio.sleep(0.1)  # a look at them would take as long as they run
                await pause_async(PAUSED, "keep", servers=[server.url])
                asked += [asyncio.create_task(ask(client, PAUSED, MAX_TOKENS)) for _ in range(HELD)]
                ends["kept"] += (kept := sum(not one.done() for one in asked[:KEPT]))
                await until_held(client, kept + HELD)
            latencies_s.clear()
            await asyncio.sleep(seconds)
            phases[kind].append(list(latencies_s))
            print(f"{kind}: {len(latencies_s)} answers", flush=True)
            if kind == "with":
                ends["answered while paused"] += sum(one.done() for one in asked) - (KEPT - kept)
                await resume_async(PAUSED, servers=[server.url])
                for number, end in enumerate(await asyncio.gather(*asked, return_exceptions=True)):
                    is_whole = isinstance(end, list) and len(end) == (LONG if number < KEPT else MAX_TOKENS)
                    is_right = is_whole and end[:MAX_TOKENS] == bed.answers[ORIGINAL]  # type: ignore[index]
                    ends["right" if is_right else "wrong" if isinstance(end, list) else "lost"] += 1
            for task in running:
                if task.done():
                    task.result()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return {"phases": phases, "ends": dict(ends)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    load_before, bed = os.getloadavg()[0], prepare()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        env = plugged("lora_lru_manager,lora_kernels,lora_admin", home / "store")
        count = str(RUNNING + 1)
        arguments = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", count, "--max-cpu-loras", count,
                     "--max-model-len", "1000")  # fmt: skip
        with vllm_server(bed.base, home / "server.log", arguments=arguments, env=env) as server:
            found = asyncio.run(measure(server, bed, options.seconds, options.rounds))
    p99_by_kind = {kind: p99_s([one for phase in found["phases"][kind] for one in phase]) for kind in found["phases"]}
    rows = [
        {"phase": kind, "answers": len(phase), "p50_s": statistics.median(phase), "p99_s": p99_s(phase)}
        for kind, of_kind in found["phases"].items()
        for phase in of_kind
    ]
    ratio = p99_by_kind["with"] / p99_by_kind["without"]
    for row in rows:
        print(row)
    print(f"p99 with / without a pause: {ratio:.3f} (goal ≤ {GOAL}); the paused adapter's requests: {found['ends']}")
    further = {"seconds": options.seconds, "p99_s": p99_by_kind, "ratio": ratio, "ends": found["ends"]}
    print(f"written to {keep('live_pause', rows, **further, load_before=load_before)}")
    expected = 2 * options.rounds * (KEPT + HELD)
    is_whole = (found["ends"].get("right"), found["ends"].get("answered while paused")) == (expected, 0)
    return int(not is_whole or not found["ends"]["kept"])


if __name__ == "__main__":
    sys.exit(main())
