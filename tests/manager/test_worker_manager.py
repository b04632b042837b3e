"""The worker manager on a small real model: vLLM's contract, and staging beside the loop."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_plugins.errors import NoFreeSlot, OutOfMemory
from tests.manager.small_model import (
    Adapter,
    ask,
    bring,
    holds,
    make_adapter,
    punica_indices,
    settled,
    slots_of,
    step,
)

Make = Callable[..., Any]

# --- vLLM's manager API, next to vLLM's own manager ---


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returned, or the kinds of error that a caller could tell it by."""
    try:
        return call()
    except Exception as error:
        return next(kind for kind in (RuntimeError, ValueError, KeyError, OSError) if isinstance(error, kind))


@pytest.mark.parametrize("seed", range(12))
def test_same_answers_as_vllms_over_a_random_schedule(make_manager: Make, adapters: list[Adapter], seed: int) -> None:
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    slots, max_adapters = [(1, 1), (1, 3), (2, 2), (2, 4)][seed % 4]
    ours = make_manager(slots=slots, max_adapters=max_adapters)
    vllms = make_manager(slots=slots, max_adapters=max_adapters, kind=LRUCacheWorkerLoRAManager)
    choose, log = random.Random(seed), []
    for _ in range(80):
        adapter = choose.choice(adapters)
        some = choose.sample(adapters, choose.randint(0, slots + 1))
        name = choose.choice(["add", "add", "inplace", "remove", "step", "step", "pin", "clear"])
        if name in {"pin", "clear"} and choose.random() < 0.6:
            continue  # they end the interest of what went before

        def act(manager: Any, name=name, adapter=adapter, some=some) -> Any:
            match name:
                case "add":
                    return manager.add_adapter(adapter.request())
                case "inplace":
                    return manager.add_adapter(adapter.request(load_inplace=True))
                case "remove":
                    return manager.remove_adapter(adapter.adapter_id)
                case "step":
                    return step(manager, *some)
                case "pin":
                    return manager.pin_adapter(adapter.adapter_id)
                case "clear":
                    return manager.remove_all_adapters()
            return None

        what = (name, adapter.adapter_id, [each.adapter_id for each in some])
        log.append(what)
        assert outcome(lambda: act(ours)) == outcome(lambda: act(vllms)), "\n".join(map(str, log))
        assert ours.list_adapters() == vllms.list_adapters(), "\n".join(map(str, log))
        for manager in (ours, vllms):
            if name == "step" and len(some) <= slots and not manager._adapter_manager._active_adapters.pinned_items:
                assert {each.adapter_id for each in some} <= set(slots_of(manager)), "\n".join(map(str, log))


def test_a_batch_is_computed_with_the_slots_of_its_adapters(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=3)
    step(manager, adapters[0], adapters[1])
    assert punica_indices(manager) == [slots_of(manager).index(1), slots_of(manager).index(2)]
    manager.remove_adapter(1)
    manager.add_adapter(adapters[2].request())
    step(manager, adapters[0], adapters[1])  # the same batch again, with the first in another slot
    assert slots_of(manager).index(1) == 2
    assert punica_indices(manager) == [2, slots_of(manager).index(2)]


def test_loaded_in_place_is_read_once_and_then_served(make_manager: Make, tmp_path: Path) -> None:
    manager = make_manager()
    old = make_adapter(tmp_path / "a", 1, seed=10)
    step(manager, old)
    new = make_adapter(tmp_path / "a", 1, seed=11)
    assert manager.add_adapter(new.request(load_inplace=True)) is True
    assert holds(manager, new)
    new.vanish()
    manager.set_active_adapters({new.request(load_inplace=True)}, None)  # it says so for ever
    assert holds(manager, new)


def test_in_place_and_broken_leaves_the_old_one_served(make_manager: Make, tmp_path: Path) -> None:
    manager = make_manager()
    old = make_adapter(tmp_path / "a", 1)
    bring(manager, old)
    step(manager, old)
    (tmp_path / "broken").mkdir()
    broken = Adapter(1, tmp_path / "broken", {}, {})
    with pytest.raises(Exception, match="No adapter found"):
        manager.add_adapter(broken.request(load_inplace=True))
    step(manager, old)
    assert holds(manager, old)
    assert manager.list_adapters() == {1}


def test_in_place_without_room_leaves_the_old_one_served(make_manager: Make, tmp_path: Path) -> None:
    old, other = make_adapter(tmp_path / "a", 1), make_adapter(tmp_path / "b", 2)
    manager = make_manager(env={"LORA_PLUGINS_HOST_MAX_BYTES": str(2 * old.file_bytes)})
    for adapter in (old, other):
        assert bring(manager, adapter) == "ready"
    step(manager, old, other)
    larger = make_adapter(tmp_path / "c", 1, rank=8)
    old.vanish()
    with pytest.raises(NoFreeSlot):
        manager.add_adapter(larger.request(load_inplace=True))
    step(manager, old, other)
    assert holds(manager, old)
    assert manager.list_adapters() == {1, 2}


def test_dummy_adapters_of_the_warm_up(make_manager: Make, adapters: list[Adapter]) -> None:
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    ours, vllms = make_manager(), make_manager(kind=LRUCacheWorkerLoRAManager)
    for manager in (ours, vllms):
        with manager.dummy_lora_cache():
            assert [manager.add_dummy_lora(adapter.request(), rank=4) for adapter in adapters[:2]] == [True, True]
            assert manager.add_dummy_lora(adapters[0].request(), rank=4) is False
            step(manager, *adapters[:2])  # no file is read for them
            assert manager.list_adapters() == {1, 2}
            assert set(slots_of(manager)) == {1, 2}
        manager.remove_all_adapters()
        assert manager.list_adapters() == set()
        assert slots_of(manager) == [None, None]
    assert len(ours.tier) == 0
    step(ours, adapters[0])
    assert holds(ours, adapters[0])


def test_a_dummy_is_never_served_in_an_adapters_name(make_manager: Make, adapters: list[Adapter]) -> None:
    """With data parallelism an idle engine runs dummy batches at any time, with the ids 1, 2, ..."""
    manager = make_manager()
    bring(manager, adapters[0], busy=None)
    manager.remove_adapter(1)  # leased, so it is still here
    manager.add_dummy_lora(adapters[0].request(), rank=4)
    step(manager, adapters[0])
    assert holds(manager, adapters[0])


def test_max_cpu_loras_and_max_loras_are_upper_bounds(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2, max_adapters=3)
    for adapter in adapters:
        assert bring(manager, adapter) in {"ready", "staged"}
        manager.release("server", adapter.adapter_id)
        assert len(manager.tier) <= 3
        assert len(manager._adapter_manager.list_adapters()) <= 3
    assert manager.list_adapters() == {3, 4, 5}
    with pytest.raises(RuntimeError, match="3 adapters, but only 2 slots"):
        step(manager, *adapters[:3])


def test_pinned_stays_in_host_memory_and_slot(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2, max_adapters=2)
    bring(manager, adapters[0])
    manager.release("server", 1)
    assert manager.pin_adapter(1) is True
    state = manager.stage_state(1, [])
    assert (state["pinned"], state["unpinned_slots"]) == ([1], 1)
    for adapter in adapters[1:]:
        step(manager, adapter)
        assert 1 in slots_of(manager)
    assert 1 in manager.list_adapters()
    assert holds(manager, adapters[0])
    assert manager.remove_adapter(1) is True
    assert 1 not in slots_of(manager)
    with pytest.raises(ValueError, match="not registered"):
        manager.pin_adapter(1)


# --- staging beside the loop ---


def test_staged_beside_the_loop_costs_it_no_copy(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager()
    assert ask(manager, adapters[0])["state"] == "staging"
    assert settled(manager, 1)["state"] == "ready"
    step(manager, adapters[0])
    assert holds(manager, adapters[0])
    assert (manager._adapter_manager.flips, manager._adapter_manager.copies_in_loop) == (1, 0)


def test_asked_for_host_memory_only_it_takes_no_slot(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager()
    assert bring(manager, adapters[0], busy=None) == "staged"
    assert slots_of(manager) == [None, None]
    assert bring(manager, adapters[0]) == "ready"
    step(manager, adapters[0])
    assert holds(manager, adapters[0])
    assert manager.tier.stagings == 1


def test_no_slot_of_a_busy_adapter_or_of_the_running_batch_is_taken(
    make_manager: Make, adapters: list[Adapter]
) -> None:
    manager = make_manager(slots=2)
    for adapter in adapters[:2]:
        bring(manager, adapter)
    step(manager, *adapters[:2])
    assert bring(manager, adapters[2], busy=[]) == "staged"  # both are needed by the batch
    step(manager, adapters[1])
    assert bring(manager, adapters[2], busy=[1]) == "staged"
    state = ask(manager, adapters[2], busy=[2])
    assert state["displaced"] == [1]
    assert settled(manager, 3)["state"] == "ready"
    step(manager, adapters[1], adapters[2])
    assert all(holds(manager, adapter) for adapter in adapters[1:3])


def test_a_step_never_reads_a_file(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=1, max_adapters=4)
    for adapter in adapters[:3]:
        bring(manager, adapter)
    for adapter in adapters[:3]:
        weights = adapter.path / "adapter_model.safetensors"
        weights.write_bytes(bytes(weights.stat().st_size))  # a mapping that is still read would turn to zeros
        adapter.vanish()
    for adapter in [*adapters[:3], *adapters[:3]]:  # each from its slot by the next
        step(manager, adapter)
        assert holds(manager, adapter)


def test_a_replaced_path_is_another_adapter(make_manager: Make, tmp_path: Path) -> None:
    manager = make_manager()
    old, new = make_adapter(tmp_path / "old", 1, seed=10), make_adapter(tmp_path / "new", 1, seed=11)
    bring(manager, old)
    manager.release("server", 1)
    assert bring(manager, new) == "ready"
    step(manager, new)
    assert holds(manager, new)


def test_a_removed_adapter_stays_for_those_that_lease_it(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager()
    bring(manager, adapters[0])
    assert manager.remove_adapter(1) is True
    assert manager.remove_adapter(1) is False
    assert manager.list_adapters() == set()
    step(manager, adapters[0])
    assert holds(manager, adapters[0])
    manager.release("server", 1)
    assert (len(manager.tier), slots_of(manager)) == (0, [None, None])


def test_all_removed_while_leased_are_still_served(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager()
    bring(manager, adapters[0])
    adapters[0].vanish()
    manager.remove_all_adapters()
    assert slots_of(manager) == [None, None]
    step(manager, adapters[0])
    assert holds(manager, adapters[0])


def test_leased_bytes_are_not_given_away(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(env={"LORA_PLUGINS_HOST_MAX_BYTES": str(2 * adapters[0].file_bytes)})
    for adapter in adapters[:2]:
        bring(manager, adapter)
    assert ask(manager, adapters[2])["kind"] == NoFreeSlot.__name__
    manager.release("server", 1)
    assert bring(manager, adapters[2]) == "ready"
    assert manager.list_adapters() == {2, 3}
    step(manager, adapters[1], adapters[2])


def test_larger_than_the_host_tier_is_out_of_memory(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(env={"LORA_PLUGINS_HOST_MAX_BYTES": "5000"})
    answer = ask(manager, adapters[0])
    assert (answer["state"], answer["kind"]) == ("failed", OutOfMemory.__name__)
    assert answer["fields"]["adapter"] == "adapter-1"


def test_tensors_larger_than_their_file_are_settled_by_the_loop(make_manager: Make, tmp_path: Path) -> None:
    """The engine computes in float32, the files have half of that."""
    first, second = (make_adapter(tmp_path / str(n), n, rank=8, dtype=torch.bfloat16) for n in (1, 2))
    manager = make_manager(env={"LORA_PLUGINS_HOST_MAX_BYTES": str(int(1.8 * first.size_bytes))})
    assert bring(manager, first) == "ready"
    manager.release("server", 1)
    assert bring(manager, second) == "ready"
    assert manager.list_adapters() == {2}
    assert manager.tier.used_bytes == second.size_bytes
    step(manager, second)
    assert holds(manager, second)


def test_metrics_have_three_groups_with_the_right_numbers(make_manager: Make, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=2, max_adapters=4, env={"LORA_PLUGINS_HOST_MAX_BYTES": "60kB"})
    for adapter in adapters[:3]:
        bring(manager, adapter, busy=None)
    bring(manager, adapters[0])
    step(manager, adapters[0])  # flipped
    step(manager, adapters[1])  # copied
    metrics = manager.lora_metrics()
    megabytes = adapters[0].size_bytes / 1e6
    assert metrics["adapters"] == {"registered": 3, "active": 2, "capacity": 4, "slots": 2, "utilisation": 1.0}
    memory = metrics["memory"]
    assert memory["adapter_mb"] == {"1": megabytes, "2": megabytes, "3": megabytes}
    assert memory["host_mb"] == pytest.approx(3 * megabytes)
    assert memory["host_max_mb"] == 0.06
    assert memory["device"] == "cpu"
    assert memory["efficiency"] == pytest.approx(2 / 3)
    assert memory["slot_mb"] == pytest.approx(2 * 2 * megabytes)  # two slots of twice the rank
    performance = metrics["performance"]
    assert (performance["copies_in_loop"], performance["flips"], performance["evictions"]) == (1, 1, 0)
    assert performance["kernel_backend"] == "PunicaWrapperCPU"
    assert 0 < performance["mean_switching_ms"] <= performance["mean_activation_ms"] < 1000
    assert 0 < performance["mean_staging_ms"] < 1000


def test_paths_that_vllm_expands_are_still_its_business(
    make_manager: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    adapter = make_adapter(tmp_path / "in-my-home", 1)
    manager = make_manager()
    at_home = Adapter(1, Path("~/in-my-home"), adapter.a, adapter.b)
    assert bring(manager, at_home) == "ready"
    step(manager, at_home)
    assert holds(manager, adapter)


def test_the_garbage_collector_leaves_alone_what_was_there_at_the_start(make_manager: Make) -> None:
    """Its first full pass over all of vLLM would stop the engine for most of a second."""
    make_manager()
    assert gc.get_freeze_count() > 100_000
