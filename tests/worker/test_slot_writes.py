"""Slots that are written in a background thread: which adapter has each, and no batch with another's weights."""

from __future__ import annotations

import os
import queue
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_plugins.scheduler.messages import Activate, Activated, Evict, Load, Loaded
from lora_plugins.worker.background_thread import SWITCH_INTERVAL_S, BackgroundThread
from lora_plugins.worker.slot_stream import SlotStream
from tests.worker.small_model import (
    Adapter,
    Blocked,
    Make,
    activate,
    bring,
    ended,
    evict,
    holds,
    put,
    runs,
    serve,
    slots_of,
    step,
)


def being_written(manager: Any, adapter: Adapter, slot: int) -> tuple[Blocked, int]:
    """The loading thread stands in the middle of writing its slot."""
    assert isinstance(bring(manager, adapter), Loaded)
    blocked = Blocked(manager)
    job = activate(manager, adapter, slot)
    assert blocked.entered.wait(60)
    return blocked, job


def test_a_slot_being_written_belongs_to_no_adapter(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2)
    serve(manager, adapters[0], 0)
    blocked, job = being_written(manager, adapters[1], 1)
    assert slots_of(manager) == [1, -2]
    step(manager, adapters[0])  # batches are prepared meanwhile
    assert manager.reports() == []
    assert manager.lora_metrics()["adapters"]["active"] == 1
    with pytest.raises(RuntimeError, match="in no slot"):
        step(manager, adapters[1])
    blocked.end()
    assert isinstance(ended(manager, job), Activated)
    assert runs(manager, adapters[0], adapters[1])


def test_an_earlier_owner_leaves_before_its_slot_is_written(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=1)
    serve(manager, adapters[0], 0)
    blocked, job = being_written(manager, adapters[1], 0)
    assert slots_of(manager) == [-1]
    with pytest.raises(RuntimeError, match="in no slot"):
        step(manager, adapters[0])
    blocked.end()
    ended(manager, job)
    assert slots_of(manager) == [2]
    assert holds(manager, adapters[1])
    evict(manager, adapters[0])
    assert slots_of(manager) == [2], "its slot is another's by now"
    assert holds(manager, adapters[1])


def test_evict_waits_for_a_write_and_empties_the_slot(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2)
    blocked, _ = being_written(manager, adapters[0], 0)
    threading.Timer(0.05, blocked.go.set).start()
    evict(manager, adapters[0])
    assert blocked.go.is_set()
    blocked.end()
    assert slots_of(manager) == [None, None]
    serve(manager, adapters[1], 0)
    assert manager.reports() == []
    assert slots_of(manager) == [2, None]
    assert holds(manager, adapters[1])


def test_evicted_and_loaded_again_before_the_first_job_began(make_manager: Make, adapters: list[Adapter]) -> None:
    """Its first job is still in the queue when the same key has a new one."""
    manager = make_manager(slots=2)
    blocked, _ = being_written(manager, adapters[0], 0)
    manager.jobs._loader.submit(blocked.go.wait)
    manager.begin_step([Load(adapters[1].spec, 2, 1001)])
    manager.begin_step([Evict(2), Load(adapters[2].spec, 3, 1002)])
    threading.Timer(0.05, blocked.go.set).start()
    manager.begin_step([Evict(1), Load(adapters[1].spec, 2, 1003)])
    assert isinstance(ended(manager, 1003), Loaded)
    blocked.end()
    assert slots_of(manager) == [None, None]
    assert manager.list_adapters() == {2, 3}
    for slot, adapter in enumerate(adapters[1:3]):
        put(manager, adapter, slot)
    assert holds(manager, *adapters[1:3])


def test_commands_of_one_step_run_in_planned_order(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=1)
    serve(manager, adapters[0], 0)
    bring(manager, adapters[1])
    manager.begin_step([Evict(1), Activate(2, 0, 2001), Load(adapters[0].spec, 1, 2002)])
    assert isinstance(ended(manager, 2002), Loaded)
    assert slots_of(manager) == [2]
    assert holds(manager, adapters[1])
    assert manager.list_adapters() == {1, 2}


def test_remove_all_leaves_what_is_planned(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=3)
    serve(manager, adapters[0], 2)
    blocked, job = being_written(manager, adapters[1], 1)
    manager.remove_all_adapters()
    assert slots_of(manager) == [None, -2, 1]
    assert manager.list_adapters() == {1, 2}
    blocked.end()
    ended(manager, job)
    assert runs(manager, adapters[0], adapters[1])


LIMIT_S = 30


@pytest.fixture
def thread():
    made = BackgroundThread("test-loading")
    yield made
    made.close()


def test_jobs_run_in_their_order_also_after_one_that_fails(thread):
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    thread.submit(lambda: done.put(1))
    thread.submit(lambda: 1 // 0)
    thread.submit(lambda: done.put(2))
    assert [done.get(timeout=LIMIT_S) for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_threads_leave_compute_cores_on_the_cpu_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with a GPU has no compute threads, and `--numa-bind` keeps it beside its GPU's memory."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    cores = {os.getpid(): {0}, os.getppid(): {0, 1}}
    chosen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", cores.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, free: chosen.append(free))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    thread = BackgroundThread("test-cores", SlotStream(torch.device(kind)).begin_thread)
    thread.close()
    assert chosen == ([{1}] if kind == "cpu" else [])


def test_the_interpreter_is_handed_on_quickly_while_any_job_runs(thread):
    usual = sys.getswitchinterval()
    assert usual > SWITCH_INTERVAL_S
    other = BackgroundThread("test-fetching")
    seen: queue.SimpleQueue[float] = queue.SimpleQueue()
    go_on: queue.SimpleQueue[None] = queue.SimpleQueue()

    def waits() -> None:
        seen.put(sys.getswitchinterval())
        go_on.get(timeout=LIMIT_S)

    thread.submit(waits)
    assert seen.get(timeout=LIMIT_S) == pytest.approx(SWITCH_INTERVAL_S)
    other.submit(lambda: 1 // 0)
    other.close()  # its job has ended; the first one has not
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    go_on.put(None)
    thread.close()
    assert sys.getswitchinterval() == pytest.approx(usual)
