"""Figures of docs/benchmarks/index.md#pushes, for R46 and R53: `make bench-live`.

Live policies: what a push costs, what streams notice of pushes, and whether each answer is of the version it names.

    make bench-live                                                        # 1,000 pushes under load, about 10 minutes
    python -m benchmarks.pushes --case TP1 --pushes 10000                    # before a release: 40 minutes
    python -m benchmarks.pushes --case TP2 --case DP2                        # two workers, two engines: 10 minutes

Three measures on real servers, each beside its reference in the same run:

1. An adapter of 40 MB is pushed to an idle server, until the first new token. Beside: the same bytes are written,
   hashed and read as tensors, and the first token of an adapter that is loaded already. And what a trainer does without
   us: files are saved and hashed, vLLM without plugins loads them (`/v1/load_lora_adapter`, `load_inplace`), until the
   first new token.
2. The same while eight clients stream; the largest gap between two tokens of theirs, with pushes and without.
3. Small adapters are pushed as one name while clients ask for the name, all with one prompt, so that prefixes are
   shared. Each answer must be PEFT's for the digest that its header names. Memory and series of /metrics are counted.

Writes `benchmarks/results/live.json`, and of the third measure `benchmarks/results/live_pushes_dp2.json` or the like; 1
where an answer was wrong, or a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil
from safetensors.numpy import load_file, save

from benchmarks.callers import first_token_s, gaps_s, port_of, stream
from benchmarks.record import keep
from lora_plugins.client import push_async
from testbed.bed import MAX_TOKENS, prepare
from testbed.models import ATTENTION, DEMO_ADAPTERS, MLP, PROMPT, AdapterSpec, build_adapter, build_base
from testbed.server import ONE_THREAD, Server, plugged, vllm_server

STREAMS, CLIENTS, LARGE_PUSHES, SECONDS_WITHOUT = 8, 4, 12, 15
QUIET_S = 1.0  # the threads of an engine that has just computed spin for a while, and would slow the other engine
NAME = "policy"
LARGE = AdapterSpec("large", 64, ATTENTION + MLP)
GOALS = {
    "push and first token / (write + hash + read, and a hot adapter's first token)": 1.3,
    "push and first token / (save + hash + vLLM's load, and first token)": 1.3,
    "push and first token beside streams, longest s": 1.0,
    "largest gap, with / without": 1.1,
}


# The third measure's servers: one engine, an engine of two workers, two engines with an API server each.
CASES = {"TP1": (), "TP2": ("--tensor-parallel-size", "2"), "DP2": ("--data-parallel-size", "2")}


@contextmanager
def server_of(
    base: Path, home: Path, *more: str, plugins: str = "lora_lru_manager,lora_kernels,lora_admin"
) -> Iterator[Server]:
    home.mkdir()
    env = plugged(plugins, home / "store")
    if more:
        (home / "metrics").mkdir()  # vLLM makes one before it spawns its API servers, but these are forked
        env |= {**ONE_THREAD, "PROMETHEUS_MULTIPROC_DIR": str(home / "metrics")}
    arguments = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", "4", "--max-cpu-loras", "8", *more)
    with vllm_server(base, home / "server.log", arguments=arguments, env=env) as server:
        yield server


def versions(tensors: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Version after version of an adapter, of other bytes each."""
    for number in itertools.count(1):
        yield {name: array * (1 + number / 4096) for name, array in tensors.items()}


def written_hashed_read_s(tensors: dict[str, Any], path: Path) -> float:
    """What a push cannot do without: the bytes on the disk, their SHA-256, and the tensors in memory."""
    data = save(tensors)
    began = time.perf_counter()
    path.write_bytes(data)
    hashlib.sha256(data).hexdigest()
    load_file(path)
    return time.perf_counter() - began


async def loaded_by_hand_s(client: httpx.AsyncClient, tensors: dict[str, Any], config: str, directory: Path) -> float:
    """What a push takes the place of: files of a shared disk, hashed, and loaded by vLLM in the place of the last."""
    began = time.perf_counter()
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(config)
    data = save(tensors)
    hashlib.sha256(data).hexdigest()
    (directory / "adapter_model.safetensors").write_bytes(data)
    body = {"lora_name": NAME, "lora_path": str(directory), "load_inplace": True}
    (await client.post("/v1/load_lora_adapter", json=body)).raise_for_status()
    return time.perf_counter() - began


def stream_all(url: str, model: str, connection: Connection) -> None:
    """In a process of its own: stream, and answer each message with the largest gap since the one before."""

    async def run() -> None:
        answers: list[list[float]] = []

        async def ask() -> None:
            while True:
                answers.append([])
                await stream(port_of(url), model, 200, answers[-1], PROMPT)

        tasks, since = [asyncio.create_task(ask()) for _ in range(STREAMS)], 0.0
        while await asyncio.to_thread(connection.recv):
            now = time.perf_counter()
            connection.send(max(gaps_s(answers, since, now), default=0.0))
            since = now
        for task in tasks:
            task.cancel()

    asyncio.run(run())


@contextmanager
def streaming(url: str) -> Iterator[Callable[[], float]]:
    """Inside, clients stream from the base model; the largest gap between two tokens since the last call."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=stream_all, args=(url, base_of(url), there), daemon=True)
    process.start()

    def largest_gap_s() -> float:
        here.send(True)
        return float(here.recv())

    try:
        yield largest_gap_s
    finally:
        here.send(False)
        process.join(60)


async def large_pushes(server: Server, stock: Server, adapter: Path, home: Path) -> dict[str, Any]:
    """Rows of pushes and of loads by hand, in turn: without streams and beside them; the streams' largest gaps."""
    text = (adapter / "adapter_config.json").read_text()
    bodies = versions(load_file(adapter / "adapter_model.safetensors"))

    async def push_one() -> dict[str, float]:
        tensors = next(bodies)
        reference_s = written_hashed_read_s(tensors, home / "reference.safetensors")
        hot_s = await first_token_s(port_of(server.url), NAME, 1, PROMPT)
        began = time.perf_counter()
        pushed = await push_async(NAME, tensors, json.loads(text), servers=[server.url])
        pushed_s = time.perf_counter() - began
        token_s = await first_token_s(port_of(server.url), NAME, 1, PROMPT)
        row = {"reference_s": reference_s, "pushed_s": pushed_s, "token_s": token_s, "hot_s": hot_s}
        return row | pushed.timings[server.url]

    async def load_one(by_hand: httpx.AsyncClient) -> dict[str, float]:
        loaded_s = await loaded_by_hand_s(by_hand, next(bodies), text, home / "by-hand")
        return {"loaded_s": loaded_s, "loaded_token_s": await first_token_s(port_of(stock.url), NAME, 1, PROMPT)}

    async with httpx.AsyncClient(base_url=stock.url, timeout=600) as by_hand:
        await push_async(NAME, next(bodies), json.loads(text), servers=[server.url])
        idle = []
        for _ in range(LARGE_PUSHES):
            pushed = await push_one()
            await asyncio.sleep(QUIET_S)
            idle.append(pushed | await load_one(by_hand))
            await asyncio.sleep(QUIET_S)
            print(json.dumps(idle[-1]), flush=True)
        busy, largest_s = dict[str, Any](), dict[str, Any]()
        for kind, url, change in (
            ("pushed", server.url, push_one), ("by hand", stock.url, lambda: load_one(by_hand)),
        ):  # fmt: skip
            with streaming(url) as largest_gap_s:
                await asyncio.sleep(5)  # the process starts, and the first answers compile nothing
                largest_gap_s()
                largest_s[kind] = []
                busy[kind] = []
                for _ in range(LARGE_PUSHES):
                    await asyncio.sleep(SECONDS_WITHOUT / LARGE_PUSHES)
                    without_s = largest_gap_s()
                    busy[kind].append(await change())
                    largest_s[kind].append({"without": without_s, "with": largest_gap_s()})
                    print(json.dumps({**busy[kind][-1], **largest_s[kind][-1]}), flush=True)
    size_bytes = (adapter / "adapter_model.safetensors").stat().st_size
    return {"size_bytes": size_bytes, "idle": idle, "beside_streams": busy, "gaps_s": largest_s}


def base_of(url: str) -> str:
    return str(httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"])


async def pushes_under_load(server: Server, bed: Any, count: int) -> dict[str, Any]:
    """Push versions in turn, and ask meanwhile; count what was wrong."""
    adapters = [
        (spec.name, load_file(bed.adapters / spec.name / "adapter_model.safetensors"),
         json.loads((bed.adapters / spec.name / "adapter_config.json").read_text()))
        for spec in DEMO_ADAPTERS
    ]  # fmt: skip
    originals: dict[str, str] = {}
    found: Counter[str] = Counter()
    done = asyncio.Event()
    push_s: list[float] = []
    figures: list[dict[str, float]] = []

    async def ask(client: httpx.AsyncClient) -> None:
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        while not done.is_set():
            answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
            if answer.status_code != 200:
                found[f"status {answer.status_code}"] += 1
                continue
            digest = answer.headers.get("x-lora-digest", "")
            while digest not in originals and not done.is_set():
                await asyncio.sleep(0.01)  # the push is answered a moment later
            right = bed.answers.get(originals.get(digest))
            found["right" if answer.json()["choices"][0]["token_ids"] == right else "wrong"] += 1

    async def push_all(client: httpx.AsyncClient) -> None:
        for number in range(count):
            name, tensors, config = adapters[number % len(adapters)]
            began = time.perf_counter()
            pushed = await push_async(NAME, tensors, {**config, "number": number}, servers=[server.url])
            push_s.append(time.perf_counter() - began)
            originals[pushed.digest] = name
            if number % max(1, count // 10) == 0 or number == count - 1:
                figures.append({"pushes": number + 1, **await memory_and_series(server, client)})
                print(json.dumps({**figures[-1], **found}), flush=True)

    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        name, tensors, config = adapters[0]
        originals[(await push_async(NAME, tensors, config, servers=[server.url])).digest] = name
        clients = [asyncio.create_task(ask(client)) for _ in range(CLIENTS)]
        await push_all(client)
        done.set()
        await asyncio.gather(*clients)
    return {"pushes": count, "answers": dict(found), "median_push_s": statistics.median(push_s), "figures": figures}


async def memory_and_series(server: Server, client: httpx.AsyncClient) -> dict[str, float]:
    process = psutil.Process(server.process.pid)
    family = [process, *process.children(recursive=True)]
    resident = sum(one.memory_info().rss for one in family)
    text = (await client.get("/metrics")).text
    return {
        "resident_mib": round(resident / 2**20),
        "series": sum(not line.startswith("#") for line in text.splitlines()),
    }


def measured_of(large: dict[str, Any]) -> dict[str, float]:
    """The ratios of the first two measures."""
    idle = large["idle"][2:]  # the first find no pages in memory
    busy, largest_s = large["beside_streams"], large["gaps_s"]

    def largest(kind: str, which: str) -> float:
        return max(row[which] for row in largest_s[kind])

    def typical(kind: str) -> float:
        return statistics.median(row["with"] / row["without"] for row in largest_s[kind])

    return {
        "push and first token / (write + hash + read, and a hot adapter's first token)": statistics.median(
            (row["pushed_s"] + row["token_s"]) / (row["reference_s"] + row["hot_s"]) for row in idle
        ),
        "push and first token / (save + hash + vLLM's load, and first token)": statistics.median(
            (row["pushed_s"] + row["token_s"]) / (row["loaded_s"] + row["loaded_token_s"]) for row in idle
        ),
        "push / (write + hash + read)": statistics.median(row["pushed_s"] / row["reference_s"] for row in idle),
        "push and first token beside streams, longest s": max(
            row["pushed_s"] + row["token_s"] for row in busy["pushed"]
        ),
        "the same by hand, longest s": max(row["loaded_s"] + row["loaded_token_s"] for row in busy["by hand"]),
        "largest gap, with / without": largest("pushed", "with") / largest("pushed", "without"),
        "largest gap by hand, with / without": largest("by hand", "with") / largest("by hand", "without"),
        "median gap of a push, with / without": typical("pushed"),
        "median gap of a load by hand, with / without": typical("by hand"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pushes", type=int, default=1000)
    parser.add_argument("--case", choices=CASES, action="append", help="the third measure alone, on such a server")
    options = parser.parse_args()
    load_before, is_right = os.getloadavg()[0], True
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        if not options.case:
            base = build_base(home / "base", hidden=1024, layers=7, intermediate=4096)
            adapter = build_adapter(base, home / "adapters", LARGE)
            with server_of(base, home / "large") as server, server_of(base, home / "stock", plugins="") as stock:
                large = asyncio.run(large_pushes(server, stock, adapter, home))
            measured = measured_of(large)
            for what, value in measured.items():
                print(f"{what}: {value:.2f}" + (f" (goal ≤ {GOALS[what]})" if what in GOALS else ""))
            print(f"written to {keep('live', [large], measured=measured, load_before=load_before)}")
        bed = prepare()
        for case in options.case or ["TP1"]:
            with server_of(bed.base, home / case, *CASES[case]) as server:
                found = asyncio.run(pushes_under_load(server, bed, options.pushes))
            print(f"{case}: {found['pushes']} pushes under load: {found['answers']}")
            print(f"written to {keep(f'live_pushes_{case.lower()}', [found], load_before=load_before)}")
            is_right &= set(found["answers"]) == {"right"}
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
