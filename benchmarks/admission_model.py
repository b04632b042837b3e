"""Two engines in virtual time, one with vLLM's order of admission and one with the planner, and clients that ask them.

vLLM's order as of 0.30 to 0.33: the waiting queue is scanned in order of arrival, and a request is passed over while
`max_loras` adapters are scheduled and its own is none of them. Adapters are loaded and copied inside the step, which
everybody waits for; `max_cpu_loras` of them stay in host memory, the least recently used goes. With the planner, loads
and copies run beside the steps, which they make slower.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.manager.scenarios import Traffic
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import Load, Slots
from lora_plugins.scheduler.planner import Planner, StepPlan
from lora_plugins.scheduler.policies import make_policy
from tests.scheduler.simulated import Request, SimulatedEngine, SimulatedWorkers, spec

MAX_ROWS = 64  # --max-num-seqs
WARM_UP = 0.1  # of the time, which does not count
SEED = 20260101


@dataclass(frozen=True)
class Timings:
    """What a machine takes.

    Attributes:
        step_s: a step with no row. row_s, adapter_s, prefill_s: more for each row, adapter of the batch, new request.
        copy_s: writing a slot. load_s: loading an adapter.
        slowed: the part by which a step is slower while something is loaded or copied beside it.
        think_s: how long clients take on average to ask again.
        is_async: requests are seen a step later, as with asynchronous scheduling.
    """

    step_s: float = 0.030
    row_s: float = 0.002
    adapter_s: float = 0.001
    prefill_s: float = 0.002
    copy_s: float = 0.015
    load_s: float = 0.09
    slowed: float = 0.15
    think_s: float = 0.008
    is_async: bool = False

    def step(self, rows: int, adapters: int, new: int, *, is_beside: bool) -> float:
        took_s = self.step_s + self.row_s * rows + self.adapter_s * adapters + self.prefill_s * new
        return took_s * (1 + self.slowed * is_beside)


@dataclass(frozen=True)
class Case:
    """`a_second`: so many requests, whatever becomes of them; else the traffic's clients ask in a closed loop.

    Attributes:
        is_pointed: activating costs the planner nothing, and all that is in host memory may run; else `slots` are
            copied to. vLLM's order has `slots` that are copied to in both cases.
        in_host: adapters that host memory holds; where all fit, they are loaded before the first request.
    """

    name: str
    adapters: int
    slots: int
    in_host: int
    tokens: int
    traffic: Traffic
    timings: Timings
    is_pointed: bool = True
    a_second: float = 0.0
    seconds: float = 300.0


def planner_of(case: Case, patience_s: float = 1.0) -> Planner:
    """The one place that says how a planner is made."""
    slots = Slots(0, case.in_host) if case.is_pointed else Slots(case.slots)
    return Planner(slots, HostCache(None, case.in_host, make_policy("lru")), patience_s=patience_s)


class Ours(SimulatedEngine):
    """The planner, with workers that load and copy beside the steps."""

    def __init__(self, case: Case, patience_s: float = 1.0) -> None:
        timings = case.timings
        workers = SimulatedWorkers(
            lambda _: timings.load_s, lambda _: timings.copy_s, is_instant=lambda _: case.is_pointed
        )
        super().__init__(planner_of(case, patience_s), workers, step_s=self._took_s, max_rows=MAX_ROWS)
        self.is_watched = False
        self.loads = 0
        self.done: list[Request] = []
        self._timings = timings
        if case.in_host >= case.adapters:
            for key in range(1, case.adapters + 1):
                self.submit(spec(key), 1)
            self.run_until_idle()
            self.now, self.loads, self.workers.activations = 0.0, 0, 0
            self.done.clear()

    @property
    def copies(self) -> int:
        return self.workers.activations

    def step(self) -> StepPlan:
        ran = list(self.running.values())
        plan = super().step()
        self.done += (one for one in (*ran, *self.began) if one.ended_at is not None)
        self.loads += sum(isinstance(command, Load) for command in plan.commands)
        return plan

    def _took_s(self, rows: int, new: int) -> float:
        adapters = len({request.spec.engine_id for request in self.running.values()})
        is_beside = bool(self.workers.loading or self.workers.writing)
        return self._timings.step(rows, adapters, new, is_beside=is_beside)


class Vllm:
    """vLLM's scheduler and its LRU of adapters, as far as they decide who waits."""

    def __init__(self, case: Case) -> None:
        self.now, self.loads, self.copies = 0.0, 0, 0
        self.done: list[Request] = []
        self._case = case
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: list[Request] = []
        self._numbers = count()
        keys = range(1, case.adapters + 1) if case.in_host >= case.adapters else ()
        self._host: OrderedDict[int, None] = OrderedDict.fromkeys(keys)
        self._slots: OrderedDict[int, None] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, of: Any, tokens: int) -> Request:
        request = Request(f"r{next(self._numbers)}", of, tokens, arrived_at=self.now)
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
        duration = timings.step(len(self._running), len(scheduled), len(new), is_beside=False)
        for key in scheduled:
            duration += self._use(self._host, key, self._case.in_host, scheduled, timings.load_s)
            duration += self._use(self._slots, key, self._case.slots, scheduled, timings.copy_s)
        self.now += duration
        for request in self._running:
            request.first_token_at = request.first_token_at or self.now
            request.tokens -= 1
            if not request.tokens:
                request.ended_at = self.now
                self.done.append(request)
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


@dataclass(frozen=True)
class Outcome:
    """Seconds; of requests that ended after the warm-up. The most asked adapter's whole requests, the least asked
    adapters' first tokens; where all are asked for alike, both are of all."""

    requests_per_s: float
    mean_first_s: float
    hot_p50_s: float
    hot_p99_s: float
    least_p99_s: float
    longest_s: float
    hit_rate: float
    copies: int
    still_waiting: int


@dataclass(order=True)
class _Arrival:
    at: float
    client: int
    adapter: int = field(compare=False)
    tokens: int = field(compare=False)


def drive(case: Case, engine: Ours | Vllm) -> Outcome:
    """Bring the requests of a case to an engine for so many seconds."""
    traffic, timings, rng = case.traffic, case.timings, random.Random(SEED)
    clients = 1 if case.a_second else traffic.clients
    draws = [traffic.draws(case.adapters, case.tokens, SEED, client) for client in range(clients)]
    specs = {key: spec(key, 40_000_000) for key in range(1, case.adapters + 1)}
    asked_by: dict[str, int] = {}
    submitted: list[Request] = []
    arrivals: list[_Arrival] = []
    late: list[_Arrival] = []

    def ask(client: int, at: float) -> None:
        adapter, tokens = next(draws[client if traffic.owned else 0])
        heappush(arrivals, _Arrival(at, client, adapter + 1, tokens))

    for client in range(clients):
        ask(client, client * 0.001)
    while engine.now < case.seconds:
        if not engine.is_busy and not late:
            engine.now = max(engine.now, arrivals[0].at)
        come: list[_Arrival] = []
        while arrivals and arrivals[0].at <= engine.now:
            come.append(one := heappop(arrivals))
            if case.a_second:
                ask(0, one.at + rng.expovariate(case.a_second))
        if timings.is_async and engine.is_busy:
            come, late = late, come
        elif late:
            come, late = [*late, *come], []
        for one in come:
            request = engine.submit(specs[one.adapter], one.tokens)
            request.arrived_at = one.at
            submitted.append(request)
            asked_by[request.id] = one.client
        before = len(engine.done)
        engine.step()
        for request in engine.done[before:] if not case.a_second else ():
            ask(asked_by[request.id], engine.now + rng.expovariate(1 / timings.think_s))
    return _outcome(case, engine, submitted)


def _outcome(case: Case, engine: Ours | Vllm, submitted: list[Request]) -> Outcome:
    began = WARM_UP * case.seconds
    ended = [one for one in submitted if one.ended_at is not None and began <= one.ended_at < case.seconds]
    hot = {key + 1 for key in case.traffic.most_asked()}
    least = {key + 1 for key in case.traffic.least_asked(case.adapters)}
    first = {one.id: (one.first_token_at or engine.now) - one.arrived_at for one in submitted}
    whole = [one.ended_at - one.arrived_at for one in ended if one.ended_at and (not hot or one.spec.engine_id in hot)]
    of_least = [first[one.id] for one in ended if one.spec.engine_id in least]
    stuck = [first[one.id] for one in submitted if one.first_token_at is None and one.spec.engine_id in least]
    return Outcome(
        requests_per_s=len(ended) / (case.seconds - began),
        mean_first_s=mean(first[one.id] for one in ended) if ended else math.nan,
        hot_p50_s=_percentile(whole, 50),
        hot_p99_s=_percentile(whole, 99),
        least_p99_s=_percentile(of_least, 99),
        longest_s=max([*of_least, *stuck, 0.0]),
        hit_rate=1 - engine.loads / len(submitted),
        copies=engine.copies,
        still_waiting=sum(one.first_token_at is None for one in submitted),
    )


def _percentile(times_s: list[float], percent: int) -> float:
    return float(np.percentile(times_s, percent)) if times_s else math.nan  # none ended in this time


def twice(case: Case) -> tuple[Outcome, Outcome]:
    """vLLM's order and the planner."""
    return drive(case, Vllm(case)), drive(case, Ours(case))


def busy(case: Case, share: float) -> Case:
    """The same in an open loop, with a share of what vLLM's order answers to 12 clients."""
    closed = replace(case, traffic=replace(case.traffic, clients=12), a_second=0.0)
    return replace(case, a_second=share * drive(closed, Vllm(closed)).requests_per_s)
