"""What a resolve costs that needs no fetch, and what a flood of unknown names does to it.

- warm: p50 and p99 of `AdapterResolver.resolve` for names that were served, with 1 and 1,000 adapters in the store
- crowd: 1,000 concurrent first requests for one name; 4 processes with 250 each, sharing one store
- flood: 100,000 distinct unknown names, with back-end calls, memory, and the p99 of a hot adapter meanwhile

The back end is `testbed.ranges` behind the real s3fs. Prints Markdown and keeps benchmarks/results/resolve.json.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.fetch import aws
from benchmarks.record import keep
from lora_plugins.events import Events
from lora_plugins.resolvers.resolution import AdapterResolver
from lora_plugins.resolvers.sources.object_store.source import object_source
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.store.store import Store
from testbed.ranges import RangeServer, range_server
from tests.store.common import adapter_files

ADAPTERS = 1000
UNKNOWN = 100_000
HOT_EVERY_S = 0.005


def make_resolver(url: str, root: Path) -> AdapterResolver:
    settings = Settings(base_match=BaseMatch.OFF, s3_path_template="s3://bucket/loras/{lora_name}", aws=aws(url))
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


async def flood(server: RangeServer, root: Path) -> dict[str, float]:
    resolver = make_resolver(server.url, root)
    await resolver.resolve("adapter-0", "base")

    async def hot(stop: asyncio.Event) -> list[float]:
        seconds = []
        while not stop.is_set():
            seconds.append(await timed(resolver, "adapter-0"))
            await asyncio.sleep(HOT_EVERY_S)
        return seconds

    async def alone() -> list[float]:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(5, stop.set)
        return await hot(stop)

    before = percentiles(await alone())
    server.reset()
    memory_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stop = asyncio.Event()
    meanwhile = asyncio.create_task(hot(stop))
    started = time.perf_counter()
    waiting = iter(range(UNKNOWN))

    async def stranger() -> None:
        for number in waiting:
            assert await resolver.resolve(f"unknown-{number}", "base") is None

    await asyncio.gather(*(stranger() for _ in range(64)))
    seconds = time.perf_counter() - started
    stop.set()
    during = percentiles(await meanwhile)
    first = server.stats()["requests"]
    for number in range(UNKNOWN - 1000, UNKNOWN):
        assert await resolver.resolve(f"unknown-{number}", "base") is None
    return {
        "names": UNKNOWN,
        "seconds": seconds,
        "back_end_calls": first,
        "back_end_calls_for_1000_repeats": server.stats()["requests"] - first,
        "memory_growth_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kb) / 1024,
        "hot_alone": before,
        "hot_meanwhile": during,
        "p99_ratio": during["p99_ms"] / before["p99_ms"],
    }


def in_processes(server: RangeServer, root: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.resolve", "--crowd", server.url, str(root)]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4


def main() -> int:
    if sys.argv[1:2] == ["--crowd"]:
        _, _, url, root = sys.argv

        class Known:
            pass

        known = Known()
        known.url = url
        asyncio.run(crowd(known, Path(root), 250))
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
        results["flood"] = asyncio.run(flood(server, home / "flood"))
        return results


if __name__ == "__main__":
    sys.exit(main())
