"""What must hold all the time, and at the end: looked at from outside, by the server's own routes and `/proc`."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from soak.clients import Target, connect
from soak.journal import Journal
from soak.oracle import Claim
from soak.server import HOST_ADAPTERS, HOST_MAX_BYTES, Processes, Sample
from soak.world import World

LONGEST_CHECK_S = 60.0
# An unload gives requests 20 s and 10 s to end; a draining version of a swap lasts as long as its longest request.
LONGEST_DRAIN_S = 60.0
# With our kernels on the CPU slots are pointers: everything in host memory may have one.
MOST_IN_SLOTS = HOST_ADAPTERS


async def metrics_of(client: httpx.AsyncClient) -> dict[str, float]:
    """Sums over all labels, by the sample's name."""
    found: dict[str, float] = {}
    answer = await client.get("/metrics")
    answer.raise_for_status()
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@dataclass
class Monitor:
    """Checks every few seconds, while clients and operators go on."""

    _world: World
    _target: Target
    _journal: Journal
    _store: Path = Path()

    def __post_init__(self) -> None:
        self._unleased: set[tuple[str, str]] = set()
        self._draining: dict[tuple[str, str], float] = {}
        self.latest: dict[str, float] = {}
        self.most: dict[str, float] = {}

    async def check(self) -> None:
        """Look once; a violation is written down."""
        began, before = time.monotonic(), await asyncio.to_thread(leased, self._store)
        try:
            async with connect(self._target.url, LONGEST_CHECK_S) as client:
                health = (await client.get("/health")).status_code
                answer = await client.get("/v1/loras")
                metrics = await metrics_of(client)
        except httpx.HTTPError as error:
            if not self._world.oracle.is_down(began, time.monotonic()):
                self._journal.violation("the engine lives", f"{type(error).__name__}: {error}")
            return
        if self._world.oracle.is_down(began, time.monotonic()):
            return
        if (health, answer.status_code) != (200, 200):
            self._journal.violation("the engine lives", f"health {health}, list {answer.status_code}: {answer.text}")
            return
        views = answer.json()["loras"]
        self.check_list(views)
        # Before the list and after: a name may be unloaded, or loaded, between the list and a look.
        self.check_leases(views, before | await asyncio.to_thread(leased, self._store))
        self.check_metrics(metrics)

    def check_list(self, views: list[dict[str, Any]]) -> None:
        in_slots = [view["lora_name"] for view in views if "slot" in view["tiers"]]
        in_host = [view["lora_name"] for view in views if "host" in view["tiers"]]
        if len(in_slots) > MOST_IN_SLOTS:
            self._journal.violation("no more adapters in slots than slots", str(in_slots))
        if len(in_host) > HOST_ADAPTERS:
            self._journal.violation("no more adapters in host memory than fit", str(len(in_host)))
        now = time.monotonic()
        draining = {(v["lora_name"], v["digest"]) for v in views if v["state"] == "draining"}
        self._draining = {key: self._draining.get(key, now) for key in draining}
        for key, since in self._draining.items():
            if now - since > LONGEST_DRAIN_S:
                self._journal.violation("nothing waits for ever", f"{key} drains for {now - since:.0f} s")
        self.latest["served"] = len(views)

    def check_leases(self, views: list[dict[str, Any]], leased: set[str]) -> None:
        """What is served is leased at one of two looks at least, unless its copy may have left a full disk."""
        now, oracle = time.monotonic(), self._world.oracle
        unleased = {
            (view["lora_name"], view["digest"])
            for view in views
            if view["state"] == "serving" and view["digest"] not in leased
            if Claim.GIVEN_WAY not in oracle.of(view["lora_name"]).during(now, now)
        }
        for name, digest in unleased & self._unleased:
            self._journal.violation("what is served is leased", digest, model=name)
        self._unleased = unleased

    def check_metrics(self, metrics: dict[str, float]) -> None:
        for name, most in (
            ("lora_plugins_host_bytes", HOST_MAX_BYTES),
            ("vllm:num_gpu_loaded_lora_adapters", MOST_IN_SLOTS),
            ("vllm:num_cpu_loaded_lora_adapters", HOST_ADAPTERS),
        ):
            if metrics.get(name, 0) > most:
                self._journal.violation("budgets hold", f"{name} is {metrics[name]:.0f}, at most {most}")
        for name in ("lora_plugins_held", "vllm:num_requests_running", "lora_plugins_host_bytes"):
            self.latest[name] = metrics.get(name, 0)
            self.most[name] = max(self.most.get(name, 0), metrics.get(name, 0))


def leased(store: Path) -> set[str]:
    """The digests that some process has leased."""
    found = set()
    for folder in (store / ".leases").iterdir():
        with suppress(FileNotFoundError):  # the last lease has ended meanwhile
            found |= {folder.name for _ in folder.iterdir()}
    return found


# What must be gone, by metric, once everything is unloaded.
GONE = (
    "lora_plugins_held",
    "lora_plugins_host_bytes",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_gpu_loaded_lora_adapters",
    "vllm:num_cpu_loaded_lora_adapters",
    "vllm:lora_adapter_loaded",
)


async def check_nothing_is_left(target: Target, store: Path, journal: Journal) -> dict[str, Any]:
    """After everything was unloaded: nothing is leased, loaded, held, or in flight. Waits a little for the last."""
    found: dict[str, Any] = {}
    async with connect(target.url, LONGEST_CHECK_S) as client:
        for _ in range(30):
            metrics = await metrics_of(client)
            views = (await client.get("/v1/loras")).json()["loras"]
            answer = await client.post("/collective_rpc", json={"method": "get_lora_metrics"})
            workers = answer.json()["results"]
            found = {
                **{name: metrics.get(name, 0.0) for name in GONE},
                "listed": [(view["lora_name"], view["state"]) for view in views if view["state"] != "blocked"],
                "in the workers": sum(worker["adapters"]["registered"] for worker in workers),
                "leases": sorted(leased(store)),
                "temporary files": sorted(path.name for path in store.glob(".tmp/*")),
            }
            if not any(found.values()):
                break
            await asyncio.sleep(1)
    for name, value in found.items():
        if value:
            journal.violation("nothing is left at the end", f"{name}: {value}")
    return {name: value if isinstance(value, float | int) else len(value) for name, value in found.items()}


# Threads of pools come at their first use: asyncio's own (as many as cores, and 4), S3's and the Hub's.
MORE_THREADS, MORE_FILES = 24, 40


def check_counts(processes: Processes, quiet: dict[str, Sample], journal: Journal) -> None:
    """Threads and open files, once all is quiet, against what they were in a quiet moment near the start."""
    for name, samples in processes.samples.items():
        last, first = samples[-1], quiet[name]
        for what, now, before, more in (
            ("threads", last.threads, first.threads, MORE_THREADS),
            ("open files", last.files, first.files, MORE_FILES),
        ):
            if now > before + more:
                journal.violation("no threads or files are left over", f"{name}: {now} {what}, {before} at the start")


# What stands before a line: vLLM's processes, or uvicorn.
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?(ERROR|WARNING|INFO)?:?\s?(\d\d-\d\d \S+ \[\S+\] )?")


# Starlette's, where an error is raised once a stream has begun, and what stands between its traceback and the error's.
_STREAM_HAD_BEGUN = "RuntimeError: Caught handled exception, but response already started."
_IS_CAUSE = "The above exception was the direct cause of the following exception:"


def check_log(log: str, journal: Journal) -> None:
    """No traceback is in a server's log, but for those of refusals: vLLM writes one for a stream that is refused."""
    raised: set[str] = set()
    is_inside, last, cause = False, "", ""
    for line in log.splitlines():
        text = line[_PREFIX.match(line).end() :]
        if text.strip().startswith("Traceback (most recent call last)"):
            is_inside = True
        elif is_inside and text and not text[0].isspace():
            if text != _STREAM_HAD_BEGUN or "[L0" not in cause:
                raised.add(text)
            is_inside, last, cause = False, text, ""
        elif text == _IS_CAUSE:
            cause = last
    for text in sorted(raised):
        if "[L0" not in text:
            journal.violation("no traceback in the log", text[:300])
