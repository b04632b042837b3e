from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from lora_plugins.errors import AdapterNotFound, InvalidAdapter, NoFreeSlot, OutOfMemory
from lora_plugins.scheduler.messages import Change, Evict, Load
from lora_plugins.scheduler.stats import FoundIn
from tests.scheduler.simulated import Pause, SimulatedEngine, engine_with, spec


def test_no_more_is_loaded_than_will_run_soon() -> None:
    engine = engine_with(slots=1, max_bytes=None)
    engine.submit(1, tokens=200)
    engine.run(1)
    for engine_id in range(2, 50):
        engine.submit(engine_id)
    engine.run(3)
    assert len(engine.workers.host) == 1 + 1 + 4


def test_what_is_larger_than_the_budget_is_refused() -> None:
    engine = engine_with(max_bytes=100)
    request = engine.submit(spec(1, 101))
    assert engine.planner.has_work(is_paused=False)
    engine.step()
    assert isinstance(request.refusal, OutOfMemory)
    engine.check_nothing_left()


def test_a_failed_load_refuses_all_who_wait() -> None:
    engine = engine_with(fails=lambda command: isinstance(command, Load))
    requests = [engine.submit(1), engine.submit(1)]
    call = engine.planner.load(spec(1), engine.now)
    pin = engine.planner.pin(spec(1), engine.now)
    engine.run_until_idle()
    assert all(isinstance(request.refusal, InvalidAdapter) for request in requests)
    assert isinstance(call.exception(), InvalidAdapter)
    assert isinstance(pin.exception(), InvalidAdapter)
    assert not engine.planner.state.pinned
    assert engine.planner.stats.refused == {"L005": 2}
    engine.check_nothing_left()


def test_a_pin_is_met_under_load_that_never_ends() -> None:
    engine = engine_with(slots=2)
    pin = None
    for at in range(200):
        engine.submit(1 + at % 2, tokens=20)
        engine.run(0.2)
        if at == 20:
            pin = engine.planner.pin(spec(3), engine.now)
            call = engine.planner.load(spec(4), engine.now, needs_slot=True)
    assert pin is not None
    assert pin.done()
    assert call.done()


@pytest.mark.deployment("every adapter pinned", "refused", "the pin that would leave no slot for all others: L001, 503")
def test_the_last_slot_is_never_pinned() -> None:
    engine = engine_with(slots=2)
    engine.planner.pin(spec(1), engine.now)
    assert isinstance(engine.planner.pin(spec(2), engine.now).exception(), NoFreeSlot)
    assert isinstance(engine_with(slots=1).planner.pin(spec(1), 0.0).exception(), NoFreeSlot)


def test_a_failed_pin_of_a_cancelled_call_leaves_nothing() -> None:
    engine = engine_with(fails=lambda command: isinstance(command, Load))
    engine.planner.pin(spec(1), engine.now).cancel()
    engine.run_until_idle()
    assert not engine.planner.state.pinned
    engine.check_nothing_left()


def test_a_refused_pin_counts_what_it_would_lock_out() -> None:
    engine = engine_with(slots=3, max_bytes=200)
    engine.submit(spec(1, 120))
    engine.submit(spec(2, 50))
    engine.run_until_idle()
    engine.submit(spec(4, 190))
    engine.run_until_idle()
    assert 1 not in engine.workers.host  # it is served all the same
    refused = engine.planner.pin(spec(3, 100), engine.now).exception()
    assert isinstance(refused, NoFreeSlot)
    assert "too few for 2 of the served adapters" in str(refused)
    assert "adapter-1" not in str(refused), "a tenant may read the refusal"
    assert engine.planner.retire(4, engine.now, is_last=True)
    engine.planner.retire(1, engine.now, is_last=True)
    pin = engine.planner.pin(spec(3, 100), engine.now)
    engine.run_until_idle()
    assert pin.done()
    assert pin.exception() is None


def test_two_pins_together_leave_room_for_what_is_served() -> None:
    engine = engine_with(slots=4, max_bytes=280)
    engine.submit(spec(1, 120))
    engine.run_until_idle()
    pins = [engine.planner.pin(spec(key, 90), engine.now) for key in (2, 3)]
    engine.run_until_idle()
    assert pins[0].exception() is None
    assert "too few for 1 of the served adapters" in str(pins[1].exception())
    request = engine.submit(spec(1, 120))
    engine.run_until_idle()
    assert request.ended_at is not None


def test_what_comes_later_and_fits_beside_no_pin_is_refused() -> None:
    engine = engine_with(slots=3, max_bytes=200)
    engine.workers.size_bytes = lambda it: it.size_bytes if it.engine_id != 3 else 150
    held = engine.submit(spec(1, 90), tokens=100)
    engine.run(1)
    pin = engine.planner.pin(spec(3, 100), engine.now)  # it turns out larger than its files said
    engine.run_until_idle()
    assert pin.exception() is None
    assert held.ended_at is not None
    refused = engine.submit(spec(1, 90))
    engine.step()
    assert isinstance(refused.refusal, NoFreeSlot)


def test_retiring_is_done_when_the_workers_have_evicted() -> None:
    engine = engine_with()
    engine.submit(1, tokens=1)
    engine.run_until_idle()
    first, second = engine.planner.retire(1, engine.now, None), engine.planner.retire(1, engine.now, None)
    assert not first.done()
    assert engine.step().commands == [Evict(1)]
    assert first.done()
    assert second.done()
    assert engine.planner.retire(7, engine.now, None).done()


def test_a_retired_adapter_cannot_be_pinned() -> None:
    engine = engine_with(slots=3)
    engine.submit(1)
    engine.planner.retire(1, engine.now, is_last=True)
    assert isinstance(engine.planner.pin(spec(1), engine.now).exception(), AdapterNotFound)
    engine.run_until_idle()
    assert 1 not in engine.workers.host


def test_an_end_forgets_the_requests_that_it_names_only() -> None:
    engine = engine_with(slots=1)
    running = engine.submit(1, tokens=100)
    engine.run(1)
    held = [engine.submit(2), engine.submit(3)]
    engine.planner.ended(["nobody", held[0].id, held[1].id], engine.now)
    assert engine.planner.state.of_request.keys() == {running.id}
    assert list(engine.planner.state.adapters[1].running) == [running.id]
    engine.held.clear()
    engine.finish()


@pytest.mark.parametrize(("slots", "others"), [(1, 1), (6, 6)])
def test_long_loads_hold_no_slot_that_others_need(slots: int, others: int) -> None:
    engine = engine_with(is_instant=False, slots=slots, max_bytes=None)
    call = engine.planner.load(spec(1), engine.now)
    engine.run(1)
    assert call.done()
    engine.workers.load_s = lambda _: 30.0
    for engine_id in range(2, 2 + others):
        engine.submit(engine_id)
    engine.step()
    request = engine.submit(1)
    engine.run(1)
    assert not request.is_held
    engine.run_until_idle()


def test_waits_are_counted_by_where_the_adapter_was() -> None:
    engine = engine_with()
    for _ in range(2):
        engine.submit(1)
        engine.run_until_idle()
    waits = engine.planner.stats.wait_seconds
    assert [sum(waits[found].counts) for found in (FoundIn.STORE, FoundIn.HOST, FoundIn.SLOT)] == [1, 0, 1]
    assert sum(engine.planner.stats.load_seconds.counts) == engine.planner.stats.instant_activations == 1
    assert waits[FoundIn.SLOT].total_s == 0.0


def test_the_adapter_with_most_requests_keeps_its_slot() -> None:
    engine = engine_with(slots=2, patience_s=1.0)
    hot = [engine.submit(1, tokens=100) for _ in range(3)]
    engine.submit(2, tokens=100)
    engine.run(1)
    others = [engine.submit(key, tokens=20) for key in (3, 4, 5)]
    engine.run(3)
    joined = engine.submit(1)
    late = engine.submit(2)
    engine.step()
    assert joined.wait_s == 0
    assert late.is_held
    engine.run_until_idle()
    assert all(request.ended_at is not None for request in (*hot, *others, late))
    assert max(request.began_at for request in others) <= late.began_at


def test_patience_begins_with_who_waits() -> None:
    engine = engine_with(slots=1, patience_s=1.0)
    engine.submit(1, tokens=1000)
    engine.run(10)
    engine.submit(2)
    engine.run(0.5)
    joined = engine.submit(1)
    engine.step()
    assert joined.wait_s == 0


def test_one_name_for_all_requests_keeps_no_slot_for_ever() -> None:
    engine = engine_with(slots=1, patience_s=0.2)
    engine.submit(1, tokens=40, client="mine")
    other = None
    for _ in range(80):
        engine.run(1)
        other = other or engine.submit(2)
        engine.submit(1, tokens=40, client="mine")
    assert not other.is_held
    assert other.wait_s < 65


def test_an_id_that_was_removed_comes_back_as_another_generation() -> None:
    engine = engine_with(slots=2)
    old = engine.submit(1, tokens=40)
    engine.run(1)
    removed = engine.planner.retire(1, engine.now)
    newer = engine.submit(1, tokens=2)
    engine.run(1)
    assert newer.ended_at is not None
    assert not removed.done()
    engine.run_until_idle()
    assert old.ended_at is not None
    assert removed.done()
    assert len(engine.workers.host) == 1
    engine.planner.retire(1, engine.now)  # of what is not there any more, or never was
    engine.planner.retire(9, engine.now)
    again = [engine.submit(1), engine.submit(9)]
    engine.run_until_idle()
    assert all(request.ended_at is not None for request in again)


def test_small_loads_delay_no_room_for_a_large_adapter() -> None:
    engine = engine_with(slots=4, max_bytes=1000)
    large = None
    for number in range(200):
        engine.submit(spec(2 + number % 40, 100), tokens=4)
        if number == 20:
            large = engine.submit(spec(1, 900))
        engine.run(0.2)
    assert large is not None
    assert large.wait_s < 5


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_pin_takes_not_the_last_slot_for_copies(is_loaded: bool) -> None:
    engine = engine_with(is_instant=False, slots=1, pointed=4)
    if is_loaded:
        engine.submit(1)
        engine.run_until_idle()
    pin = engine.planner.pin(spec(1), engine.now)
    if not is_loaded:
        engine.run(1)  # only the load shows whether the pin takes a slot for copies
    assert isinstance(pin.exception(timeout=0), NoFreeSlot)
    request = engine.submit(2)
    engine.run_until_idle()
    assert request.ended_at is not None
    engine.check_nothing_left()


def test_a_removed_ids_late_requests_get_a_new_key() -> None:
    """A request that a pause held may have an earlier path than the weights that batches know under the last key."""
    engine = engine_with(slots=2)
    engine.submit(1)
    engine.run_until_idle()
    engine.planner.load(replace(spec(1), path="/later"), engine.now)
    engine.run_until_idle()
    (last,) = engine.planner.state.adapters
    retired = engine.planner.retire(1, engine.now, is_last=True)
    engine.run_until_idle()
    assert retired.done()
    late = engine.submit(1)
    assert not engine.planner.state.adapters.keys() & {1, last}
    engine.run_until_idle()
    assert late.ended_at is not None
    engine.check_nothing_left()


def test_retiring_is_done_when_the_last_generation_has_gone() -> None:
    engine = engine_with(slots=2)
    old = engine.submit(1, tokens=40)
    engine.run(0.5)
    engine.submit(replace(spec(1), path="/elsewhere"), tokens=5, is_other=True)
    engine.run(0.5)
    retired = engine.planner.retire(1, engine.now, is_last=True)
    while old.ended_at is None:
        assert not retired.done()
        engine.step()
    engine.run_until_idle()
    assert retired.done()
    engine.check_nothing_left()


def test_batches_know_each_generation_by_a_number_of_its_own() -> None:
    engine = engine_with()
    keys = []
    for _ in range(3):
        request = engine.submit(1, is_other=bool(keys))
        keys.append(engine.key_of(request))
        assert engine.planner.state.generations.engine_id_of(keys[-1]) == 1
        engine.run_until_idle()
    assert len(set(keys)) == 3
    assert list(engine.workers.host) == keys[-1:]


def test_late_requests_join_the_generation_that_is_being_removed() -> None:
    engine = engine_with(slots=2)
    engine.planner.retire(1, engine.now)  # batches know the next by another number than its id
    old = engine.submit(1, tokens=40)
    engine.run(1)
    engine.planner.retire(1, engine.now, is_last=True)
    late = engine.submit(1, tokens=2)
    engine.step()
    assert engine.key_of(late) == engine.key_of(old)
    engine.run_until_idle()
    assert old.ended_at is not None
    assert not engine.workers.host
    engine.check_nothing_left()


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_version_that_fails_to_load_leaves_the_one_before(is_idle: bool) -> None:
    engine = engine_with(slots=2)
    engine.workers.fails = lambda command: isinstance(command, Load) and command.spec.path == "/broken"
    old = engine.submit(1, tokens=40)
    engine.run(4 if is_idle else 1)
    load = engine.planner.load(replace(spec(1), path="/broken"), engine.now)
    late = engine.submit(1, tokens=2)
    engine.run_until_idle()
    assert isinstance(load.exception(timeout=0), InvalidAdapter)
    assert old.ended_at is not None
    assert late.ended_at is not None, "it was held for the one that failed"
    assert list(engine.workers.host) == [1]
    engine.check_nothing_left()


def test_the_last_of_several_versions_stays() -> None:
    engine = engine_with(slots=2, load_s=1.0)
    engine.submit(1)
    engine.run_until_idle()
    loads = []
    for number in range(4):
        loads.append(engine.planner.load(replace(spec(1), path=f"/{number}"), engine.now))
        engine.submit(1, tokens=2)
        engine.run(0.3)
    engine.run_until_idle()
    assert all(load.done() for load in loads)
    assert all(request.ended_at is not None for request in engine.requests)
    assert [it.path for it in engine.workers.host.values()] == ["/3"]
    engine.check_nothing_left()


@pytest.mark.parametrize("pause", [Pause.NONE, Pause.NEW])
def test_a_pin_passes_to_the_next_version(pause: Pause) -> None:
    engine = engine_with(slots=3)
    engine.planner.pin(spec(1), engine.now)
    engine.run(1)
    engine.pause = pause
    load = engine.planner.load(replace(spec(1), path="/elsewhere"), engine.now)
    engine.run(1)
    assert load.done(), "its slot comes after the pause"
    engine.pause = Pause.NONE
    engine.run(1)
    (pinned,) = engine.planner.state.pinned
    assert (pinned.spec.path, pinned.is_active) == ("/elsewhere", True)


def given(engine: SimulatedEngine, key: int, size_bytes: int = 100) -> Future[None]:
    return engine.planner.given([Change(key, replace(spec(key, size_bytes), given=1))], engine.now)


def test_who_needs_the_room_of_what_was_given_hears_why() -> None:
    engine = engine_with(slots=2, max_adapters=1)
    held = engine.submit(2, tokens=20)
    engine.run(0.5)
    waiting = engine.submit(3)
    done = given(engine, 1)
    engine.run_until_idle()
    late = engine.submit(4)
    engine.run_until_idle()
    assert done.done()
    assert held.ended_at is not None
    for request in (waiting, late):
        assert isinstance(request.refusal, NoFreeSlot)
        assert "workers were given" in str(request.refusal)
    engine.planner.given([Change(1)], engine.now)
    last = engine.submit(4)
    engine.run_until_idle()
    assert last.ended_at is not None


def test_who_named_a_broken_version_gets_no_other() -> None:
    engine = engine_with(slots=2)
    engine.workers.fails = lambda command: isinstance(command, Load) and command.spec.path == "/broken"
    engine.submit(1)
    engine.run_until_idle()
    bound = engine.submit(replace(spec(1), path="/broken"), is_other=True)
    late = engine.submit(1)
    engine.run_until_idle()
    assert isinstance(bound.refusal, InvalidAdapter)
    assert late.ended_at is not None


def test_a_pin_that_leaves_held_requests_no_room_is_refused() -> None:
    engine = engine_with(slots=4, max_bytes=100)
    engine.pause = Pause.NEW
    request = engine.submit(spec(2, 40))
    engine.step()
    assert isinstance(engine.planner.pin(spec(1, 70), engine.now).exception(), NoFreeSlot)
    engine.pause = Pause.NONE
    engine.run_until_idle()
    assert request.ended_at is not None


def test_a_large_adapter_waits_while_others_go_on() -> None:
    engine = engine_with(slots=4, max_bytes=100)
    engine.submit(spec(1, 70), tokens=40)  # two seconds
    engine.run(0.5)
    request = engine.submit(spec(2, 40))
    others = []
    for _ in range(13):
        others.append(engine.submit(spec(3, 4), tokens=2))
        engine.run(0.1)
    assert request.is_held
    assert max(other.wait_s for other in others[1:-1]) < 0.2
    engine.run_until_idle()
    assert request.wait_s < 2.5


def test_the_next_adapter_is_loaded_ahead_of_its_slot() -> None:
    engine = engine_with(slots=1)
    engine.submit(1, tokens=40)
    engine.run(0.5)
    following = engine.submit(2)
    engine.run_until_idle()
    assert following.began_at == engine.requests[0].ended_at


def test_an_idle_adapter_never_keeps_the_only_slot() -> None:
    engine = engine_with(slots=1)
    for engine_id in (1, 2, 1, 3):
        request = engine.submit(engine_id, tokens=1)
        engine.run_until_idle()
        assert request.wait_s <= 0.16


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("is_instant", [True, False])
def test_an_admission_activates_once_and_not_what_is_there(slots: int, is_instant: bool) -> None:
    engine = engine_with(slots=slots, is_instant=is_instant)
    engine_ids = range(1, 7)
    for engine_id in engine_ids:
        engine.submit(engine_id, tokens=20)
    engine.run_until_idle()
    engine.submit(6)
    engine.run_until_idle()
    assert engine.workers.activations == len(engine_ids)
    assert engine.planner.stats.slot_evictions == len(engine_ids) - slots
