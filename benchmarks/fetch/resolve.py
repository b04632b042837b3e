"""Figures of docs/benchmarks/index.md#fetching, warm, crowd and flood, for R12 and R13: `make bench-fetch`.

What a resolve costs that needs no fetch, and what a flood of unknown names does to it.

- warm: p50 and p99 of `AdapterResolver.resolve` for names that were served, with 1 and 1,000 adapters in the store
- crowd: 1,000 concurrent first requests for one name; 4 processes with 250 each, sharing one store
- flood: 100,000 distinct unknown names, 1,000 a second, in rounds: with back-end calls, memory, the time until a new
  adapter is found meanwhile, and a hot adapter's resolve alone and beside the flood, in turn, as a ratio for each round

The back end is `testbed.ranges` behind the real s3fs. Prints Markdown and keeps benchmarks/results/resolve.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.record import keep
from lora_plugins.errors import SourceUnavailable
from lora_plugins.events import Events
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.object_store import object_source
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.store.store import Store
from testbed.ranges import RangeServer, range_server
from tests.store.common import adapter_files

ADAPTERS = 1000
UNKNOWN = 100_000
UNKNOWN_PER_S = 1000
FLOOD_ROUNDS = 5
FLOOD_ALONE_S = 8.0
HOT_EVERY_S = 0.005


def make_resolver(url: str, root: Path) -> AdapterResolver:
    settings = Settings(
        base_match=BaseMatch.OFF, s3_path_template="s3://bucket/loras/{lora_name}", aws=RangeServer(url).env()
    )
    resolver = AdapterResolver(settings, Events(), Store(root))
    resolver.add(object_source(settings.s3_path_template, settings))
    return resolver


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50_ms": statistics.median(ordered) * 1e3, "p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3}


async def timed(resolver: AdapterResolver, name: str) -> float:
    started = time.perf_counter()
    assert await resolver.resolve(name, "base") is not None
    return time.perf_counter() - started


async def warm(server: RangeServer, root: Path, count: int) -> dict[str, float]:
    resolver = make_resolver(server.url, root)
    names = [f"adapter-{number}" for number in range(count)]
    for name in names:
        await resolver.resolve(name, "base")
    server.reset()
    seconds = [await timed(resolver, names[turn % count]) for turn in range(10_000)]
    return {"adapters": count, **percentiles(seconds), "back_end_calls": server.stats()["requests"]}


async def crowd(server: RangeServer, root: Path, requests: int) -> float:
    resolver = make_resolver(server.url, root)
    started = time.perf_counter()
    answers = await asyncio.gather(*(resolver.resolve("adapter-0", "base") for _ in range(requests)))
    assert len({answer.path for answer in answers}) == 1
    return time.perf_counter() - started


async def flood(server: RangeServer, root: Path, rounds: int, names_per_s: int) -> dict[str, object]:
    """Rounds of a hot adapter alone and beside a flood, in turn; a new adapter is asked for in the midst of each."""
    resolver = make_resolver(server.url, root)
    await resolver.resolve("adapter-0", "base")
    loop = asyncio.get_running_loop()
    server.reset()
    memory_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers: Counter[str] = Counter()
    measured = []

    async def hot(seconds: float) -> dict[str, dict[str, float]]:
        answered, due = [], []
        until = at = loop.time()
        until += seconds
        while at < until:
            at = max(at + HOT_EVERY_S, loop.time())
            await asyncio.sleep(at - loop.time())
            answered.append(await timed(resolver, "adapter-0"))
            due.append(loop.time() - at)
        return {"resolve": percentiles(answered), "from_due": percentiles(due)}

    async def stranger(name: str) -> None:
        try:
            assert await resolver.resolve(name, "base") is None
            answers["absent"] += 1
        except SourceUnavailable:
            answers["busy"] += 1

    async def flooding(first: int, count: int) -> None:
        began = loop.time()
        asking: set[asyncio.Task[None]] = set()
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / names_per_s - loop.time()))
            asking.add(task := asyncio.create_task(stranger(f"unknown-{first + number}")))
            task.add_done_callback(asking.discard)
        await asyncio.gather(*asking)

    async def new_adapter(name: str, after_s: float) -> float:
        await asyncio.sleep(after_s)
        began = loop.time()
        while True:
            try:
                assert await resolver.resolve(name, "base") is not None
                return loop.time() - began
            except SourceUnavailable as error:
                await asyncio.sleep(error.retry_after_s or 0)

    for number in range(rounds):
        alone = await hot(FLOOD_ALONE_S)
        count = UNKNOWN // rounds
        asking = asyncio.create_task(flooding(number * count, count))
        found = asyncio.create_task(new_adapter(f"adapter-{number + 1}", count / names_per_s / 2))
        began, cpu = loop.time(), time.process_time()
        beside = await hot(count / names_per_s)
        cpu_share = (time.process_time() - cpu) / (loop.time() - began)
        await asking
        measured.append(
            {
                "alone": alone,
                "beside": beside,
                "p99_ratio": beside["resolve"]["p99_ms"] / alone["resolve"]["p99_ms"],
                "new_adapter_found_after_s": await found,
                "cpu_share": cpu_share,
                "load": os.getloadavg()[0],
            }
        )
        print(json.dumps(measured[-1]), flush=True)
    ratios = sorted(one["p99_ratio"] for one in measured)
    return {
        "names": UNKNOWN,
        "names_per_s": names_per_s,
        "answers": dict(answers),
        "back_end_calls": server.stats()["requests"],
        "memory_growth_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kb) / 1024,
        "rounds": measured,
        "p99_ratio": {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]},
    }


def in_processes(server: RangeServer, root: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.fetch.resolve", "--crowd", server.url, str(root)]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4


def main() -> int:
    if sys.argv[1:2] == ["--crowd"]:
        _, _, url, root = sys.argv

        asyncio.run(crowd(RangeServer(url), Path(root), 250))
        return 0
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        for number in range(ADAPTERS):
            directory = home / "served" / "bucket" / "loras" / f"adapter-{number}"
            directory.mkdir(parents=True)
            for file, data in adapter_files(seed=number).items():
                (directory / file).write_bytes(data)
        results = measure_all(home)
    print(json.dumps(results, indent=1))
    keep("resolve", results)
    return 0


def measure_all(home: Path) -> dict[str, object]:
    with range_server(home / "served") as server:
        results: dict[str, object] = {
            "warm": [asyncio.run(warm(server, home / f"warm-{count}", count)) for count in (1, ADAPTERS)]
        }
        server.reset()
        seconds = asyncio.run(crowd(server, home / "crowd", 1000))
        results["crowd"] = {"requests": 1000, "seconds": seconds, "calls": dict(server.stats())}
        server.reset()
        in_processes(server, home / "crowd-4")
        results["crowd_4x250"] = {"calls": dict(server.stats())}
        server.reset()
        results["flood"] = asyncio.run(flood(server, home / "flood", FLOOD_ROUNDS, UNKNOWN_PER_S))
        return results


if __name__ == "__main__":
    sys.exit(main())
