"""Figure of docs/benchmarks/fetch.md#served-names-crowds-and-floods, for R13: `make bench-flood`.

A hot adapter's answers alone and beside a flood of unknown names: `make bench-flood`.

One caller asks for a new unknown name each millisecond, while another asks for a hot adapter, one request after the
other; both are processes of their own. Three servers, each in rounds of alone and beside in turn:

- files: unknown names are looked up in a directory. s3: in an object store of this machine, too, which takes its turns
  on the same cores.
- stock: vLLM without lora-plugins, which knows the hot adapter by `--lora-modules` and looks nothing up.

Prints p50 and p99 of the hot adapter beside the flood as ratios of alone, and what share of a core each process took.
Keeps benchmarks/results/flood.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.record import keep
from testbed.bed import Bed, prepare
from testbed.models import PROMPT
from testbed.s3 import s3_server
from testbed.server import ONE_THREAD, Server, plugged, vllm_server

UNKNOWN_PER_S, MOST_AT_ONCE, HOT_REQUESTS, HOT = 1000, 500, 300, "hot"
P99_RATIO = 1.5
CASES = ("files", "s3", "stock")


# --- the callers, each a process ---


def ask_hot(url: str) -> None:
    """Print status and milliseconds of requests for the hot adapter, one after the other."""
    body = {"model": HOT, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    answers = []
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
        for _ in range(HOT_REQUESTS):
            began = time.perf_counter()
            status = http.post("/v1/completions", json=body).status_code
            answers.append((status, (time.perf_counter() - began) * 1e3))
    print(json.dumps(answers))


async def flood(url: str) -> None:
    """Ask for unknown names until standard input ends; print how many were sent a second, and the statuses.

    Connections are plain sockets: the flood shall take few of the server's turns on the cores.
    """
    place, statuses, idle = urlsplit(url), Counter[int](), list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]()

    async def stranger(number: int) -> None:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(place.hostname, place.port)
        body = json.dumps({"model": f"unknown-{began:.0f}-{number}", "prompt": PROMPT, "max_tokens": 1}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0]))
        statuses[int(answer.split(maxsplit=2)[1])] += 1
        idle.append((reader, writer))

    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    began, number, asking = time.monotonic(), 0, set[asyncio.Task[None]]()
    while not ended.done():
        await asyncio.sleep(max(0.0, began + number / UNKNOWN_PER_S - time.monotonic()))
        if len(asking) < MOST_AT_ONCE:
            asking.add(task := asyncio.create_task(stranger(number)))
            task.add_done_callback(asking.discard)
        number += 1
    sent_per_s = (statuses.total() + len(asking)) / (time.monotonic() - began)
    for task in asking:
        task.cancel()
    print(json.dumps({"sent_per_s": round(sent_per_s), "statuses": statuses}))


def _run(what: str, url: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fetch.flood", what, url], stdout=subprocess.PIPE, text=True, **options
    )


# --- the servers ---


@contextlib.contextmanager
def serving(case: str, bed: Bed, folder: Path) -> Iterator[tuple[Server, list[psutil.Process]]]:
    """A server of one case, and the object store's processes beside it."""
    adapter = bed.adapters / min(name for name in bed.answers if name is not None)
    root = folder / case
    root.mkdir()
    shutil.copytree(adapter, root / HOT)
    env = dict(ONE_THREAD)
    arguments = ["--enable-lora", "--max-lora-rank", "64", "--max-loras", "4", "--served-model-name", "base"]
    with contextlib.ExitStack() as stack:
        stores = []
        if case == "stock":
            env["VLLM_PLUGINS"] = ""
            arguments += ["--lora-modules", f"{HOT}={adapter}"]
        else:
            plugins = "lora_filesystem_resolver,lora_lru_manager,lora_kernels" + ",lora_s3_resolver" * (case == "s3")
            env |= plugged(plugins, folder / f"{case}-store", root)
        if case == "s3":
            before = set(psutil.Process().children())
            s3 = stack.enter_context(s3_server())
            stores = [it for it in psutil.Process().children() if it not in before]
            s3.bucket("adapters")
            env |= {"S3_PATH_TEMPLATE": "s3://adapters/loras/{lora_name}", **s3.env()}
        server = stack.enter_context(vllm_server(bed.base, folder / f"{case}.log", arguments=arguments, env=env))
        yield server, stores


def hot_ms(server: Server) -> list[float]:
    """Milliseconds of the hot adapter's answers, none of which may be refused."""
    said, _ = _run("hot", server.url).communicate()
    answers = json.loads(said)
    assert all(status == 200 for status, _ in answers), Counter(status for status, _ in answers)
    return [ms for _, ms in answers]


def beside(server: Server, watched: dict[str, list[psutil.Process]]) -> tuple[list[float], dict[str, Any]]:
    """The same beside a flood; and what the flood was answered, and shares of a core."""
    flooding = _run("flood", server.url, stdin=subprocess.PIPE)
    watched = {**watched, "flood": [psutil.Process(flooding.pid)]}
    time.sleep(1)
    used_s, began = {name: _cpu_s(of) for name, of in watched.items()}, time.monotonic()
    found_ms = hot_ms(server)
    took_s = time.monotonic() - began
    cores = {name: round((_cpu_s(of) - used_s[name]) / took_s, 2) for name, of in watched.items()}
    said, _ = flooding.communicate("")
    return found_ms, {"cores": cores, "took_s": round(took_s, 1), **json.loads(said)}


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(case: str, bed: Bed, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Rounds of alone and beside, in turn."""
    found = []
    with serving(case, bed, folder) as (server, stores):
        api = psutil.Process(server.process.pid)
        watched = {"API server": [api], "engine": api.children(recursive=True), "object store": stores}
        hot_ms(server)
        for _ in range(rounds):
            alone_ms = hot_ms(server)
            beside_ms, seen = beside(server, watched)
            row: dict[str, Any] = {"case": case, **seen}
            for name, some in (("alone", alone_ms), ("beside", beside_ms)):
                row[f"{name}_ms"] = {"p50": round(median(some), 2), "p99": round(quantiles(some, n=100)[98], 2)}
            row |= {it: round(row["beside_ms"][it] / row["alone_ms"][it], 2) for it in ("p50", "p99")}
            print(json.dumps(row), flush=True)
            found.append(row)
            time.sleep(6)  # what still waits to be looked up is refused in that time
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=CASES, action="append")
    arguments = parser.parse_args()
    bed = prepare(print)
    with tempfile.TemporaryDirectory(prefix="bench-flood-") as folder:
        cases = arguments.case or CASES
        rows = [row for case in cases for row in measure(case, bed, Path(folder), arguments.rounds)]
    goals = []
    for case in cases:
        ratio = median(row["p99"] for row in rows if row["case"] == case)
        goals.append({"what": f"{case}: hot p99", "goal": P99_RATIO, "value": ratio, "met": ratio <= P99_RATIO})
        print(f"{case:<6} hot p99 beside {UNKNOWN_PER_S} unknown names/s: {ratio:.2f}× alone, goal {P99_RATIO:g}×")
    print(keep("flood", {"rounds": rows}, goals=goals))
    return 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["hot", url]:
            ask_hot(url)
        case ["flood", url]:
            asyncio.run(flood(url))
        case _:
            sys.exit(main())
