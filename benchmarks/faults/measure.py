"""Goal of R50 and R58 (benchmarks/results/faults.json): `make bench-faults`.

A real server under load while processes, disks, limits, clock and sources fail at random.

24 good names with adapters of their own, half of them in directories and half in an object store; adapters whose bytes
are broken; names that nobody has. The store has room for a third. While faults come and go, every answer is judged by
PEFT's tokens; a refusal with a 4xx must be a verdict about bytes, or an absence. Then all faults end, and each good
name is asked for until it is served.

With one server, `benchmarks.faults.outages` then measures takedowns and outages. Prints goals and values, keeps
benchmarks/results/faults.json, and ends with 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults import outages
from benchmarks.faults.injection import FAULTS, Interposer, Machine
from benchmarks.record import keep
from testbed.bed import Bed, prepare
from testbed.models import PROMPT
from testbed.proxy import fault_proxy
from testbed.s3 import Bucket, s3_server
from testbed.server import ONE_THREAD, Server, plugged, vllm_server

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAMES, CLIENTS, TOKENS = 24, 3, 8
PLUGINS = "lora_filesystem_resolver,lora_s3_resolver,lora_lru_manager,lora_kernels,lora_admin"
MOST_FAULT_S, PAUSE_S, SERVED_AGAIN_S, LONGEST_S = 6.0, 1.0, 5.0, 120.0


@dataclass
class Names:
    """Good names with the tokens of their answers, names of broken bytes, and the folders of the sources."""

    good: dict[str, list[int]]
    broken: tuple[str, ...]
    size_bytes: int


@dataclass
class Found:
    """What the answers were: counts by kind of name and status, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)


def fill(bed: Bed, root: Path, bucket: Bucket) -> Names:
    """Put each name's adapter where its source has it: PEFT's, each of other bytes by blanks in its configuration."""
    good, size_bytes = {}, 0
    adapters = sorted(name for name in bed.answers if name is not None)
    for number in range(NAMES):
        adapter = adapters[number % len(adapters)]
        directory = bed.adapters / adapter
        files = {CONFIG: (directory / CONFIG).read_bytes() + b" " * number, WEIGHTS: (directory / WEIGHTS).read_bytes()}
        size_bytes += sum(map(len, files.values()))
        name = f"{'f' if number % 2 else 's'}{number:02}"
        good[name] = bed.answers[adapter][:TOKENS]
        put(name, files, root, bucket)
    whole = (bed.adapters / adapters[0] / WEIGHTS).read_bytes()
    config = (bed.adapters / adapters[0] / CONFIG).read_bytes()
    cut, bad_config = {CONFIG: config, WEIGHTS: whole[:-1000]}, {CONFIG: b"{", WEIGHTS: whole}
    broken = {"s-cut": cut, "f-cut": cut, "s-config": bad_config, "f-config": bad_config}
    for name, files in broken.items():
        put(name, files, root, bucket)
    return Names(good, tuple(broken), size_bytes)


def put(name: str, files: dict[str, bytes], root: Path, bucket: Bucket) -> None:
    if name.startswith("s"):
        bucket.put_many(f"loras/{name}", files)
        return
    (root / name).mkdir(parents=True)
    for file, data in files.items():
        (root / name / file).write_bytes(data)


def connect(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=LONGEST_S, trust_env=False)


async def ask(client: httpx.AsyncClient, name: str, tokens: int = TOKENS) -> tuple[int, list[int], str]:
    """Status, token ids and error of one greedy completion; status 0 where there was no answer."""
    body = {
        "model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    try:
        answer = await client.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        return 0, [], f"{type(error).__name__}: {error}"
    if answer.status_code != 200:
        return answer.status_code, [], answer.text[:400]
    return 200, list(answer.json()["choices"][0]["token_ids"]), ""


def judge(kind: str, expected: list[int] | None, status: int, tokens: list[int], error: str) -> str | None:
    """What is wrong with an answer during faults; None where it is right."""
    if status == 200:
        return None if tokens == expected else f"{tokens} in place of {expected}"
    if status == 0:
        return None if "Timeout" not in error else f"no answer in {LONGEST_S:g} s"
    if status in (503, 507):
        return None
    allowed = {"good": (), "broken": (400,), "unknown": (404,)}[kind]
    return None if status in allowed else f"status {status}: {error}"


async def client(number: int, seed: int, server: Server, names: Names, found: Found, done: asyncio.Event) -> None:
    rng = random.Random(f"{seed}-client-{number}")
    async with connect(server) as http:
        while not done.is_set():
            await asyncio.sleep(rng.expovariate(10.0))
            draw = rng.random()
            kind = "good" if draw < 0.85 else "broken" if draw < 0.93 else "unknown"
            name = (
                f"nobody-{rng.randrange(1000)}"
                if kind == "unknown"
                else rng.choice(sorted(names.good) if kind == "good" else names.broken)
            )
            began = time.monotonic()
            status, tokens, error = await ask(http, name)
            found.counts[f"{kind} {status}"] += 1
            wrong = judge(kind, names.good.get(name), status, tokens, error)
            if wrong is not None:
                found.wrong.append({"name": name, "wrong": wrong, "took_s": round(time.monotonic() - began, 2)})
                print(f"WRONG {name}: {wrong}", flush=True)
            if status == 0:
                await asyncio.sleep(0.1)


async def inject(machine: Machine, seed: int, seconds: float, found: Found) -> None:
    """One or two faults at a time, at random; all have ended when this returns."""
    rng = random.Random(f"{seed}-faults")
    ends = time.monotonic() + seconds
    order: list[str] = []
    while time.monotonic() < ends:
        with contextlib.ExitStack() as there:
            for _ in range(rng.choice((1, 1, 2))):
                order = order or rng.sample(sorted(FAULTS), len(FAULTS))  # each comes before one comes again
                name = order.pop()
                found.faults[name] += 1
                print(f"fault: {name}", flush=True)
                there.enter_context(FAULTS[name](machine, rng))
            await asyncio.sleep(min(rng.uniform(1.0, MOST_FAULT_S), max(0.1, ends - time.monotonic())))
        await asyncio.sleep(min(rng.expovariate(1 / PAUSE_S), max(0.0, ends - time.monotonic())))


async def served_again(server: Server, names: Names, found: Found) -> dict[str, float]:
    """Seconds until each good name is served, from now."""
    began = time.monotonic()
    after_s: dict[str, float] = {}
    places = asyncio.Semaphore(CLIENTS)

    async def one(http: httpx.AsyncClient, name: str) -> None:
        while time.monotonic() - began < LONGEST_S:
            async with places:
                status, tokens, error = await ask(http, name)
            if status == 200:
                after_s[name] = round(time.monotonic() - began, 2)
                if tokens != names.good[name]:
                    found.wrong.append({"name": name, "wrong": f"{tokens} in place of {names.good[name]}"})
                return
            found.counts[f"after {status}"] += 1
            print(f"after: {name} {status} {error[:160]}", flush=True)
            await asyncio.sleep(0.2)
        found.wrong.append({"name": name, "wrong": f"not served {LONGEST_S:g} s after the faults: {status} {error}"})

    async with connect(server) as http:
        await asyncio.gather(*(one(http, name) for name in names.good))
    return after_s


async def run(machine: Machine, server: Server, names: Names, seed: int, seconds: float) -> dict[str, Any]:
    found, done = Found(), asyncio.Event()
    calm_s = await served_again(server, names, found)  # all of it, without a fault
    found.counts.clear()
    clients = [asyncio.create_task(client(i, seed, server, names, found, done)) for i in range(CLIENTS)]
    await inject(machine, seed, seconds, found)
    after_s = await served_again(server, names, found)
    done.set()
    await asyncio.gather(*clients)
    return {
        "seed": seed,
        "seconds": seconds,
        "faults": dict(found.faults),
        "answers": dict(sorted(found.counts.items())),
        "wrong": found.wrong,
        "served_in_calm_s": max(calm_s.values(), default=None),
        "served_again_s": dict(sorted(after_s.items(), key=lambda item: item[1])),
    }


def goals_of(faults: dict[str, Any], seconds: float) -> list[tuple[str, str, str, bool]]:
    """What, goal, value, and whether it is met."""
    wrong = [entry for entry in faults["wrong"] if "in place of" in entry["wrong"]]
    others = len(faults["wrong"]) - len(wrong)
    after = faults["served_again_s"]
    last_s = max(after.values(), default=float("inf")) if len(after) == NAMES else float("inf")
    return [
        (f"wrong tokens in {seconds:g} s of faults", "0", str(len(wrong)), not wrong),
        ("refusals that are neither a fault nor a verdict about bytes", "0", str(others), not others),
        ("good names served again", f"≤ {SERVED_AGAIN_S:g} s", f"{last_s:.1f} s", last_s <= SERVED_AGAIN_S),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--no-outages", action="store_true", help="faults only")
    arguments = parser.parse_args()
    if shutil.which("gcc") is None:
        parser.error("gcc is needed to compile benchmarks/faults/interposer.c")
    bed = prepare(print)
    with (
        tempfile.TemporaryDirectory(prefix="bench-faults-") as folder,
        s3_server() as s3,
        fault_proxy(s3.url) as proxy,
    ):
        home = Path(folder)
        root, store = home / "adapters", home / "store"
        names = fill(bed, root, s3.bucket("adapters"))
        interposer = Interposer(home, [root, store])
        env = {
            **plugged(PLUGINS, store, root),
            **ONE_THREAD,
            "S3_PATH_TEMPLATE": "s3://adapters/loras/{lora_name}",
            "LORA_PLUGINS_STORE_MAX_BYTES": str(names.size_bytes // 3),
            "LORA_PLUGINS_HOST_MAX_BYTES": str(names.size_bytes // 4),
            "LORA_PLUGINS_FETCH_TIMEOUT_S": str(outages.DEADLINE_S),
            **s3.env(proxy.url),
            **interposer.env,
        }
        size = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", "4", "--max-cpu-loras", "8")
        log = home / "server.log"
        try:
            with vllm_server(bed.base, log, arguments=(*size, "--served-model-name", "base"), env=env) as server:
                machine = Machine(server.process.pid, interposer, proxy)
                faults = asyncio.run(run(machine, server, names, arguments.seed, arguments.seconds))
                found_later = {} if arguments.no_outages else asyncio.run(outages.measure(server, proxy, names.good))
        finally:
            if log.exists():
                shutil.copyfile(log, Path(tempfile.gettempdir()) / "bench-faults-server.log")
    goals = [*goals_of(faults, arguments.seconds), *outages.goals_of(found_later)]
    width = max(len(what) for what, *_ in goals)
    for what, goal, value, is_met in goals:
        print(f"{what:<{width}}  goal {goal:<28} found {value:<28} {'met' if is_met else 'MISSED'}")
    table = [{"what": what, "goal": goal, "value": value, "met": is_met} for what, goal, value, is_met in goals]
    print(json.dumps(faults["answers"]))
    print(keep("faults", {"faults": faults, "outages": found_later}, goals=table))
    return 0 if all(is_met for *_, is_met in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
