"""The metrics of one worker, in three groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lora_plugins.scheduler.messages import AdapterSpec, Slots
from lora_plugins.worker.jobs import WorkerAdapter
from lora_plugins.worker.loaded_adapter import LoadedAdapter
from lora_plugins.worker.lora_metrics import metrics_of, slot_bytes


class Punica:
    pass


def manager_of(*index_to_id: int | None) -> SimpleNamespace:
    linear = SimpleNamespace(
        lora_a_stacked=(torch.zeros(2, 1, 4, 8),) * 2, lora_b_stacked=(torch.zeros(2, 1, 8, 4),) * 2
    )
    logits = SimpleNamespace(lora_a_stacked=torch.zeros(2, 1, 4, 8), lora_b_stacked=torch.zeros(2, 1, 64, 4))
    return SimpleNamespace(
        lora_index_to_id=list(index_to_id),
        slots=Slots(len(index_to_id)),
        lora_config=SimpleNamespace(max_cpu_loras=5),
        modules={"a": linear, "b": logits, "c": SimpleNamespace()},
        punica_wrapper_mapping={"language_model": Punica()},
    )


def entry(adapter_id: int, size_bytes: int | None, *, is_instant: bool = False) -> WorkerAdapter:
    loaded = None if size_bytes is None else LoadedAdapter("a", size_bytes, is_instant, ())
    return WorkerAdapter(adapter_id, AdapterSpec(adapter_id, "a", "/a"), loaded)


def test_metrics_have_three_groups_by_name() -> None:
    entries = {1: entry(1, 1_000_000), 2: entry(2, 3_000_000, is_instant=True), 3: entry(3, None)}
    assert metrics_of(entries, manager_of(2, -2, None, None), "cpu") == {
        "adapters": {"registered": 2, "active": 1, "capacity": 5, "slots": 4, "utilisation": 0.25},
        "memory": {
            "adapter_mb": {"1": 1.0, "2": 3.0},
            "host_mb": 4.0,
            "slot_mb": pytest.approx(4 * (2 * 64 + 2 * 64 + 64 + 512) / 1e6),
            "device": "cpu",
            "efficiency": 3 / 4,
        },
        "performance": {"instant": False, "kernel_backend": "Punica"},
    }


def test_metrics_without_any_adapter() -> None:
    manager = manager_of(None)
    manager.punica_wrapper_mapping = {}
    metrics = metrics_of({}, manager, "cpu")
    assert metrics["memory"]["efficiency"] == metrics["adapters"]["utilisation"] == 0.0
    assert metrics["performance"]["instant"] is None


def test_slots_that_are_only_pointed_take_no_memory() -> None:
    manager = manager_of(None, None)
    manager.modules["b"].lora_a_stacked = torch.zeros(1).expand(2, 1, 4, 8)
    assert slot_bytes(manager.modules, manager.slots) == 4 * 2 * (2 * 4 * 8 + 2 * 8 * 4) + 4 + 4 * 2 * 64 * 4
    manager.slots = Slots(copied=1, pointed=1)
    assert slot_bytes(manager.modules, manager.slots) == 4 * (2 * 4 * 8 + 2 * 8 * 4) + 4 + 4 * 64 * 4


def test_generations_of_one_adapter_are_added_up() -> None:
    entries = {1: entry(1, 1_000_000), 7: entry(1, 2_000_000)}
    entries[7].key = 7
    metrics = metrics_of(entries, manager_of(7, None), "cpu")
    assert metrics["memory"]["adapter_mb"] == {"1": 3.0}
    assert metrics["memory"]["efficiency"] == pytest.approx(2 / 3)
