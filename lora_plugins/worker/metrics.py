"""What `get_lora_metrics()` answers on each worker; its JSON has the names of these fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_plugins.worker.jobs import Entry

_MB = 1e6
_STACKS = ("lora_a_stacked", "lora_b_stacked")
_STACKS_OF_EXPERTS = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")


@dataclass(frozen=True, slots=True)
class AdapterMetrics:
    """Adapters in host memory, those in slots, `--max-cpu-loras`, slots, and the part of the slots in use."""

    registered: int
    active: int
    capacity: int
    slots: int
    utilisation: float


@dataclass(frozen=True, slots=True)
class MemoryMetrics:
    """Megabytes of each adapter by engine id, of the host cache and of all slots.

    `efficiency` is the part of the host cache's bytes that adapters in slots hold.
    """

    adapter_mb: dict[str, float]
    host_mb: float
    slot_mb: float
    device: str
    efficiency: float


@dataclass(frozen=True, slots=True)
class PerformanceMetrics:
    """Whether activating any adapter costs no copy, None without adapters; and the class that computes with them."""

    instant: bool | None
    kernel_backend: str


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """Adapters, memory and kernels of one worker."""

    adapters: AdapterMetrics
    memory: MemoryMetrics
    performance: PerformanceMetrics


def metrics_of(entries: Mapping[int, Entry], manager: Any, device: Any) -> WorkerMetrics:
    """Of the adapters that the scheduler had loaded; `manager` is vLLM's `LoRAModelManager`."""
    loaded = {engine_id: entry.adapter for engine_id, entry in entries.items() if entry.adapter is not None}
    active = [engine_id for engine_id in manager.lora_index_to_id if engine_id is not None and engine_id > 0]
    host_bytes = sum(adapter.size_bytes for adapter in loaded.values())
    active_bytes = sum(adapter.size_bytes for engine_id, adapter in loaded.items() if engine_id in active)
    wrapper = next(iter(manager.punica_wrapper_mapping.values()), None)
    slots = manager.lora_slots
    return WorkerMetrics(
        AdapterMetrics(len(loaded), len(active), manager.capacity, slots, len(active) / slots),
        MemoryMetrics(
            {str(engine_id): adapter.size_bytes / _MB for engine_id, adapter in loaded.items()},
            host_bytes / _MB,
            slot_bytes(manager) / _MB,
            str(device),
            active_bytes / host_bytes if host_bytes else 0.0,
        ),
        PerformanceMetrics(
            all(adapter.is_instant for adapter in loaded.values()) if loaded else None, type(wrapper).__name__
        ),
    )


def slot_bytes(manager: Any) -> int:
    """Bytes of all slots of all modules."""
    return sum(
        tensor.numel() * tensor.element_size()
        for module in manager.modules.values()
        for name in (*_STACKS, *_STACKS_OF_EXPERTS)
        # A list, which layers of experts have beside their own stacks, is of views of these.
        if not isinstance(stacks := getattr(module, name, ()), list)
        for tensor in stacks
    )
