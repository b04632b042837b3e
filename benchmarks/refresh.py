"""How long `POST /v1/loras/{name}/refresh` of a tiny adapter takes beside streams, and what each part of it does.

    python -m benchmarks.refresh [--swaps N] [--streams N] [--keep]

A server as `make demo` starts it, with adapters from a directory. Clients stream other adapters without a pause, in a
process of their own; a new version is published by renaming, and refreshed. The parts are what the server's own log
says of each swap. With `--keep` the result goes to benchmarks/results/refresh.json: on a quiet machine only, which the
load before it says.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai

from benchmarks.record import keep
from testbed.bed import MAX_TOKENS, Bed, prepare
from testbed.client import complete, connect
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.server import Server, vllm_server

SWAPPED, VERSIONS = "sql", ("stable", "sql")
STREAMED = [spec.name for spec in DEMO_ADAPTERS if spec.name != SWAPPED]
PAUSE_S = 0.3
# Of the two lines that a swap writes; the second is written last, so what is found belongs to the last swap.
RESOLVED = re.compile(
    r"located in ([\d.]+) ms, (?:fetched|found in the store) in ([\d.]+) ms, "
    r"checked in ([\d.]+) ms, loaded in ([\d.]+) ms"
)
PARTS = ("located", "fetched and verified", "compared with the model", "loaded by the worker")


@contextmanager
def server_of(bed: Bed, home: Path) -> Iterator[Server]:
    for spec in DEMO_ADAPTERS:
        shutil.copytree(bed.adapters / spec.name, home / "adapters" / spec.name)
    env = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_PLUGINS": "lora_filesystem_resolver,lora_lru_manager,lora_kernels,lora_admin",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(home / "adapters"),
        "LORA_PLUGINS_STORE_DIR": str(home / "store"),
        "LORA_PLUGINS_REFRESH_S": "0",
    }
    arguments = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", "2", "--max-cpu-loras", "8")
    with vllm_server(bed.base, home / "server.log", arguments=arguments, env=env) as server:
        yield server


def stream(url: str, name: str) -> None:
    """Ask for this adapter again and again, until this process is ended."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)
    while True:
        complete(client, name, PROMPT, MAX_TOKENS)


@contextmanager
def streams(server: Server, count: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    asked = [(server.url, [*STREAMED, SWAPPED][number % len(DEMO_ADAPTERS)]) for number in range(count)]
    clients = [context.Process(target=stream, args=arguments, daemon=True) for arguments in asked]
    for client in clients:
        client.start()
    try:
        time.sleep(15.0 if clients else 0.0)  # they import openai
        yield
    finally:
        for client in clients:
            client.kill()
            client.join()


def publish(adapter: Path, target: Path, number: int) -> None:
    """As a trainer does: complete, by renaming; with bytes that the store does not have."""
    fresh, old = (target.with_name(f"{target.name}.{what}") for what in ("fresh", "old"))
    shutil.copytree(adapter, fresh)
    config = fresh / "adapter_config.json"
    config.write_text(config.read_text() + " " * (number + 1))
    target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old)


def swap(client: httpx.Client, server: Server, bed: Bed, home: Path, number: int) -> dict[str, float]:
    """One refresh; its milliseconds as the client sees them, as the server does, and by part."""
    publish(bed.adapters / VERSIONS[number % 2], home / "adapters" / SWAPPED, number)
    seen = len(server.log())
    began = time.perf_counter()
    answer = client.post(f"{server.url}/v1/loras/{SWAPPED}/refresh").raise_for_status().json()
    client_ms = (time.perf_counter() - began) * 1e3
    assert answer["swapped"], answer
    time.sleep(PAUSE_S)
    found = RESOLVED.search(server.log(), seen)
    assert found is not None, server.log()[seen:]
    parts = dict(zip(PARTS, map(float, found.groups()), strict=True))
    return {"client": client_ms, "server": float(answer["elapsed_ms"]), **parts}


def summary(rows: Sequence[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Median and largest of each column."""
    return {name: (statistics.median(row[name] for row in rows), max(row[name] for row in rows)) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--streams", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load {load:.2f} before it starts", flush=True)
    bed, results, numbers = prepare(), [], itertools.count()
    with tempfile.TemporaryDirectory() as directory, server_of(bed, Path(directory)) as server:
        client = httpx.Client(timeout=60)
        complete(connect(server), SWAPPED, PROMPT, MAX_TOKENS)
        for count in options.streams:
            with streams(server, count):
                swaps = [swap(client, server, bed, Path(directory), next(numbers)) for _ in range(options.swaps + 2)][
                    2:
                ]
            results.append({"streams": count, "load": os.getloadavg()[0], "swaps": swaps})
            for name, (median, largest) in summary(swaps).items():
                print(f"{count} streams, {name}: median {median:.1f} ms, largest {largest:.1f}", flush=True)
    if options.keep:
        print(keep("refresh", results, load_before=load))


if __name__ == "__main__":
    main()
