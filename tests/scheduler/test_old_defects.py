"""What went wrong in the old design, in which a request was admitted before its adapter had a place."""

from __future__ import annotations

import pytest

from lora_plugins.errors import NoFreeSlot
from lora_plugins.scheduler.messages import Activate
from tests.scheduler.simulated import Request, SimulatedEngine, SimulatedWorkers, make_planner, spec

MB = 10**6
GIB = 2**30
LARGE, PINNED = spec(2, 400 * MB), spec(1, 700 * MB)


def engine_with(**options) -> SimulatedEngine:
    is_instant = options.pop("is_instant", True)
    workers = SimulatedWorkers(is_instant=lambda _: is_instant)
    return SimulatedEngine(make_planner(**options), workers)


def others_of(engine: SimulatedEngine, seconds: float) -> list[Request]:
    """A small adapter's requests, one every tenth of a second."""
    requests = []
    until = engine.now + seconds
    while engine.now < until:
        requests.append(engine.submit(spec(3, 40 * MB), tokens=2))
        engine.run(0.1)
    return requests


# --- (2) an adapter that does not fit beside what stays ---


def pinned_engine() -> SimulatedEngine:
    engine = engine_with(slots=4, max_bytes=GIB)
    pin = engine.planner.pin(PINNED, engine.now)
    engine.run(1)
    assert pin.done()
    return engine


def test_what_never_fits_beside_pins_is_refused_at_once() -> None:
    engine = pinned_engine()
    request = engine.submit(LARGE)
    plan = engine.step()
    assert plan.refused == [(request, request.refusal)]
    assert isinstance(request.refusal, NoFreeSlot)


def test_a_refusal_changes_no_other_wait() -> None:
    waits = []
    for with_refused in (False, True):
        engine = pinned_engine()
        started = engine.now
        requests = []
        while engine.now < started + 5:
            if with_refused:
                engine.submit(LARGE)
            requests += others_of(engine, 0.1)
        waits.append([request.wait_s for request in requests if request.admitted_at is not None])
    assert waits[0] == waits[1]


def test_a_pin_that_leaves_held_requests_no_room_is_refused() -> None:
    engine = engine_with(slots=4, max_bytes=GIB)
    engine.is_paused = True
    request = engine.submit(LARGE)
    engine.step()
    assert isinstance(engine.planner.pin(PINNED, engine.now).exception(), NoFreeSlot)
    engine.is_paused = False
    engine.run_until_idle()
    assert request.ended_at is not None


def test_a_large_adapter_waits_while_others_go_on() -> None:
    engine = engine_with(slots=4, max_bytes=GIB)
    engine.submit(PINNED, tokens=40)  # two seconds
    engine.run(0.5)
    request = engine.submit(LARGE)
    others = others_of(engine, 1.3)
    assert request.is_held
    assert max(other.wait_s for other in others[1:-1]) < 0.2
    engine.run_until_idle()
    assert request.wait_s < 2.5


def test_a_busy_adapter_is_drained_for_one_that_waits() -> None:
    engine = engine_with(slots=4, max_bytes=GIB)
    engine.submit(PINNED, tokens=20)
    engine.run(0.5)
    request = engine.submit(LARGE)
    started = engine.now
    while request.is_held and engine.now < started + 30:
        engine.submit(PINNED, tokens=20)  # one second each, and never a gap
        engine.run(0.2)
    assert request.wait_s <= 0.5 + 1.0 + 2 * 1.0 + 0.5 + 1.0
    engine.run_until_idle()


# --- (3) streams that end early ---


@pytest.mark.parametrize("is_instant", [True, False])
def test_streams_that_break_off_do_not_hold_a_slot(is_instant: bool) -> None:
    engine = engine_with(slots=1, is_instant=is_instant)
    stream = engine.submit(1, tokens=10**6)
    engine.run(3)
    request = engine.submit(2)
    started = engine.now
    while request.is_held and engine.now < started + 60:
        following = engine.submit(1, tokens=10**6)  # its client asks again before it breaks off
        engine.run(3)
        engine.abort(stream)
        stream = following
    assert request.wait_s < 3 + 3 + 1.5


# --- (7) one adapter at a time ---


def test_the_next_adapter_is_loaded_ahead_of_its_slot() -> None:
    engine = engine_with(slots=1)
    engine.submit(1, tokens=40)
    engine.run(0.5)
    following = engine.submit(2)
    engine.run_until_idle()
    assert following.admitted_at == engine.requests[0].ended_at


def test_an_idle_slot_is_written_beside_those_that_run() -> None:
    engine = engine_with(slots=2, is_instant=False)
    engine.submit(1, tokens=40)
    engine.run(0.5)
    following = engine.submit(2)
    engine.run(0.5)
    assert not following.is_held
    engine.run_until_idle()


def test_an_idle_adapter_never_keeps_the_only_slot() -> None:
    engine = engine_with(slots=1)
    for engine_id in (1, 2, 1, 3):
        request = engine.submit(engine_id, tokens=1)
        engine.run_until_idle()
        assert request.wait_s <= 0.16


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("is_instant", [True, False])
def test_no_adapter_is_activated_twice_for_one_admission(slots: int, is_instant: bool) -> None:
    engine = engine_with(slots=slots, is_instant=is_instant)
    engine_ids = range(1, 7)
    for engine_id in engine_ids:
        engine.submit(engine_id, tokens=20)
    engine.run_until_idle()
    assert engine.workers.activations == len(engine_ids)
    assert engine.planner.stats.slot_evictions == len(engine_ids) - slots


def test_an_adapter_in_a_slot_is_not_activated_again() -> None:
    engine = engine_with(slots=1)
    engine.submit(1)
    engine.run_until_idle()
    engine.submit(1)
    plan = engine.step()
    assert not any(isinstance(command, Activate) for command in plan.commands)
