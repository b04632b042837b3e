"""Generations that replace one another: which one a name stands for, what they take, and what becomes of slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_plugins.errors import AdapterNotFound, InvalidAdapter
from lora_plugins.scheduler.messages import Change, Load
from tests.scheduler.simulated import (
    Pause,
    Request,
    SimulatedEngine,
    SimulatedWorkers,
    engine_with,
    make_planner,
    place_at_end,
    spec,
)


def moved(engine: SimulatedEngine, path: str, **more):
    return engine.planner.load(replace(spec(1), path=path), engine.now, moves=True, **more)


@pytest.mark.parametrize("is_instant", [True, False])
def test_add_lora_in_flight_takes_no_second_slot(is_instant: bool) -> None:
    """EngineCore.add_lora passes wants_slot=True: the new generation gets the free slot, then is moved."""
    engine = engine_with(is_instant, slots=2, max_adapters=4)
    old = engine.submit(1, tokens=100)
    engine.run(1)
    for number in range(3):
        load = moved(engine, f"/new{number}", wants_slot=True)
        engine.run(0.5)
        assert load.done()
    assert old.ended_at is None
    state = engine.planner.state
    assert {it.residency for pool in (state.copied, state.pointed) for it in pool.owners} == {"loaded"}


@pytest.mark.parametrize("is_instant", [True, False])
def test_refresh_in_flight_of_a_pinned_adapter(is_instant: bool) -> None:
    """lifecycle.refresh(moves=True), wants_slot=False; the pin's own call takes the second slot."""
    engine = engine_with(is_instant, slots=3, max_adapters=4)
    engine.planner.pin(spec(1), engine.now)
    engine.run(1)
    engine.submit(1, tokens=100)
    engine.run(1)
    load = moved(engine, "/new")
    engine.run(1)
    assert load.done()
    state = engine.planner.state
    assert {it.residency for pool in (state.copied, state.pointed) for it in pool.owners} == {"loaded"}


def test_a_move_makes_no_copy_of_its_own() -> None:
    """As on a GPU, where a copy takes a job: its report comes after the move."""
    engine = engine_with(False, slots=2, max_adapters=4)
    engine.workers.activate_s = lambda _: 0.5
    engine.submit(1, tokens=100)
    engine.run(2)
    load = moved(engine, "/new", wants_slot=True)
    engine.run(2)
    assert load.done()


def test_a_move_leaves_the_other_slots_to_others() -> None:
    engine = engine_with(True, slots=2, max_adapters=4)
    engine.submit(1, tokens=200)
    engine.run(1)
    moved(engine, "/new", wants_slot=True)
    engine.run(0.5)
    other = engine.submit(2, tokens=2)
    engine.run(5)
    assert other.ended_at is not None, "a slot is free, since one of two runs"


def test_a_given_adapter_is_replaced_in_its_one_place() -> None:
    """vLLM's default (max_loras = max_cpu_loras = 1); a trainer gives the next weights in the place of the last."""
    engine = engine_with(True, slots=1, max_adapters=1)
    first = engine.planner.given([Change(1, replace(spec(1), given=1))], engine.now)
    engine.run(1)
    assert first.exception(timeout=0) is None
    second = engine.planner.given([Change(1, replace(spec(1), given=1))], engine.now)
    engine.run(1)
    assert second.exception(timeout=0) is None


def test_true_means_done_when_the_next_version_is_broken() -> None:
    engine = engine_with(slots=2, max_adapters=4)
    engine.workers.fails = lambda command: isinstance(command, Load) and command.spec.path == "/v3"
    engine.planner.load(replace(spec(1), path="/v1"), engine.now)
    engine.run(1)
    second = engine.planner.load(replace(spec(1), path="/v2"), engine.now)
    third = engine.planner.load(replace(spec(1), path="/v3"), engine.now)
    engine.run(1)
    assert second.exception(timeout=0) is None
    assert isinstance(third.exception(timeout=0), InvalidAdapter)
    assert engine.planner.state.current[1].spec.path == "/v2"


def test_a_load_without_moves_takes_no_move_back() -> None:
    """pin_lora (or prefetch) while the version that is to move is being loaded."""
    engine = engine_with(slots=3, max_adapters=4)
    old = engine.submit(1, tokens=100)
    engine.run(1)
    load = moved(engine, "/new")
    engine.planner.load(replace(spec(1), path="/new"), engine.now, wants_slot=True)
    engine.run(1)
    assert load.done()
    assert old.ended_at is None
    assert [it.path for it in engine.workers.host.values()] == ["/new"]


def test_all_versions_that_turn_out_too_large_are_refused() -> None:
    """They are larger than their files say: what waits for the second waits for the first once that is known."""
    workers = SimulatedWorkers(size_bytes=lambda it: it.size_bytes * (2 if it.engine_id == 1 else 1))
    engine = SimulatedEngine(make_planner(slots=1, max_bytes=100, max_adapters=6), workers)
    refused = [engine.submit(spec(1, 100), tokens=1, is_other=is_other) for is_other in (True, True, False)]
    later = engine.submit(spec(2, 50), tokens=1)
    engine.run_until_idle(100)
    assert ([request.refusal.code for request in refused], later.refusal) == (["L004"] * 3, None)


def test_a_version_between_two_moves_nothing_any_more() -> None:
    engine = engine_with(slots=2, max_adapters=3)
    engine.planner.pin(spec(1), engine.now)
    load = engine.planner.load(spec(1), engine.now, is_other=True, moves=True)
    engine.submit(spec(1), tokens=1, is_other=True)
    engine.run_until_idle()
    assert load.done()
    assert not engine.planner.state.moving


# --- one adapter is paused ---


def stopped_while_it_runs() -> tuple[SimulatedEngine, Request]:
    """An engine with one slot, and a request that a pause has stopped in its midst."""
    engine = engine_with(slots=1)
    request = engine.submit(1, tokens=100)
    engine.run(1)
    engine.stop("adapter-1")
    return engine, request


@pytest.mark.parametrize("is_evicted", [False, True])
def test_stopped_requests_go_on_with_the_weights_that_came_meanwhile(is_evicted: bool) -> None:
    """Under the key of their generation, by which the workers know them."""
    engine = engine_with(slots=1, max_adapters=2)
    request = engine.submit(1, tokens=100)
    engine.run(1)
    key = engine.key_of(request)
    engine.stop("adapter-1")
    engine.submit(2)
    if is_evicted:
        engine.submit(3)
    engine.run_until_idle()
    assert (key in engine.workers.host) is not is_evicted
    loaded = engine.planner.load(replace(spec(1), path="/adapters/1/new"), engine.now, moves=True)
    engine.run_until_idle()
    assert loaded.done()
    assert engine.workers.host[key].path == "/adapters/1/new"
    engine.go_on("adapter-1")
    engine.run_until_idle()
    assert (request.ended_at is not None, engine.workers.slots) == (True, {0: key})
    engine.check_nothing_left()


def test_stopped_requests_keep_a_generation_that_was_retired() -> None:
    engine, request = stopped_while_it_runs()
    retired = engine.planner.retire(1, engine.now, is_last=True)
    engine.run_until_idle()
    assert not retired.done()
    assert 1 in engine.workers.host, "its weights, for whose files nobody waits any more"
    for number in range(2, 12):
        engine.submit(number)
    engine.run_until_idle()
    assert 1 not in engine.workers.host, "its memory is for others meanwhile"
    engine.go_on("adapter-1")
    engine.run_until_idle()
    assert (request.ended_at is not None, request.refusal, retired.done()) == (True, None, True)
    engine.check_nothing_left()


def test_a_refusal_answers_only_what_has_not_run() -> None:
    engine, stopped = stopped_while_it_runs()
    waits = engine.submit(1)
    engine.stop("adapter-1")
    retired = engine.planner.retire(1, engine.now, AdapterNotFound("blocked"), is_last=True)
    engine.go_on("adapter-1")
    engine.run_until_idle()
    assert (isinstance(waits.refusal, AdapterNotFound), waits.began_at) == (True, None)
    assert (stopped.refusal, stopped.ended_at is not None, retired.done()) == (None, True, True)
    engine.check_nothing_left()


def test_a_refusal_outlives_a_removal_without_any() -> None:
    engine = engine_with(slots=2, max_adapters=4)
    for refusal in (AdapterNotFound("blocked"), None):
        engine.planner.retire(1, engine.now, refusal, is_last=True)
    late = engine.submit(1)
    engine.run_until_idle()
    assert isinstance(late.refusal, AdapterNotFound)


def test_what_has_run_is_admitted_before_what_was_held() -> None:
    engine = engine_with(slots=1)
    runs = engine.submit(1, tokens=100)
    engine.run(1)
    engine.pause = Pause.NEW
    waits = engine.submit(1)
    engine.step()
    engine.stop("adapter-1")  # the one that is held first
    engine.pause = Pause.NONE
    engine.go_on("adapter-1")
    assert (engine.step(), engine.began)[1] == [runs, waits]


def test_each_removal_is_answered_beside_a_request_refused_just_before() -> None:
    """A request for a removed id leaves a generation without anything, which the next plan would forget."""
    engine = engine_with(slots=2, max_adapters=4)
    engine.submit(1, tokens=100)
    engine.run(1)
    planner, gone = engine.planner, AdapterNotFound("removed", adapter="adapter-1")
    planner.load(replace(spec(1), path="/new"), engine.now)
    engine.run(1)  # the first still runs
    assert engine.running
    removals = [planner.retire(1, engine.now, gone, is_last=True)]
    late = Request("late", spec(1), 1, 0, "", engine.now)
    planner.arrived(spec(1), "late", late, engine.now, order=place_at_end(planner, engine.now))
    removals.append(planner.retire(1, engine.now))
    engine.run(60)
    assert all(removal.done() for removal in removals)
