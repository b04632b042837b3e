"""Goal of R59's takedowns and R13's outages, within `make bench-faults`.

Takedowns and outages at a running server: called by `benchmarks.faults.measure`.
"""

from __future__ import annotations

import asyncio
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
CROWD = 40
BLOCK_MS, ALL_ANSWERED_S, SOURCE_REQUESTS = 50.0, 2.0, 5


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
    return found


def goals_of(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What, goal, value, and whether it is met; nothing where nothing was measured."""
    if not found:
        return []
    failing, hanging = found["failing"], found["hanging"]
    goals = []
    for state, one in found["takedowns"].items():
        begun = one["later"].get("200", 0)
        met = one["took_ms"] <= BLOCK_MS and begun == 0
        value = f"{one['took_ms']} ms, {begun} answers"
        goals.append((f"DELETE ?block=true {state}", f"≤ {BLOCK_MS:g} ms, 0 answers later", value, met))
    last_s, asked = failing["last_after_first_s"], failing["source_requests"]
    met = last_s <= ALL_ANSWERED_S and asked <= SOURCE_REQUESTS
    goals.append(
        (f"{CROWD} requests while the source fails", "≤ 2 s after the first, ≤ 5 asked", f"{last_s} s, {asked}", met)
    )
    all_s = hanging["all_s"]
    goal = f"≤ {DEADLINE_S} s, a deadline (and 1 s)"
    goals.append((f"{CROWD} requests while the source hangs", goal, f"{all_s} s", all_s <= DEADLINE_S + 1))
    return goals
