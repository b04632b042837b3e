"""How the planner admits requests, against vLLM's own order, in virtual time; and what a step of planning costs.

vLLM's order as of 0.30 to 0.33: the waiting queue is scanned in order of arrival, and a request is passed over while
`max_loras` adapters are scheduled and its own is none of them. Adapters are loaded and copied inside the step, which
everybody waits for; `max_cpu_loras` of them stay in host memory, the least recently used goes. With the planner, loads
and copies run beside the steps.
Prints Markdown and keeps the raw figures in benchmarks/results/admission.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import mean, quantiles
from typing import Any

from benchmarks.record import keep
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.planner import TIME_SLICE_S, Planner
from lora_plugins.scheduler.policies import make_policy
from tests.scheduler.simulated import Request, SimulatedEngine, SimulatedWorkers, spec

MAX_ROWS = 64  # --max-num-seqs
SEED = 20260101


@dataclass(frozen=True)
class Timings:
    """What was measured on a machine."""

    step_s: float = 0.030
    row_s: float = 0.002
    prefill_s: float = 0.0
    load_s: float = 0.05
    load_s_per_gb: float = 1.0
    copy_s: float = 0.015

    def step(self, rows: int, new: int) -> float:
        return self.step_s + self.row_s * rows + self.prefill_s * new

    def load(self, size_bytes: int) -> float:
        return self.load_s + self.load_s_per_gb * size_bytes / 1e9


@dataclass(frozen=True)
class Case:
    """`clients` for a closed loop, in which each asks again as soon as it is answered; else `a_second` requests."""

    name: str
    adapters: int
    slots: int
    in_host: int
    tokens: int
    zipf: float
    timings: Timings
    requests: int
    a_second: float = 0.0
    clients: int = 0
    size_bytes: int = 40_000_000
    is_warm: bool = False

    def choices(self) -> list[int]:
        weights = list(accumulate((rank + 1) ** -self.zipf for rank in range(self.adapters)))
        return random.Random(SEED).choices(range(1, self.adapters + 1), cum_weights=weights, k=self.requests)

    def lengths(self) -> list[int]:
        """Half to one and a half times as many tokens, so that requests do not end in step."""
        return random.Random(SEED + 2).choices(range(self.tokens // 2, self.tokens * 3 // 2 + 1), k=self.requests)

    def arrivals(self) -> list[float]:
        rng = random.Random(SEED + 1)
        return list(accumulate(rng.expovariate(self.a_second) for _ in range(self.requests)))


@dataclass(frozen=True)
class Outcome:
    hit_rate: float
    mean_s: float
    p99_s: float
    longest_s: float
    requests_per_s: float
    copies: int

    def cells(self) -> str:
        waits = f"{self.mean_s:.2f} | {self.p99_s:.2f} | {self.longest_s:.1f}"
        return f"{self.hit_rate:.1%} | {waits} | {self.requests_per_s:.2f} | {self.copies}"


CELLS = "host-cache hits | mean to the first token, s | p99 | longest | requests/s | slots written"


def outcome(case: Case, done: list[Request], loads: int, copies: int, took_s: float) -> Outcome:
    waits = [it.first_token_at - it.arrived_at for it in done if it.first_token_at is not None]
    p99 = quantiles(waits, n=100)[-1]
    return Outcome(1 - loads / len(done), mean(waits), p99, max(waits), len(done) / took_s, copies)


def drive(case: Case, engine: Any) -> Outcome:
    """Bring the requests of a case to an engine, ours or vLLM's."""
    choices, lengths = iter(case.choices()), iter(case.lengths())
    specs = {key: spec(key, case.size_bytes) for key in range(1, case.adapters + 1)}
    if case.clients:
        for _ in range(case.clients):
            engine.submit(specs[next(choices)], next(lengths))
        while True:
            before = len(engine.done)
            engine.step()
            for _ in engine.done[before:]:
                if (key := next(choices, None)) is not None:
                    engine.submit(specs[key], next(lengths))
            if len(engine.done) == case.requests:
                break
    else:
        arrivals = case.arrivals()
        at = 0
        while len(engine.done) < case.requests:
            if not engine.is_busy and at < len(arrivals):
                engine.now = max(engine.now, arrivals[at])
            while at < len(arrivals) and arrivals[at] <= engine.now:
                engine.submit(specs[next(choices)], next(lengths)).arrived_at = arrivals[at]
                at += 1
            engine.step()
    return outcome(case, engine.done, engine.loads, engine.copies, engine.now)


class Ours(SimulatedEngine):
    def __init__(
        self,
        case: Case,
        time_slice_s: float = TIME_SLICE_S,
        spare: int = 0,
        *,
        is_instant: bool = True,
    ) -> None:
        cache = HostCache(None, case.in_host, make_policy("lru"))
        planner = Planner(case.slots, case.slots + spare, cache, time_slice_s=time_slice_s)
        self.loads = 0

        def load_s(it: Any) -> float:
            return case.timings.load(it.size_bytes)

        workers = SimulatedWorkers(load_s, lambda _: case.timings.copy_s, is_instant=lambda _: is_instant)
        super().__init__(planner, workers, step_s=case.timings.step, max_rows=MAX_ROWS)
        self.is_watched = False
        self.done: list[Request] = []
        if case.is_warm:
            for key in range(1, case.adapters + 1):
                planner.load(spec(key, case.size_bytes), 0.0)
            while planner.has_work:
                self.step()
            self.now = 0.0
            planner.stats.load_seconds.counts = [0] * len(planner.stats.load_seconds.counts)

    def _end(self, requests: list[Request]) -> None:
        super()._end(requests)
        self.done += requests
        self.loads = sum(self.planner.stats.load_seconds.counts)

    @property
    def copies(self) -> int:
        return self.workers.activations


class Vllm:
    """vLLM's scheduler and its LRU of adapters, as far as they decide who waits."""

    def __init__(self, case: Case) -> None:
        self.now, self.loads, self.copies = 0.0, 0, 0
        self.done: list[Request] = []
        self._case = case
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: list[Request] = []
        self._count = 0
        keys = range(1, case.adapters + 1) if case.is_warm else ()
        self._host: OrderedDict[int, None] = OrderedDict.fromkeys(keys)
        self._slots: OrderedDict[int, None] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, of: Any, tokens: int) -> Request:
        self._count += 1
        request = Request(f"r{self._count}", of, tokens, arrived_at=self.now)
        self._waiting[request.id] = request
        return request

    def step(self) -> None:
        scheduled = {request.spec.engine_id for request in self._running}
        new = []
        for request in self._waiting.values():
            if len(self._running) + len(new) >= MAX_ROWS:
                break
            if request.spec.engine_id in scheduled or len(scheduled) < self._case.slots:
                scheduled.add(request.spec.engine_id)
                new.append(request)
        for request in new:
            del self._waiting[request.id]
        self._running += new
        timings = self._case.timings
        duration = timings.step(len(self._running), len(new))
        for key in scheduled:
            duration += self._use(self._host, key, self._case.in_host, scheduled, timings.load(self._case.size_bytes))
            duration += self._use(self._slots, key, self._case.slots, scheduled, timings.copy_s)
        self.now += duration
        for request in self._running:
            request.first_token_at = request.first_token_at or self.now
            request.tokens -= 1
        self.done += (request for request in self._running if not request.tokens)
        self._running = [request for request in self._running if request.tokens]

    def _use(self, tier: OrderedDict[int, None], key: int, size: int, scheduled: set[int], cost_s: float) -> float:
        if key in tier:
            tier.move_to_end(key)
            return 0.0
        if len(tier) >= size:
            del tier[next(other for other in tier if other not in scheduled)]
        tier[key] = None
        self.loads += tier is self._host
        self.copies += tier is self._slots
        return cost_s


def many_adapters(timings: Timings, requests: int) -> Iterator[Case]:
    """80 % of what vLLM's order answers to twelve clients in a closed loop, and twice as much as it answers."""
    common = {"adapters": 1000, "slots": 8, "in_host": 100, "tokens": 32, "zipf": 1.0, "timings": timings}
    loop = Case("", **common, requests=requests, clients=12)
    full = drive(loop, Vllm(loop))
    for name, share in (("80 % busy", 0.8), ("overload", 2.0)):
        yield Case(name, **common, requests=requests, a_second=share * full.requests_per_s)
    yield Case("200 clients", **common, requests=requests, clients=200)


def closed_loops(requests: int) -> Iterator[Case]:
    timings = Timings(step_s=0.040, row_s=0.003, prefill_s=0.010)
    for name, zipf in (("closed loop, uniform", 0.0), ("closed loop, Zipf 1.0", 1.0)):
        yield Case(name, 16, 4, 16, 8, zipf, timings, requests, clients=12, is_warm=True)


def planning_us(adapters: int, held: int = 1000, steps: int = 4000) -> tuple[float, float, float]:
    """Mean, median and 99th percentile of what the planner takes of a step's time: notifications and plan."""
    case = Case("", adapters, 8, 100, 32, 0.0, Timings(), 1)
    engine = Ours(case)
    spent = [0.0]
    for name in ("arrived", "finished", "reported", "carried_out", "plan"):
        setattr(engine.planner, name, _timed(getattr(engine.planner, name), spent))
    rng = random.Random(SEED)
    specs = [spec(key, case.size_bytes) for key in range(1, adapters + 1)]
    taken = []
    for step in range(steps):
        while engine.planner.admission.held_count < held:
            engine.submit(rng.choice(specs), rng.randint(1, 64))
        if step == 0:
            spent[0] = 0.0
        engine.step()
        taken.append(spent[0] * 1e6)
        spent[0] = 0.0
    percentiles = quantiles(taken[100:], n=100)
    return mean(taken[100:]), percentiles[49], percentiles[98]


def _timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        started = time.thread_time()
        try:
            return function(*args, **options)
        finally:
            spent[0] += time.thread_time() - started

    return timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in asdict(Timings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--variants", action="store_true", help="other time slices")
    options = vars(parser.parse_args())
    requests, with_variants = options.pop("requests"), options.pop("variants")
    rows: list[dict[str, object]] = []

    def show(case: Case, who: str, engine: Any) -> None:
        found = drive(case, engine)
        rows.append({"case": case.name, "who": who, "a_second": case.a_second, **asdict(found)})
        print(f"| {case.name} | {who} | {found.cells()} |", flush=True)

    print(f"| load | order | {CELLS} |\n" + "|---" * 8 + "|")
    cases = [*many_adapters(Timings(**options), requests), *closed_loops(requests)]
    for case in cases:
        show(case, "vLLM's", Vllm(case))
        show(case, "planner, activation instant", Ours(case))
        show(case, "planner, copies beside the step", Ours(case, is_instant=False))
        show(case, "planner, copies beside the step, one slot more", Ours(case, spare=1, is_instant=False))
        for time_slice_s in (0.25, 0.5, 1.0, 2.0) if with_variants else ():
            show(case, f"planner, time slice {time_slice_s:g} s", Ours(case, time_slice_s))
    print("\n| 1,000 held requests over | planning a step, mean | median | p99 |\n|---|---|---|---|")
    for adapters in (1000, 20):
        mean_us, median_us, p99_us = planning_us(adapters)
        found = {"mean_us": mean_us, "median_us": median_us, "p99_us": p99_us}
        rows.append({"case": "planning", "adapters": adapters, **found})
        print(f"| {adapters:,} adapters | " + " | ".join(f"{us:.0f} µs" for us in found.values()) + " |")
    print(f"\nRaw: {keep('admission', rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
