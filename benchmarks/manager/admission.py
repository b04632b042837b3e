"""Figure of docs/benchmarks/manager.md#more-adapters-than-slots, for R21.

More adapters than slots, all in host memory: vLLM's manager against ours, on servers that are up at once.

Both get the same requests in the same order, in stretches that alternate. A stretch begins with a second that does not
count; then the requests that are answered in it are counted, one that began before it or ends after it in part. Waits
are those of all its requests. Before each stretch nothing is asked for longer than a second: a reader of vLLM's message
queue spins for so long, on the core of the other server's worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.manager import bed
from benchmarks.manager.arms import Arm, servers
from benchmarks.manager.client import load, stream
from benchmarks.manager.scenarios import SERVINGS, Serving, Traffic, traffic_of

# Who is compared with whom: slots that are pointers, and slots that are copied to in both.
PAIRS = {"pointers": ("vllm+kernels", "ours+kernels"), "copies": ("vllm", "ours")}
RESULT = "manager_admission"
PROMPT_TOKENS = 4
RAMP_S, REST_S = 1.0, 1.1


@dataclass(frozen=True)
class Answered:
    """One request; times in seconds since its stretch began."""

    adapter: int
    sent: float
    first: float
    end: float

    def share(self, began: float, ended: float) -> float:
        """Which part of its answer came between these."""
        if self.first == self.end:
            return float(began <= self.end < ended)
        return max(0.0, min(self.end, ended) - max(self.first, began)) / (self.end - self.first)


def measure(
    names: Sequence[str], slots: Sequence[str], traffic: str, *, stretches: int, stretch_s: float
) -> list[dict]:
    """Rows of the servings with these names; `traffic`: only what has this in its name."""
    rows: list[dict] = []
    for serving in SERVINGS:
        wanted = [one for one in traffic_of(serving) if traffic in one.name]
        for kind in slots if serving.name in names and wanted else ():
            with _both(serving, PAIRS[kind]) as (running, adapters):
                rows += _measure(serving, kind, wanted, running, adapters, stretches, stretch_s)
    return rows


@contextlib.contextmanager
def _both(serving: Serving, arms: Sequence[str]) -> Iterator[tuple[list[Arm], list[Path]]]:
    """Two servers with all adapters in host memory, and the adapters."""
    base = bed.base_model(serving.hidden, serving.layers)
    source = bed.adapter(base, serving.rank)
    arguments = (
        *("--max-lora-rank", str(serving.rank), "--max-loras", str(serving.slots)),
        *("--max-cpu-loras", str(serving.adapters + 2), "--max-num-seqs", "64"),
        *("--stream-interval", "1000"),  # the first token, and all others with the last one: clients cost less
    )
    with tempfile.TemporaryDirectory(dir=bed.CACHE) as home:
        # Files of their own: what is read by mapping them would be shared between links, and count once.
        adapters = [Path(shutil.copytree(source, Path(home) / f"a{number}")) for number in range(serving.adapters)]
        with servers(arms, base, Path(home), arguments) as running:
            for arm in running:
                asyncio.run(_load_all(arm, adapters))
            yield running, adapters


async def _load_all(arm: Arm, adapters: list[Path]) -> None:
    for directory in adapters:
        await load(arm.port, directory.name, str(directory))
        await stream(arm.port, directory.name, 1, [], prompt=[40])


def _measure(
    serving: Serving,
    kind: str,
    wanted: list[Traffic],
    running: list[Arm],
    adapters: list[Path],
    stretches: int,
    stretch_s: float,
) -> list[dict]:
    rows: list[dict] = []
    for arm in running:
        asyncio.run(stretch(arm, adapters, serving, wanted[-1], -1, 2.0))
    memory = {arm.name: worker_memory(arm) for arm in running}
    for number in range(stretches):
        for at, traffic in enumerate(wanted):
            for turn in range(len(running)):
                arm = running[(number + at + turn) % len(running)]
                time.sleep(REST_S)
                answered = asyncio.run(stretch(arm, adapters, serving, traffic, number, stretch_s))
                row = {
                    "serving": serving.name,
                    "slots": kind,
                    "traffic": traffic.name,
                    "arm": arm.name,
                    "stretch": number,
                    "requests_per_s": requests_per_s(answered, stretch_s),
                    "worker_memory": memory[arm.name],
                    # Columns of all requests, one text each, so that the file stays short.
                    "adapter": " ".join(str(one.adapter) for one in answered),
                    "first_ms": " ".join(f"{(one.first - one.sent) * 1e3:.1f}" for one in answered),
                    "whole_ms": " ".join(f"{(one.end - one.sent) * 1e3:.1f}" for one in answered),
                }
                rows.append(row)
                print(f"{serving.name}, {kind}, {traffic.name}, {arm.name}: {row['requests_per_s']}/s", flush=True)
    for row in rows:
        row["worker_memory_at_the_end"] = worker_memory(next(arm for arm in running if arm.name == row["arm"]))
    return rows


async def stretch(
    arm: Arm, adapters: list[Path], serving: Serving, traffic: Traffic, seed: int, stretch_s: float
) -> list[Answered]:
    """What was answered to the clients of a stretch; `seed` gives what they ask for."""
    answered: list[Answered] = []
    shared = traffic.draws(serving.adapters, serving.tokens, seed)
    began = time.perf_counter()

    async def client(number: int) -> None:
        draws = traffic.draws(serving.adapters, serving.tokens, seed, number) if traffic.owned else shared
        while (sent := time.perf_counter() - began) < stretch_s:
            adapter, tokens = next(draws)
            times: list[float] = []
            prompt = [40 + (number * 7 + len(answered) + place) % 400 for place in range(PROMPT_TOKENS)]
            await stream(arm.port, adapters[adapter].name, tokens, times, prompt=prompt)
            answered.append(Answered(adapter, sent, times[0] - began, times[-1] - began))

    await asyncio.gather(*(client(number) for number in range(traffic.clients)))
    return answered


def requests_per_s(answered: Sequence[Answered], stretch_s: float) -> float:
    """How many were answered a second, after the first one."""
    return round(sum(one.share(RAMP_S, stretch_s) for one in answered) / (stretch_s - RAMP_S), 3)


def worker_memory(arm: Arm) -> dict[str, int]:
    """Bytes of the server's largest process, its worker."""
    children = psutil.Process(arm.server.process.pid).children(recursive=True)
    worker = max(children, key=lambda process: process.memory_info().rss)
    found = {}
    for line in Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name] = int(value.split()[0]) * 1024
    return {"pss_bytes": found["Pss"], "rss_bytes": found["Rss"], "anonymous_bytes": found["Anonymous"]}
