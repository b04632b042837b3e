"""Slots that are filled beside the loop: who gets which, and no wrong weights however the two threads interleave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.manager.small_model import Adapter, Blocked, ask, bring, holds, make_adapter, settled, slots_of, step

Make = Callable[..., Any]
BATCHES = 300


def later(blocked: Blocked, seconds: float = 0.05) -> None:
    """Let the staging thread go on in a while, when the loop already waits for it."""
    threading.Timer(seconds, blocked.go.set).start()


def being_filled(manager: Any, adapter: Adapter) -> Blocked:
    """The staging thread stands in the middle of filling a slot for it."""
    bring(manager, adapter, busy=None)
    blocked = Blocked(manager)
    assert ask(manager, adapter)["state"] == "placing"
    assert blocked.entered.wait(60)
    assert manager.stage_state(adapter.adapter_id, [])["state"] == "placing", "asking does not wait"
    return blocked


def test_a_reserved_slot_belongs_to_nobody(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2)
    step(manager, adapters[0])
    blocked = being_filled(manager, adapters[1])
    index = 1 - slots_of(manager).index(1)
    assert slots_of(manager)[index] == -1 - index
    step(manager, adapters[0])  # batches are prepared meanwhile
    assert manager.lora_metrics()["adapters"]["active"] == 1
    blocked.end()
    assert settled(manager, 2)["state"] == "ready"
    step(manager, adapters[0], adapters[1])
    assert all(holds(manager, adapter) for adapter in adapters[:2])
    assert manager._adapter_manager.flips == 1


def test_needed_while_it_is_being_filled(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2)
    blocked = being_filled(manager, adapters[0])
    later(blocked)
    step(manager, adapters[0])
    blocked.end()
    assert holds(manager, adapters[0])
    time.sleep(0.05)
    assert holds(manager, adapters[0]), "nobody writes any more"
    assert slots_of(manager).count(None) == 1


def test_its_slot_is_needed_for_another_while_it_is_being_filled(make_manager: Make, adapters: list[Adapter]) -> None:
    """The wrong answers of an early draft: the thread went on writing into the slot that another one had got."""
    manager = make_manager(slots=1)
    bring(manager, adapters[1], busy=None)
    blocked = being_filled(manager, adapters[0])
    later(blocked)
    step(manager, adapters[1])
    blocked.end()
    assert settled(manager, 1, busy=None)["state"] == "staged"
    assert slots_of(manager) == [2]
    assert holds(manager, adapters[1])
    step(manager, adapters[0])
    assert holds(manager, adapters[0])


def test_given_back_before_the_thread_came_to_it(make_manager: Make, adapters: list[Adapter]) -> None:
    """Its job is still in the queue when its slot is another one's, under the same number."""
    manager = make_manager(slots=1, max_adapters=4)
    for adapter in adapters[:3]:
        bring(manager, adapter, busy=None)
    blocked = Blocked(manager)
    ask(manager, adapters[0])
    assert blocked.entered.wait(60)
    later(blocked)
    manager._adapter_manager.cancel_place(1)
    assert ask(manager, adapters[1])["state"] in {"placing", "ready"}
    manager._adapter_manager.cancel_place(2)
    assert ask(manager, adapters[2])["state"] in {"placing", "ready"}
    blocked.end()
    assert settled(manager, 3)["state"] == "ready"
    time.sleep(0.05)
    step(manager, adapters[2])
    assert holds(manager, adapters[2])


def test_all_removed_while_a_slot_is_being_filled(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=1)
    blocked = being_filled(manager, adapters[0])
    later(blocked)
    manager.remove_all_adapters()
    blocked.end()
    assert slots_of(manager) == [None]
    step(manager, adapters[1])
    time.sleep(0.05)
    assert holds(manager, adapters[1])


def test_evicted_from_host_memory_while_its_slot_is_being_filled(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=1, max_adapters=1)
    blocked = being_filled(manager, adapters[0])
    manager.release("server", 1)
    later(blocked)
    assert bring(manager, adapters[1]) == "ready"
    blocked.end()
    assert manager.list_adapters() == {2}
    step(manager, adapters[1])
    assert holds(manager, adapters[1])


def test_a_batch_gets_its_slots_from_the_idle_and_then_from_the_reserved(
    make_manager: Make, adapters: list[Adapter]
) -> None:
    manager = make_manager(slots=2)
    for adapter in adapters[:4]:
        bring(manager, adapter, busy=None)
    step(manager, adapters[0])
    step(manager)
    assert ask(manager, adapters[1])["displaced"] == []
    assert settled(manager, 2)["state"] == "ready"
    step(manager, adapters[2])  # the slot of 1, which is idle, and not the reserved one
    assert manager.stage_state(2, None)["state"] == "ready"
    step(manager, adapters[2], adapters[3])
    assert manager.stage_state(2, None)["state"] == "staged"
    assert all(holds(manager, adapter) for adapter in adapters[2:4])


def test_a_batch_does_not_take_a_slot_from_itself(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2)
    for adapter in adapters[:3]:
        bring(manager, adapter, busy=None)
    step(manager, adapters[0], adapters[1])
    step(manager, adapters[1])
    for batch in ([2, 0], [0, 1], [1, 2], [2, 0], [0, 2]):
        manager.set_active_adapters({adapters[n].request() for n in batch}, None)
        assert set(slots_of(manager)) == {n + 1 for n in batch}
        assert all(holds(manager, adapters[n]) for n in batch)


def test_filled_slots_are_not_written_again(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2)
    for adapter in adapters[:2]:
        bring(manager, adapter)
    for _ in range(5):
        step(manager, *adapters[:2])
        assert [bring(manager, adapter) for adapter in adapters[:2]] == ["ready", "ready"]
    inner = manager._adapter_manager
    assert (inner.flips, inner.copies_in_loop) == (2, 0)


def test_pinned_slots_are_nobody_elses(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2)
    bring(manager, adapters[0])
    manager.pin_adapter(1)
    step(manager)
    for adapter in adapters[1:4]:
        bring(manager, adapter)
        step(manager, adapter)
        assert 1 in slots_of(manager)
        assert holds(manager, adapters[0])
        assert holds(manager, adapter)


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_both_threads(make_manager: Make, tmp_path: Path, seed: int) -> None:
    """Staging, batches, unloading and eviction as fast as they go: every batch finds its adapters' own weights."""
    import random

    choose = random.Random(seed)
    adapters = [make_adapter(tmp_path / str(n), n, rank=choose.choice([2, 4, 8])) for n in range(1, 8)]
    manager = make_manager(slots=2, max_adapters=4)
    for _ in range(BATCHES):
        some = choose.sample(adapters, 2)
        busy = [adapter.adapter_id for adapter in some]
        for adapter in some:
            ask(manager, adapter, busy=busy)
        if choose.random() < 0.5:
            settled(manager, some[0].adapter_id, busy)
        if choose.random() < 0.2:
            manager.remove_adapter(choose.choice(adapters).adapter_id)
        if choose.random() < 0.3:
            manager.release("server", choose.choice(adapters).adapter_id)
        ready = [
            each for each in some
            if manager.stage_state(each.adapter_id, busy)["state"] in {"ready", "staged", "placing"}
        ]  # fmt: skip
        step(manager, *ready)
        assert all(holds(manager, adapter) for adapter in ready)
        for adapter in some:
            manager.release("server", adapter.adapter_id)
