"""Whoever waits is served within the time that manager.md states (the longest wait), under load that never ends."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_plugins.scheduler.state import MAX_LOADS
from tests.repetitions import times
from tests.scheduler.simulated import Request, SimulatedEngine, SimulatedWorkers, engine_with, make_planner, spec

LOAD_UNTIL_S = 20.0


@dataclass(frozen=True)
class Traffic:
    """More than the engine can serve, for twenty seconds; then none."""

    seed: int
    slots: int
    pointed: int
    is_instant: bool
    adapters: int
    max_adapters: int
    max_bytes: int | None
    patience_s: float
    load_s: float
    most_tokens: int
    a_second: float
    are_aborted: bool = False
    grow: float = 1.0

    @property
    def has_room_for_all(self) -> bool:
        return self.max_bytes is None and self.max_adapters >= self.adapters


def serve(traffic: Traffic, until_s: float = LOAD_UNTIL_S, never_fits: bool = False) -> SimulatedEngine:
    rng = random.Random(traffic.seed)
    duration = {key: traffic.load_s * rng.random() for key in range(100)}
    sizes = {key: rng.choice([20, 50, 100]) for key in range(100)}
    grown = {key: rng.choice([1.0, traffic.grow]) for key in range(100)}
    engine = SimulatedEngine(
        make_planner(
            traffic.slots,
            traffic.pointed,
            traffic.max_bytes,
            traffic.max_adapters,
            patience_s=traffic.patience_s,
        ),
        SimulatedWorkers(
            load_s=lambda it: duration[it.engine_id],
            activate_s=lambda _: 0.015,
            size_bytes=lambda it: int(it.size_bytes * grown[it.engine_id]),
            is_instant=lambda _: traffic.is_instant,
        ),
    )
    engine.counts_overtakers = True
    while engine.now < until_s:
        engine.is_watched = engine.steps % 8 == 0  # the machine looks after each step
        while rng.random() < traffic.a_second * 0.05 / (1 + traffic.a_second * 0.05):
            key = min(int(rng.paretovariate(0.8)), traffic.adapters) - 1
            engine.submit(spec(key, sizes[key]), rng.randint(1, traffic.most_tokens))
        refused = [engine.submit(spec(99, 10_000))] if never_fits else []
        if traffic.are_aborted and rng.random() < 0.1 and engine.running:
            engine.abort(rng.choice(list(engine.running.values())))
        engine.step()
        assert all(request.refusal is not None for request in refused)
    engine.finish()
    return engine


def longest_allowed_s(engine: SimulatedEngine, traffic: Traffic, request: Request, run: float) -> float:
    """What docs/explanation/manager.md states, of durations that the run showed; `run`: the longest request's."""
    step = engine.longest_step_s
    load = engine.workers.longest_load_s + 2 * step
    activation = 0.0 if traffic.is_instant else engine.workers.longest_activation_s + 2 * step
    patience = max(traffic.patience_s, 2 * run) + 2 * step
    before = (request.overtakers + 1) * (1 if traffic.grow == 1.0 else 2)  # who turns out larger comes twice
    if traffic.has_room_for_all:
        loads = math.ceil(before / MAX_LOADS) + 1
        slots = traffic.pointed if traffic.is_instant and traffic.pointed else traffic.slots
        slot = 2 * patience + run + activation
        return run + loads * load + math.ceil(before / max(1, slots - 1)) * slot
    return run + before * (load + activation + 3 * patience + 2 * run)


TRAFFIC = st.builds(
    Traffic,
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 4),
    pointed=st.sampled_from([0, 0, 1, 3]),
    is_instant=st.booleans(),
    adapters=st.integers(2, 20),
    max_adapters=st.sampled_from([1, 2, 4, 100]),
    max_bytes=st.sampled_from([None, 100, 250]),
    patience_s=st.sampled_from([0.25, 1.0]),
    load_s=st.sampled_from([0.0, 0.2, 1.0]),
    most_tokens=st.sampled_from([1, 10, 60]),
    a_second=st.sampled_from([5.0, 20.0, 60.0]),
    are_aborted=st.booleans(),
    grow=st.sampled_from([1.0, 1.0, 1.6]),
)


@given(traffic=TRAFFIC)
@settings(max_examples=times(100, short=25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_everyone_is_served_within_the_stated_bound(traffic: Traffic) -> None:
    engine = serve(traffic)
    run = max((it.ended_at - it.began_at for it in engine.requests if it.began_at is not None), default=0.0)
    for request in engine.requests:
        if request.refusal is not None:
            assert traffic.grow > 1.0  # it turned out larger than the budget
            continue
        assert request.began_at is not None
        allowed = longest_allowed_s(engine, traffic, request, run)
        assert request.wait_s <= allowed, (request.wait_s, allowed, request.overtakers, request)


@given(traffic=TRAFFIC)
@settings(max_examples=times(20, short=10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_refused_requests_delay_no_others(traffic: Traffic) -> None:
    if traffic.max_bytes is None:
        traffic = replace(traffic, max_bytes=250)
    alone, beside = serve(traffic, until_s=5), serve(traffic, until_s=5, never_fits=True)
    waits = [
        [request.wait_s for request in engine.requests if request.spec.engine_id != 99 and request.refusal is None]
        for engine in (alone, beside)
    ]
    assert waits[0] == waits[1]


def test_an_adapter_with_reserved_room_is_not_passed_over() -> None:
    engine = engine_with(slots=1, max_bytes=100)
    engine.submit(spec(9, 100), tokens=20)
    engine.run(0.1)
    engine.submit(spec(7, 100))
    engine.run(0.7)
    engine.submit(spec(5, 100), priority=-1)  # goes first, and does not fit beside it
    engine.finish(20)
