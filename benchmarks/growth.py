"""What grows in a server while one thing is done to it many thousand times: `make bench-growth`.

One real server serves one adapter. Strangers ask for names that nobody has, in each form that a name may have; clients
leave in the midst of their answers; an administrator pushes, loads, unloads, pins and pauses: each with names that
never come again. After each third the processes' memory, threads and descriptors are read, their children, the log, the
series and bytes of `/metrics`, and the files of the store.

A first third fills caches that have a bound. What the last third adds is growth: shown for each 1,000 requests, and
refused above `MOST_KB` (of loads and pushes `Kind.kept_kb`: API server and engine remember the last 10,000 names that
were served), or where threads, descriptors, children or series grew. The worker's memory is noted, and not
judged: the kernels' caches grow with the shapes of batches, on vLLM without plugins too.
Writes benchmarks/results/growth.json; 1 where something grew.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.record import keep
from benchmarks.soak.server import processes_of
from testbed.bed import Bed, prepare
from testbed.models import PROMPT
from testbed.server import Server, vllm_server

NAME = "sql"
AT_ONCE = 16
MOST_KB = 400.0  # of API server and engine, for each 1,000 requests of the last third
QUIET_S = 3.0
SETTLED = ("threads", "files", "children", "series")
SLACK = {"threads": 16, "files": 6, "children": 1, "series": 4}
Act = Callable[[httpx.AsyncClient, int], Awaitable[int]]


class Kind(NamedTuple):
    """One thing to do, so many times, and the statuses that answer it."""

    count: int
    act: Act
    answers: tuple[int, ...]
    log_bytes: int = 0  # that each may write
    kept_kb: float = 0.0  # that caches keep of 1,000, until they are full


# --- what is done ---


def asks(name: Callable[[int], str], **headers: Callable[[int], str]) -> Act:
    async def act(client: httpx.AsyncClient, number: int) -> int:
        body = {"model": name(number), "prompt": PROMPT, "max_tokens": 1}
        of_number = {key.replace("_", "-"): value(number) for key, value in headers.items()}
        return (await client.post("/v1/completions", json=body, headers=of_number)).status_code

    return act


async def leaves(client: httpx.AsyncClient, number: int) -> int:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 64, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        await anext(answer.aiter_raw())
        return answer.status_code


def calls(*steps: tuple[str, str]) -> Act:
    """Calls of the administration for a name of its own, one after the other; the status of the last."""

    async def act(client: httpx.AsyncClient, number: int) -> int:
        status = 0
        for method, path in steps:
            answer = await client.request(method, "/v1/loras" + path.format(f"name-{number}"))
            status = answer.status_code
        return status

    return act


async def then_unloaded(client: httpx.AsyncClient, answer: httpx.Response, kind: str, number: int) -> int:
    if answer.is_success:
        answer = await client.delete(f"/v1/loras/{kind}-{number}")
    return answer.status_code


def pushes(bed: Bed, adapter: str) -> Act:
    files = {path.name: path.read_bytes() for path in (bed.adapters / adapter).glob("adapter_*")}

    async def act(client: httpx.AsyncClient, number: int) -> int:
        some = [("files", (name, content)) for name, content in files.items()]
        return await then_unloaded(client, await client.put(f"/v1/loras/pushed-{number}", files=some), "pushed", number)

    return act


def loads(uri: str) -> Act:
    async def act(client: httpx.AsyncClient, number: int) -> int:
        answer = await client.post("/v1/loras", json={"lora_name": f"loaded-{number}", "source": {"uri": uri}})
        return await then_unloaded(client, answer, "loaded", number)

    return act


def kinds(bed: Bed, adapter: str, uri: str) -> dict[str, Kind]:
    def digest(number: int) -> str:
        return hashlib.sha256(str(number).encode()).hexdigest()

    return {
        "unknown names": Kind(30_000, asks("unknown-{}".format), (404, 503), 400),
        "unknown names of 200 characters": Kind(6_000, asks(("x" * 190 + "-{}").format), (404, 503), 800),
        "revisions of a served name": Kind(12_000, asks((NAME + "@v{}").format), (404, 503), 400),
        "digests of a served name": Kind(12_000, asks(lambda number: f"{NAME}@{digest(number)}"), (404, 503), 500),
        "hostile names": Kind(6_000, asks("../{}\u202e/x".format), (400, 404), 500),
        "ids of requests": Kind(3_000, asks(lambda _: NAME, X_Request_Id=digest, x_lora_plugins_client=digest), (200,)),
        "clients that leave": Kind(3_000, leaves, (200,)),
        "pushes and unloads": Kind(900, pushes(bed, adapter), (200, 204), 4_000, 5_000),
        "loads and unloads": Kind(900, loads(uri), (200, 204), 4_000, 5_000),
        "pins of unknown names": Kind(3_000, calls(("POST", "/{}/pin")), (404, 503), 400),
        "pauses and resumes": Kind(
            3_000, calls(("POST", "/{}/pause?mode=keep"), ("POST", "/{}/resume")), (200, 204, 404), 400
        ),
        "unloads of unknown names": Kind(3_000, calls(("DELETE", "/{}")), (404,), 400),
        "rollbacks of unknown names": Kind(3_000, calls(("POST", "/{}/rollback")), (400, 404, 422), 400),
    }


# --- what is read ---


def read(server: Server, store: Path) -> dict[str, float]:
    """What the server's processes have, and have written, once they rest."""
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    processes = processes_of(server)
    return {
        **{f"{name} MB": process.memory_info().rss / 1e6 for name, process in processes.items()},
        "threads": sum(process.num_threads() for process in processes.values()),
        "files": sum(process.num_fds() for process in processes.values()),
        "children": len(psutil.Process(server.process.pid).children(recursive=True)),
        "log bytes": server.log_file.stat().st_size,
        "series": sum(not line.startswith("#") for line in metrics.splitlines()),
        "metrics bytes": len(metrics),
        "store files": sum(path.is_file() for path in store.rglob("*")),
    }


async def do(url: str, act: Act, numbers: range) -> Counter[int]:
    """So many at once; returns how each was answered."""
    found, left = Counter[int](), iter(numbers)
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:

        async def some() -> None:
            for number in left:
                found[await act(client, number)] += 1

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return found


def measure(name: str, kind: Kind, server: Server, store: Path, part: float) -> dict[str, Any]:
    third, seen, statuses, began = max(AT_ONCE, int(kind.count * part / 3)), [], Counter[int](), time.monotonic()
    for number in range(3):
        statuses += asyncio.run(do(server.url, kind.act, range(number * third, (number + 1) * third)))
        time.sleep(QUIET_S)
        seen.append(read(server, store))
    last = {key: seen[2][key] - seen[1][key] for key in seen[2]}
    growth_kb = (last["API server MB"] + last["EngineCore MB"]) * 1e6 / third
    log_bytes = last["log bytes"] / third
    faults = [key for key in SETTLED if last[key] > SLACK[key]]
    faults += ["memory"] * (growth_kb > MOST_KB + kind.kept_kb) + ["log"] * (log_bytes > kind.log_bytes + 300)
    faults += [f"status {status}" for status in statuses if status not in kind.answers]
    row = {
        "what": name,
        "requests": 3 * third,
        "a second": round(3 * third / (time.monotonic() - began - 3 * QUIET_S)),
        "statuses": dict(statuses),
        "KB for each 1,000": round(growth_kb, 1),
        "log bytes each": round(log_bytes),
        "faults": faults,
        "seen": [{key: round(value, 1) for key, value in one.items()} for one in seen],
    }
    line = f"{name:<34}{row['requests']:>7}{row['a second']:>7}/s{growth_kb:>9.1f} KB/1,000 {log_bytes:>7.0f} B log"
    print(f"{line}  {dict(statuses)}  {', '.join(faults) or 'flat'}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=float, default=1.0, help="of each number of requests")
    parser.add_argument("--only", action="append", help="a name of what is done")
    options = parser.parse_args()
    bed = prepare(print)
    adapter = min(name for name in bed.answers if name is not None)
    with tempfile.TemporaryDirectory(prefix="bench-growth-") as home:
        root, store, allowed = Path(home) / "adapters", Path(home) / "store", Path(home) / "allowed"
        shutil.copytree(bed.adapters / adapter, root / NAME)
        shutil.copytree(bed.adapters / adapter, allowed / NAME)
        env = {
            "VLLM_PLUGINS": "lora_filesystem_resolver,lora_lru_manager,lora_kernels,lora_admin",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(root),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "LORA_PLUGINS_STORE_DIR": str(store),
            "LORA_PLUGINS_ALLOWED_URIS": allowed.as_uri(),
        }
        arguments = ["--enable-lora", "--max-lora-rank", "64", "--max-loras", "4", "--enable-request-id-headers"]
        with vllm_server(bed.base, Path(home) / "log", arguments=arguments, env=env) as server:
            some = kinds(bed, adapter, (allowed / NAME).as_uri())
            some = {name: kind for name, kind in some.items() if not options.only or name in options.only}
            rows = [measure(name, kind, server, store, options.part) for name, kind in some.items()]
            log = server.log()
    tracebacks = log.count("Traceback (most recent call last)")
    print(f"{tracebacks} tracebacks in the log")
    print(f"written to {keep('growth', rows, tracebacks=tracebacks)}")
    return int(tracebacks > 0 or any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
