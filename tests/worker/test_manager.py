"""The worker manager on a small real model: vLLM's contract, and adapters that come and go as the scheduler says."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.lora.request import LoRARequest

from lora_plugins.errors import AdapterNotFound
from lora_plugins.kernels.packing import Packer, packer_of
from lora_plugins.scheduler.messages import Activate, Activated, AdapterSpec, Evict, Failed, Load, Loaded
from lora_plugins.worker.model_manager import PlannedModelManager
from tests.worker.small_model import (
    Adapter,
    Blocked,
    Make,
    activate,
    bring,
    ended,
    evict,
    holds,
    make_adapter,
    punica_indices,
    put,
    runs,
    serve,
    slots_of,
    small_model,
    step,
    vllm_config,
    wrong_answers,
)


def test_a_batch_is_computed_with_the_slots_of_its_adapters(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=3)
    serve(manager, adapters[0], 0)
    serve(manager, adapters[1], 1)
    step(manager, adapters[0], adapters[1])
    assert punica_indices(manager) == [0, 1]
    put(manager, adapters[0], 2)
    step(manager, adapters[0], adapters[1])  # the same batch again, with the first in another slot
    assert punica_indices(manager) == [2, 1]


@pytest.mark.parametrize("is_by_name", [True, False])
def test_the_model_manager_takes_vllms_arguments(base: Path, is_by_name: bool) -> None:
    config = vllm_config(base, slots=3)
    given = {
        "model": small_model(),
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "vocab_size": 128,
        "lora_config": config.lora_config,
        "device": torch.device("cpu"),
        "vllm_config": config,
    }
    made = PlannedModelManager(**given) if is_by_name else PlannedModelManager(*given.values())
    assert len(made.lora_index_to_id) == made.lora_slots >= 3


# --- what callers add and remove past the plan ---


def changes_of(manager: Any) -> list[tuple[int, bool]]:
    return [(change.engine_id, change.spec is not None) for change in manager.jobs.given.take_changes(1)]


def test_what_a_caller_adds_is_here_and_in_no_slot(make_manager: Make, adapters: list[Adapter], kernels: str) -> None:
    manager = make_manager()
    serve(manager, adapters[0], 0)
    assert manager.add_adapter(adapters[1].request()) is True
    assert manager.list_adapters() == {1, 2}
    adapters[1].vanish()
    (change,) = manager.jobs.given.take_changes(1)
    assert (change.engine_id, change.spec.name, bool(change.spec.given)) == (2, adapters[1].name, True)
    assert change.spec.size_bytes > 0
    assert slots_of(manager)[:2] == [1, None]
    manager.begin_step([Load(change.spec, 2, 77)])
    report = ended(manager, 77)
    assert isinstance(report, Loaded)
    assert report.size_bytes == change.spec.size_bytes
    put(manager, adapters[1], 1)
    assert wrong_answers(manager, adapters[1], adapters[0]) == []


def test_what_is_here_is_added_again_only_in_place(make_manager: Make, tmp_path: Path) -> None:
    manager = make_manager()
    old = make_adapter(tmp_path / "a", 1, seed=10)
    serve(manager, old, 0)
    new = make_adapter(tmp_path / "a", 1, seed=11)
    assert manager.add_adapter(new.request()) is True
    assert changes_of(manager) == []
    manager.set_active_adapters({old.request(load_inplace=True)}, None)  # a request says so for ever
    assert holds(manager, old)
    assert manager.add_adapter(make_adapter(tmp_path / "b", 1, seed=12).request(load_inplace=True)) is True
    assert manager.add_adapter(new.request(load_inplace=True)) is True
    first, second = manager.jobs.given.take_changes(6)
    assert holds(manager, old), "until the scheduler says"
    manager.begin_step([Load(first.spec, 1000, 76), Load(second.spec, 1001, 77), Evict(1)])
    assert isinstance(ended(manager, 77), Loaded)
    put(manager, replace(new, adapter_id=1001), 1)
    assert wrong_answers(manager, replace(new, adapter_id=1001)) == []


def test_what_a_caller_removes_is_gone_for_later_requests(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager()
    serve(manager, adapters[0], 0)
    manager.add_adapter(adapters[1].request())
    assert manager.remove_adapter(1) is True
    assert manager.remove_adapter(1) is False
    assert manager.remove_adapter(2) is True
    assert manager.remove_adapter(3) is False
    assert manager.list_adapters() == set()
    assert changes_of(manager) == [(2, True), (1, False), (2, False)]
    step(manager, adapters[0])  # what runs goes on
    assert wrong_answers(manager, adapters[0]) == []
    evict(manager, adapters[0])
    serve(manager, adapters[0], 1)
    assert manager.list_adapters() == {1}, "it may come back"


def test_what_was_given_and_forgotten_fails(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager()
    manager.add_adapter(adapters[0].request())
    (change,) = manager.jobs.given.take_changes(9)
    manager.jobs.given.forget({9})
    assert manager.list_adapters() == set()
    manager.begin_step([Load(change.spec, 1, 77)])
    report = ended(manager, 77)
    assert isinstance(report, Failed)
    assert isinstance(report.error, AdapterNotFound)


def test_a_request_of_a_subclass_is_loaded_by_its_author(make_manager: Make, tmp_path: Path) -> None:
    manager, hidden = make_manager(), make_adapter(tmp_path / "hidden", 1, seed=10)
    seen = []

    def load(request: Any) -> Any:
        seen.append(request)
        return type(manager)._load_adapter(manager, hidden.request() if request.lora_path == "stub" else request)

    manager._load_adapter = load
    tensors = LoRARequest("tensors", 1, "stub", load_inplace=True)
    manager.begin_step([Load(AdapterSpec(1, "tensors", "stub", lora_request=tensors), 1, 77)])
    assert isinstance(ended(manager, 77), Loaded)
    assert seen == [tensors]
    put(manager, hidden, 0)
    assert wrong_answers(manager, hidden) == []


def dummies(count: int) -> list[Any]:
    return [LoRARequest(f"warmup_{number}", number, "/not/a/real/path") for number in range(1, count + 1)]


def run_dummies(manager: Any, count: int) -> None:
    """vLLM's own dummy batches, of a warm-up, and of an idle engine of several for as long as it is idle."""
    from vllm.config import LoRAConfig
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    runner, rows = LoRAModelRunnerMixin(), np.ones(count, dtype=np.int32)
    runner.lora_manager = manager
    config = LoRAConfig(max_loras=count, max_lora_rank=8)
    for active in (count, 0):
        with runner.maybe_dummy_run_with_lora(config, rows, rows, num_active_loras=active):
            pass


def test_dummies_before_there_is_a_plan_are_as_in_vllm(make_manager: Make, adapters: list[Adapter]) -> None:
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    ours, vllms = make_manager(), make_manager(kind=LRUCacheWorkerLoRAManager)
    for manager in (ours, vllms):
        with manager.dummy_lora_cache():
            assert [manager.add_dummy_lora(request, rank=4) for request in dummies(2)] == [True, True]
            assert manager.add_dummy_lora(dummies(1)[0], rank=4) is False
            manager.set_active_adapters(set(dummies(2)), None)  # no file is read for them
            assert manager.list_adapters() == {1, 2}
            assert set(slots_of(manager)) == {1, 2}
        manager.remove_all_adapters()
        assert manager.list_adapters() == set()
        assert slots_of(manager) == [None, None]
    serve(ours, adapters[0], 0)
    step(ours, adapters[0])
    assert holds(ours, adapters[0])


@pytest.mark.deployment(
    "mixture of experts, data parallel", "tested", "dummy batches take no slot and remove nothing planned"
)
def test_dummies_take_no_planned_slot_and_no_entry(make_manager: Make, adapters: list[Adapter], kernels: str) -> None:
    manager = make_manager(slots=2)
    run_dummies(manager, 2)
    far = Adapter(77, adapters[0].path, adapters[0].a, adapters[0].b)
    serve(manager, far, 1)
    for _ in range(2):
        run_dummies(manager, 2)
        assert slots_of(manager)[:2] == [None, 77]
        assert manager.list_adapters() == {77}
        assert wrong_answers(manager, far) == []


def test_dummies_with_the_ids_of_planned_adapters(make_manager: Make, adapters: list[Adapter]) -> None:
    """VLLM numbers what `--lora-modules` names from 1, and dummies too; 2 is in host memory and in no slot."""
    manager = make_manager(slots=2)
    serve(manager, adapters[0], 0)
    bring(manager, adapters[1])
    run_dummies(manager, 2)
    assert slots_of(manager) == [1, None]
    assert manager.list_adapters() == {1, 2}
    assert runs(manager, adapters[0])
    put(manager, adapters[1], 1)
    assert wrong_answers(manager, adapters[0], adapters[1]) == []


def test_rows_of_a_lost_adapter_are_computed_without_one(make_manager: Make, adapters: list[Adapter]) -> None:
    """Batches that were planned before the scheduler heard of it still name the adapter."""
    manager = make_manager()
    serve(manager, adapters[0], 0)
    bring(manager, adapters[1])
    broken = replace(manager.jobs.entries[2].adapter, writes=(lambda _: 1 / 0,))
    manager.jobs.entries[2].adapter = broken
    manager.begin_step([Activate(2, 1)])
    (failed,) = manager.reports()
    assert (failed.key, failed.error.code) == (2, "L005")
    step(manager, adapters[0], adapters[1])
    assert punica_indices(manager) == [0, -1]
    assert wrong_answers(manager, adapters[0]) == []


def test_a_dummy_is_never_computed_in_an_adapters_name(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2)
    bring(manager, adapters[0])
    manager.add_dummy_lora(dummies(1)[0], rank=4)
    with pytest.raises(RuntimeError, match="in no slot"):
        step(manager, adapters[0])


def test_planned_adapters_displace_leftover_dummies(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2)
    for request in dummies(2):
        manager.add_dummy_lora(request, rank=4)
    manager.set_active_adapters(set(dummies(2)), None)
    serve(manager, adapters[4], 0)
    serve(manager, adapters[3], 1)
    assert runs(manager, *adapters[3:])


# --- what the scheduler says ---


def test_what_is_loaded_is_never_read_again(make_manager: Make, adapters: list[Adapter], kernels: str) -> None:
    manager = make_manager(slots=1, max_adapters=4)
    for adapter in adapters[:3]:
        assert isinstance(bring(manager, adapter), Loaded)
    for adapter in adapters[:3]:
        weights = adapter.path / "adapter_model.safetensors"
        weights.write_bytes(bytes(weights.stat().st_size))  # a mapping that is still read would turn to zeros
        adapter.vanish()
    for adapter in [*adapters[:3], *adapters[:3]]:  # each from its slot by the next
        put(manager, adapter, 0)
        assert wrong_answers(manager, adapter) == []


def test_slots_whose_memory_was_lost_are_written_again(
    make_manager: Make, adapters: list[Adapter], kernels: str
) -> None:
    """As after a sleep, which may discard what slots lie in."""
    manager = make_manager(slots=2, max_adapters=4)
    for slot, adapter in enumerate(adapters[:2]):
        bring(manager, adapter)
        put(manager, adapter, slot)
    for module in manager._adapter_manager.modules.values():
        for stack in (*module.lora_a_stacked, *module.lora_b_stacked):
            stack.fill_(float("nan"))
    manager.rewrite_slots()
    for adapter in adapters[:2]:
        assert wrong_answers(manager, adapter) == []
    bring(manager, adapters[2])
    put(manager, adapters[2], 0)
    assert wrong_answers(manager, adapters[2]) == [], "zeros around it"


@pytest.mark.deployment("device given as a string", "tested", "a worker loads, writes slots and counts memory")
def test_a_device_may_be_given_as_a_string(make_manager: Make, adapters: list[Adapter], kernels: str) -> None:
    manager = make_manager(device="cpu")
    serve(manager, adapters[0], 0)
    assert wrong_answers(manager, adapters[0]) == []
    manager.rewrite_slots()
    assert wrong_answers(manager, adapters[0]) == []
    assert manager.lora_metrics()["memory"]["device"] == "cpu"


def test_finishing_jobs_waits_for_slot_writes_and_keeps_reports(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager()
    bring(manager, adapters[0])
    blocked = Blocked(manager)
    job = activate(manager, adapters[0], 0)
    assert blocked.entered.wait(60)
    finishing = threading.Thread(target=manager.jobs.finish)
    finishing.start()
    finishing.join(0.2)
    assert finishing.is_alive(), "the slot is being written"
    blocked.end()
    finishing.join(60)
    assert not finishing.is_alive()
    assert [report.job for report in manager.reports()] == [job]
    assert runs(manager, adapters[0])


def test_reports_say_size_time_and_kind(make_manager: Make, adapters: list[Adapter], kernels: str) -> None:
    manager = make_manager()
    report = bring(manager, adapters[0])
    assert isinstance(report, Loaded)
    assert report.is_instant is (kernels == "placed")
    assert adapters[0].size_bytes <= report.size_bytes <= 2 * adapters[0].size_bytes
    assert 0 < report.load_s < 60
    assert report.rank == adapters[0].rank
    if kernels == "copied":
        bring(manager, adapters[1])
        written = ended(manager, activate(manager, adapters[1], 0))
        assert isinstance(written, Activated)
        assert 0 < written.activate_s < 60


def test_commands_for_what_is_not_loaded(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager()
    evict(manager, adapters[0])
    assert manager.reports(60) == [], "nothing is on its way"
    with pytest.raises(RuntimeError, match="no loaded adapter 1"):
        manager.begin_step([Activate(1, 0)])
    bring(manager, adapters[0])
    assert manager.reports(60) == []


def held_by(write: Any) -> list[Any]:
    """The adapter's tensors or panels that one of its writes holds on to."""
    if isinstance(write, functools.partial):
        sides = [*write.args, *write.keywords.values()]
    else:
        sides = [cell.cell_contents for cell in write.__closure__ or ()]
    parts = [part for side in sides for part in (side if isinstance(side, list) else [side])]
    return [part for part in parts if type(part).__name__ in {"Tensor", "Panels"}]


def packers_of(manager: Any) -> Iterator[Packer]:
    return filter(None, map(packer_of, manager._adapter_manager.modules.values()))


def test_memory_is_freed_with_an_eviction(make_manager: Make, adapters: list[Adapter], kernels: str) -> None:
    manager = make_manager(slots=2)
    for slot in (0, None):
        serve(manager, adapters[0], 0) if slot == 0 else bring(manager, adapters[0])
        entry = manager.jobs.entries[1]
        gone = [weakref.ref(packer.panels.of(0).flat) for packer in packers_of(manager)] if slot == 0 else []
        written = entry.adapter.writes
        held = [weakref.ref(part) for write in written for part in held_by(write)]
        assert held
        del entry, written
        evict(manager, adapters[0])
        deadline = time.monotonic() + 30  # a background thread's frame holds the adapter a moment after its report
        while [ref for ref in [*gone, *held] if ref() is not None] and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert not [ref for ref in [*gone, *held] if ref() is not None]
        assert manager.list_adapters() == set()
        assert manager.lora_metrics()["memory"]["host_mb"] == 0


def test_threads_end_with_the_manager(make_manager: Make, adapters: list[Adapter]) -> None:
    before = set(threading.enumerate())
    manager = make_manager()
    bring(manager, adapters[0])
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {
        f"lora-plugins-{does}" for does in ("loading", "fetching", "writing")
    }
    manager.jobs.close()
    assert not started & set(threading.enumerate())


def test_paths_that_vllm_expands_are_still_its_business(
    make_manager: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    adapter = make_adapter(tmp_path / "in-my-home", 1)
    manager = make_manager()
    at_home = Adapter(1, Path("~/in-my-home"), adapter.a, adapter.b)
    serve(manager, at_home, 0)
    step(manager, at_home)
    assert holds(manager, adapter)


def test_failure_of_a_missing_relative_path_is_isolated(
    make_manager: Make, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    manager = make_manager()
    assert isinstance(bring(manager, Adapter(9, Path("nobody/has-this"), {}, {})), Failed)
    assert isinstance(bring(manager, adapters[0]), Loaded)


def test_garbage_collector_ignores_objects_from_startup(make_manager: Make) -> None:
    """Its first full pass over all of vLLM would stop the engine for most of a second."""
    make_manager()
    assert gc.get_freeze_count() > 100_000
