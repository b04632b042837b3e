"""Requests wait in vLLM's queue alone: order, priority and waits are those of vLLM without us."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.vllm_patches.engine_core.pausing import pause
from tests.vllm_patches.engine_bed import Clock, Engine, Make, request

STEP_S = 0.05


@dataclass
class World:
    """An engine in virtual time; `waits_s` of the requests that have their first token."""

    engine: Engine
    clock: Clock
    came_at: dict[str, float] = field(default_factory=dict)
    waits_s: dict[str, float] = field(default_factory=dict)
    _seen: int = 0

    def add(self, name: str, lora: int | None, **options: Any) -> None:
        self.engine.add(name, lora, arrival_time=self.clock.now, **options)
        self.came_at[name] = self.clock.now

    def step(self) -> None:
        self.clock.step(self.engine, STEP_S)
        for output in self.engine.outputs[self._seen :]:
            if output.new_token_ids and output.request_id not in self.waits_s:
                self.waits_s[output.request_id] = self.clock.now - self.came_at[output.request_id]
        self._seen = len(self.engine.outputs)


Worlds = Callable[..., World]


@pytest.fixture
def make_world(make_engine: Make, clock: Clock) -> Worlds:
    def make(**config: Any) -> World:
        clock.now = 1000.0
        return World(make_engine(**config), clock)

    return make


def overload(world: World, flood: int | None, adapters: int) -> tuple[float, float]:
    """Adapters with one request each, a second apart, beside a flood that fills all rows.

    Returns the adapters' longest wait, and the flood's median wait, in seconds.
    """
    owed, floods, cold = 60.0, 0, 0
    while len([name for name in world.waits_s if name.startswith("cold")]) < adapters:
        owed += 8.0 * STEP_S
        while owed >= 1:
            owed, floods = owed - 1, floods + 1
            world.add(f"flood-{floods}", flood, tokens=20)
        if cold < adapters and world.clock.now >= 1001.0 + cold:
            cold += 1
            world.add(f"cold-{cold}", cold, tokens=20)
        world.step()
        assert world.clock.now < 1120.0, "an adapter starves"
    cold_s, flood_s = (
        sorted(wait for name, wait in world.waits_s.items() if name.startswith(of)) for of in ("cold", "flood")
    )
    return cold_s[-1], flood_s[len(flood_s) // 2]


@pytest.mark.parametrize("flood", [None, 100], ids=["of the base model", "of a hot adapter"])
def test_under_overload_nobody_waits_longer_than_in_vllm(make_world: Worlds, flood: int | None) -> None:
    stock, ours = (
        overload(make_world(max_loras=2, max_cpu_loras=20, is_instant=False, is_stock=is_stock), flood, 10)
        for is_stock in (True, False)
    )
    assert ours[0] <= 1.1 * stock[0], "an adapter"
    assert ours[1] <= 1.1 * stock[1], "the flood"


@pytest.mark.parametrize("slots", [1, 2])
def test_no_request_drains_adapters_of_a_better_priority(make_world: Worlds, slots: int) -> None:
    waits = []
    for is_stock in (True, False):
        world = make_world(max_loras=slots, max_cpu_loras=8, is_instant=False, policy="priority", is_stock=is_stock)
        for hot in range(1, slots + 1):
            world.add(f"warm-{hot}", hot, tokens=5, priority=0)
        for _ in range(4):
            world.step()
        for number in range(400):
            if number % 10 == 0:
                for hot in range(1, slots + 1):
                    world.add(f"high-{hot}-{number}", hot, tokens=20, priority=0)
            if number == 60:
                world.add("low", 50, tokens=5, priority=10)
            world.step()
        waits.append(max(wait for name, wait in world.waits_s.items() if name.startswith("high")))
        assert "low" not in world.waits_s, "vLLM does not serve it here, and its wait is no test"
    assert waits[1] <= waits[0]


def test_the_low_priority_is_served_once_the_high_have_ended(make_world: Worlds) -> None:
    world = make_world(max_loras=1, max_cpu_loras=8, is_instant=False, policy="priority")
    world.add("high", 1, tokens=20, priority=0)
    world.step()
    world.add("low", 2, tokens=5, priority=10)
    for _ in range(60):
        world.step()
    assert {"high", "low"} <= world.waits_s.keys()


def test_requests_of_resident_adapters_run_in_their_order(make_engine: Make) -> None:
    """Eight rows, and more requests than rows: vLLM takes the first."""
    orders = []
    for is_stock in (True, False):
        engine = make_engine(max_loras=3, max_cpu_loras=3, is_stock=is_stock)
        for number in (1, 2, 3):
            engine.add(f"warm-{number}", number, tokens=1)
        engine.run()
        for number in range(20):
            engine.add(f"r{number:02}", (None, 3, 1, 2)[number % 4], tokens=2)
        before = len(engine.outputs)
        engine.run()
        orders.append(list(dict.fromkeys(output.request_id for output in engine.outputs[before:])))
    assert orders[1] == orders[0]


def test_a_pause_stops_a_request_that_waits_for_its_grammar(make_engine: Make) -> None:
    engine = make_engine()
    scheduler = engine.scheduler
    for number in range(8):
        scheduler.add_request(request(f"base-{number}", tokens=40))
    engine.step()
    waits = request("waits", 1, tokens=3)
    grammar = SimpleNamespace(accept_tokens=lambda *_: True, is_terminated=lambda: False)
    waits.structured_output_request = SimpleNamespace(grammar=grammar, reasoning_ended=True)
    waits.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    scheduler.structured_output_manager.accept_tokens = lambda *_: True
    scheduler.add_request(waits)
    for _ in range(4):
        engine.step()
    pause(scheduler, waits.lora_request.lora_name, PauseMode.KEEP)
    assert scheduler.pauses.paused(waits.lora_request.lora_name).done()
    engine.run()
    assert engine.tokens_of("waits") == []
    scheduler.resume(waits.lora_request.lora_name)
    engine.run()
    assert len(engine.tokens_of("waits")) == 3


def test_a_session_that_its_stale_output_ends_frees_its_slot(make_engine: Make) -> None:
    """VLLM drops a preempted session whose stale output ends its part, as the next part waits already."""
    engine = make_engine(max_loras=1)
    scheduler = engine.scheduler
    if "Async" not in type(scheduler).__name__:
        pytest.skip("only the asynchronous scheduler has stale output")
    session = request("session", 1, tokens=4, resumable=True)
    scheduler.add_request(session)
    scheduler.add_request(request("session", 1, tokens=4, resumable=True))
    while session.num_output_tokens + session.num_output_placeholders < 4:
        engine.step()
    scheduler.running.remove(session)
    scheduler._preempt_request(session, time.monotonic())  # as `schedule` does where blocks are short
    scheduler.add_request(request("other", 2))
    for _ in range(20):
        engine.step()
    assert len(engine.tokens_of("other")) == 3


def test_room_reserved_during_a_load_is_taken_once_loaded(make_world: Worlds) -> None:
    """The loaded adapter runs nothing, and gives way at once to a request of a better priority."""
    world = make_world(max_loras=1, max_cpu_loras=1, policy="priority")
    engine = world.engine
    engine.holds_back = True
    world.add("low", 1, priority=1)
    world.step()
    world.add("high", 2, priority=0)
    for _ in range(40):  # more than the planner's patience
        world.step()
    engine.holds_back = False
    engine.run()
    assert len(engine.tokens_of("high")) == len(engine.tokens_of("low")) == 3


def test_a_hot_adapter_remembers_no_request_that_has_gone(make_engine: Make) -> None:
    """It never runs out of requests, so nobody asks for its place among those that wait."""
    engine = make_engine()
    for number in range(300):
        engine.add(f"hot-{number}", 1)
        engine.step()
    (hot,) = engine.scheduler.planner.state.adapters.values()
    assert hot.is_in_flight
    assert len(hot._orders._heap) < 100


def leaving_world(make_world: Worlds) -> World:
    """The only slot's adapter runs a long request, and leaves for a request of the same priority."""
    world = make_world(max_loras=1, max_cpu_loras=8, policy="priority", is_instant=False)
    world.add("low", 1, tokens=58, priority=1)
    for _ in range(3):
        world.step()
    world.add("waits", 2, priority=1)
    while not world.engine.scheduler.planner.state.leaving:
        world.step()
    return world


def test_a_leaving_adapter_runs_requests_of_a_better_priority(make_world: Worlds) -> None:
    world = leaving_world(make_world)
    world.add("high", 1, priority=0)
    for _ in range(4):
        world.step()
    assert "high" in world.waits_s
    assert "low" in world.engine.scheduler.requests
    assert "waits" not in world.waits_s


def test_a_leaving_adapter_starves_nobody_of_that_priority(make_world: Worlds) -> None:
    world = leaving_world(make_world)
    world.add("other", 3, priority=0)
    for number in range(400):
        if number % 4 == 0:
            world.add(f"high-{number}", 1, tokens=8, priority=0)
        world.step()
    assert world.waits_s["other"] < 6.0
