"""Takedowns, a flood of unknown names, and outages at a running server: called by `benchmarks.faults`."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from collections import Counter
from typing import Any

import httpx

from testbed import faults
from testbed.models import PROMPT
from testbed.proxy import FaultProxy
from testbed.server import Server

DEADLINE_S = 20
UNKNOWN_PER_S, FLOOD_S, HOT = 1000, 10.0, 100
CROWD = 40
BLOCK_MS, ALL_ANSWERED_S, SOURCE_REQUESTS, P99_RATIO = 50.0, 2.0, 5, 1.5


async def _status(http: httpx.AsyncClient, name: str, tokens: int = 1) -> tuple[int, float, float]:
    """The status of one completion, and when it was asked for and answered, of `time.monotonic()`."""
    began = time.monotonic()
    body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    status = (await http.post("/v1/completions", json=body)).status_code
    return status, began, time.monotonic()


async def takedowns(http: httpx.AsyncClient, proxy: FaultProxy, names: list[str]) -> dict[str, Any]:
    """`DELETE ?block=true` of a name at rest, in use, and while its source hangs; and what was asked for afterwards."""
    found = {}
    idle, used, fetched = names[:3]
    for state, name in (("at rest", idle), ("in use", used), ("while its source hangs", fetched)):
        ended = threading.Event()
        asking: list[asyncio.Task[Any]] = []
        if state == "while its source hangs":
            await http.delete(f"/v1/loras/{name}")
            await asyncio.sleep(5.5)  # what was found of it is not believed any more
            proxy.plan(faults.run_before(ended.wait), times=None)
            asking = [asyncio.create_task(_status(http, name))]
            while not proxy.requests(path=f"{name}"):
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)
        else:
            await _status(http, name)
            if state == "in use":
                asking = [asyncio.create_task(_status(http, name, 200)) for _ in range(2)]
                await asyncio.sleep(0.3)
        began = time.monotonic()
        answer = await http.delete(f"/v1/loras/{name}", params={"block": "true"})
        took_ms = (time.monotonic() - began) * 1e3
        later = await asyncio.gather(*(_status(http, name) for _ in range(20)))
        proxy.clear()
        ended.set()
        before = await asyncio.gather(*asking)
        found[state] = {
            "status": answer.status_code,
            "took_ms": round(took_ms, 1),
            "later": dict(Counter(str(status) for status, *_ in later)),
            "began_before": [status for status, *_ in before],
        }
    return found


async def flood(server: Server, http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """A hot adapter alone, and beside unknown names of one caller at `UNKNOWN_PER_S`.

    The hot adapter's client is a process of its own: here the flood and the proxy of its sources take their turns.
    """

    async def hot() -> tuple[list[float], Counter[int]]:
        arguments = sys.executable, "-m", "benchmarks.floods", server.url, name
        process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        answers = json.loads(said)
        return [ms for _, ms in answers], Counter(status for status, _ in answers)

    await hot()
    alone, _ = await hot()
    done, answers = asyncio.Event(), Counter[str]()
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits, trust_env=False) as other:

        async def stranger(number: int) -> None:
            try:
                answers[str((await _status(other, f"unknown-{number}"))[0])] += 1
            except httpx.HTTPError as error:
                answers[type(error).__name__] += 1

        async def flooding() -> int:
            began, number, asking = time.monotonic(), 0, set()
            while not done.is_set():
                await asyncio.sleep(max(0.0, began + number / UNKNOWN_PER_S - time.monotonic()))
                if len(asking) < 500:
                    asking.add(task := asyncio.create_task(stranger(number)))
                    task.add_done_callback(asking.discard)
                number += 1
            sent_per_s = (sum(answers.values()) + len(asking)) / (time.monotonic() - began)
            await asyncio.gather(*asking)
            return round(sent_per_s)

        flooded = asyncio.create_task(flooding())
        await asyncio.sleep(1)
        beside, statuses = await hot()
        done.set()
        sent_per_s = await flooded
    p99 = [statistics.quantiles(times, n=100)[98] for times in (alone, beside)]
    return {
        "alone_ms": {"p50": statistics.median(alone), "p99": p99[0]},
        "beside_ms": {"p50": statistics.median(beside), "p99": p99[1]},
        "p99_ratio": p99[1] / p99[0],
        "refused": sum(count for status, count in statuses.items() if status != 200),
        "unknown": dict(answers),
        "sent_per_s": sent_per_s,
    }


async def _ask_hot(url: str, name: str) -> list[tuple[int, float]]:
    """Status and milliseconds of `HOT` requests, one after the other."""
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        answers = [await _status(http, name) for _ in range(HOT)]
    return [(status, (ended - began) * 1e3) for status, began, ended in answers]


async def crowd(http: httpx.AsyncClient, proxy: FaultProxy, name: str, *, hangs: bool) -> dict[str, Any]:
    """`CROWD` requests for a name that is not served, while its source fails or hangs."""
    await http.delete(f"/v1/loras/{name}")
    await asyncio.sleep(5.5)
    ended = threading.Event()
    proxy.plan(faults.run_before(ended.wait) if hangs else faults.slow_down(), times=None)
    proxy.forget()
    answers = await asyncio.gather(*(_status(http, name) for _ in range(CROWD)))
    proxy.clear()
    ended.set()
    first = min(at for *_, at in answers)
    return {
        "statuses": dict(Counter(str(status) for status, *_ in answers)),
        "first_s": round(first - min(began for _, began, _ in answers), 2),
        "last_after_first_s": round(max(at for *_, at in answers) - first, 2),
        "source_requests": proxy.count(path=name),
        "all_s": round(max(at - began for _, began, at in answers), 2),
    }


async def measure(server: Server, proxy: FaultProxy, good: dict[str, list[int]]) -> dict[str, Any]:
    """All of it; the names of the object store are those that begin with "s"."""
    of_s3 = [name for name in good if name.startswith("s")]
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, trust_env=False) as http:
        found = {"failing": await crowd(http, proxy, of_s3[4], hangs=False)}
        print(found, flush=True)
        found["hanging"] = await crowd(http, proxy, of_s3[5], hangs=True)
        print(found["hanging"], flush=True)
        found["takedowns"] = await takedowns(http, proxy, of_s3[:3])
        print(found["takedowns"], flush=True)
        found["flood"] = await flood(server, http, of_s3[6])
        print(found["flood"], flush=True)
    return found


def goals_of(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What, goal, value, and whether it is met; nothing where nothing was measured."""
    if not found:
        return []
    failing, hanging, flooded = found["failing"], found["hanging"], found["flood"]
    goals = []
    for state, one in found["takedowns"].items():
        begun = one["later"].get("200", 0)
        met = one["took_ms"] <= BLOCK_MS and begun == 0
        value = f"{one['took_ms']} ms, {begun} answers"
        goals.append((f"DELETE ?block=true {state}", f"≤ {BLOCK_MS:g} ms, 0 answers later", value, met))
    ratio, refused = flooded["p99_ratio"], flooded["refused"]
    flood_value = f"{ratio:.2f}×, {refused} ({flooded['sent_per_s']}/s)"
    flood_met = ratio <= P99_RATIO and refused == 0
    goals.append(
        (f"hot p99 beside {UNKNOWN_PER_S} unknown names/s; refused", f"≤ {P99_RATIO:g}×, 0", flood_value, flood_met)
    )
    last_s, asked = failing["last_after_first_s"], failing["source_requests"]
    met = last_s <= ALL_ANSWERED_S and asked <= SOURCE_REQUESTS
    goals.append(
        (f"{CROWD} requests while the source fails", "≤ 2 s after the first, ≤ 5 asked", f"{last_s} s, {asked}", met)
    )
    all_s = hanging["all_s"]
    goal = f"≤ {DEADLINE_S} s, a deadline (and 1 s)"
    goals.append((f"{CROWD} requests while the source hangs", goal, f"{all_s} s", all_s <= DEADLINE_S + 1))
    return goals


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_ask_hot(*sys.argv[1:]))))
