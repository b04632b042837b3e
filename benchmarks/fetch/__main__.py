"""Figures of docs/benchmarks/fetch.md, for R11 and the goal of 1.5 times vLLM's example: `make bench-fetch`.

Cold fetch of an adapter from an S3 API: ours against others, side by side in one run.

Contenders, each in a separate process with a new target directory, interleaved, on the same range server
(`testbed.ranges`, one process, sendfile from the page cache; moto is too slow to be the yardstick):

- ours: locate, ranged download, SHA-256, verification with the pass over the values, fsync, atomic publish
- docs: the example resolver of vLLM's documentation, `s3fs._get(..., recursive=True, maxdepth=1)`
- boto3: `download_file` with the transfer manager's defaults
- raw: eight sockets that receive ranges straight to disk, nothing checked; with and without fsync at the end

Two networks: loopback as it is, where two cores serve, receive and hash at once; and a server that gives each
connection 40 MB/s, as an object store might.

Prints a Markdown table of medians and keeps the raw figures in benchmarks/results/fetch.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.adapters import write_sized_adapter
from benchmarks.record import keep
from testbed.ranges import RangeServer, range_server

SIZES_MB = (20, 200, 1000)
NETWORKS = {"loopback": 0, "40 MB/s per connection": 40_000_000}
CONTENDERS = ("ours", "docs", "boto3", "raw", "raw+fsync")
REPEATS = {20: 7, 200: 5, 1000: 3}
KEY = "loras/adapter"
FILES = ("adapter_config.json", "adapter_model.safetensors")


async def ours(url: str, target: Path) -> AsyncIterator[None]:
    from lora_plugins.events import Events
    from lora_plugins.resolvers.resolver import AdapterResolver
    from lora_plugins.resolvers.sources.object_store import object_source
    from lora_plugins.settings import BaseMatch, Settings
    from lora_plugins.store.store import Store

    settings = Settings(
        base_match=BaseMatch.OFF, s3_path_template="s3://bucket/loras/{lora_name}", aws=RangeServer(url).env()
    )
    resolver = AdapterResolver(settings, Events(), Store(target))
    resolver.add(object_source(settings.s3_path_template, settings))
    assert await resolver.resolve("nobody", "base") is None  # a server's client is connected, as the docs' session is
    yield
    assert await resolver.resolve("adapter", "base") is not None
    yield


async def docs(url: str, target: Path) -> AsyncIterator[None]:
    import s3fs

    filesystem = s3fs.S3FileSystem(asynchronous=True, endpoint_url=url, key="k", secret="s")
    session = await filesystem.set_session()
    await filesystem._exists("bucket/nobody")
    yield
    await filesystem._get(f"bucket/{KEY}", str(target), recursive=True, maxdepth=1)
    yield
    await session.close()


async def boto3_transfer(url: str, target: Path) -> AsyncIterator[None]:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="k", aws_secret_access_key="s", region_name="eu-central-1"
    )
    target.mkdir(parents=True, exist_ok=True)
    client.list_objects_v2(Bucket="bucket", Prefix="nobody/")
    yield
    for name in FILES:
        client.download_file("bucket", f"{KEY}/{name}", str(target / name))
    yield


async def raw(url: str, target: Path, *, sync: bool = False) -> AsyncIterator[None]:
    import socket
    import threading
    import urllib.request

    target.mkdir(parents=True, exist_ok=True)
    host, port = url.removeprefix("http://").split(":")
    yield
    jobs = []
    for name in FILES:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/bucket/{KEY}/{name}", method="HEAD")) as answer:
            size = int(answer.headers["Content-Length"])
        descriptor = os.open(target / name, os.O_CREAT | os.O_RDWR)
        os.truncate(descriptor, size)
        jobs += [(name, descriptor, at, min(at + (8 << 20), size)) for at in range(0, size, 8 << 20)]
    guard = threading.Lock()

    def work() -> None:
        buffer = memoryview(bytearray(1 << 20))
        with socket.create_connection((host, int(port))) as connection:
            while True:
                with guard:
                    if not jobs:
                        return
                    name, descriptor, at, end = jobs.pop(0)
                request = f"GET /bucket/{KEY}/{name} HTTP/1.1\r\nHost: {host}\r\nRange: bytes={at}-{end - 1}\r\n\r\n"
                connection.sendall(request.encode())
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(1)
                while at < end:
                    count = connection.recv_into(buffer, min(len(buffer), end - at))
                    at += os.pwrite(descriptor, buffer[:count], at)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sync:
        for name in FILES:
            os.fsync(os.open(target / name, os.O_RDONLY))
    yield


async def measure(contender: str, url: str, target: Path) -> dict[str, float]:
    runs = {
        "ours": ours,
        "docs": docs,
        "boto3": boto3_transfer,
        "raw": raw,
        "raw+fsync": lambda url, target: raw(url, target, sync=True),
    }
    steps = runs[contender](url, target)
    await anext(steps)
    idle_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu = time.perf_counter(), time.process_time()
    await anext(steps)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async for _ in steps:
        pass
    return {"s": seconds, "cpu_s": cpu_s, "peak_mb": (peak_kb - idle_kb) / 1024}


def run_once(contender: str, url: str, home: Path) -> dict[str, float]:
    """One cold fetch."""
    target = home / "target"
    shutil.rmtree(target, ignore_errors=True)
    os.sync()  # no contender pays for what the one before left unwritten
    command = [sys.executable, "-m", "benchmarks.fetch", "--one", contender, url, str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(target, ignore_errors=True)
    return result


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--one", nargs=3)
    arguments.add_argument("--sizes", type=int, nargs="*", default=SIZES_MB)
    arguments.add_argument("--networks", nargs="*", default=list(NETWORKS))
    arguments.add_argument("--repeats", type=int)
    arguments.add_argument("--keep", default="fetch", help="name of the file of results")
    options = arguments.parse_args()
    if options.one:
        contender, url, target = options.one
        print(json.dumps(asyncio.run(measure(contender, url, Path(target)))))
        return 0
    rows = []
    for network, size_mb in itertools.product(options.networks, options.sizes):
        with tempfile.TemporaryDirectory() as name:
            home = Path(name)
            directory = home / "served" / "bucket" / KEY
            directory.mkdir(parents=True)
            write_sized_adapter(directory, size_mb, "BF16")
            results: dict[str, list[dict[str, float]]] = {contender: [] for contender in CONTENDERS}
            with range_server(home / "served", bytes_per_s=NETWORKS[network]) as server:
                for repeat in range(options.repeats or REPEATS.get(size_mb, 5)):
                    for contender in CONTENDERS if repeat % 2 == 0 else CONTENDERS[::-1]:
                        results[contender].append(run_once(contender, server.url, home))
            rows.append({"network": network, "size_mb": size_mb, "load": os.getloadavg()[0], "results": results})
    print_table(rows)
    print(f"\nRaw: {keep(options.keep, rows)}")
    return 0


def print_table(rows: list[dict]) -> None:
    print("| network | adapter | contender | seconds | MB/s | of raw | of docs | CPU s | peak MB above idle |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        medians = {
            contender: {key: statistics.median(run[key] for run in runs) for key in ("s", "cpu_s", "peak_mb")}
            for contender, runs in row["results"].items()
        }
        print(f"<!-- load {row['load']:.0f} -->")
        for contender, median in medians.items():
            rate = row["size_mb"] / median["s"]
            of_raw, of_docs = (medians[other]["s"] / median["s"] for other in ("raw", "docs"))
            both = zip(row["results"][contender], row["results"]["docs"], strict=True)
            pairs = statistics.median(docs["s"] / run["s"] for run, docs in both)
            cost = f"{median['cpu_s']:.2f} | {median['peak_mb']:.0f}"
            print(
                f"| {row['network']} | {row['size_mb']} MB | {contender} | {median['s']:.3f} | {rate:.0f} "
                f"| {of_raw:.2f} | {of_docs:.2f} (pairs {pairs:.2f}) | {cost} |"
            )


if __name__ == "__main__":
    sys.exit(main())
