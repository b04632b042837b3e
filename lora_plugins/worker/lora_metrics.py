"""What a worker answers to `get_lora_metrics()`: numbers and bytes of its adapters, and how fast they activate.

The worker's engine loop calls `metrics_of` at each call; nothing is counted in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lora_plugins.scheduler.messages import Slots
from lora_plugins.worker.jobs import WorkerAdapter

_MB = 1e6
_STACKS = ("lora_a_stacked", "lora_b_stacked")
_STACKS_OF_EXPERTS = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")


def metrics_of(entries: Mapping[int, WorkerAdapter], manager: Any, device: Any) -> dict[str, dict[str, Any]]:
    """Return the metrics of the adapters that the scheduler had loaded; `manager` is our `PlannedModelManager`.

    `adapters`: those in host memory and in slots, `--max-cpu-loras`, the slots, and the share of the slots in use.
    `memory`: megabytes of each adapter by engine id, of the host cache and of all slots; the share of the host cache's
    bytes that belongs to adapters in slots. `performance`: whether activating any adapter costs no copy, None without
    adapters, and the class that computes with them.
    """
    loaded = [(entry, entry.adapter) for entry in entries.values() if entry.adapter is not None]
    # None stands for a free slot; a slot in the middle of a write has a negative key.
    active = [key for key in manager.lora_index_to_id if key is not None and key > 0]
    host_bytes = sum(adapter.size_bytes for _, adapter in loaded)
    active_bytes = sum(adapter.size_bytes for entry, adapter in loaded if entry.key in active)
    adapter_mb: dict[str, float] = {}
    for entry, adapter in loaded:  # several generations may share an engine id
        engine_id = str(entry.spec.engine_id)
        adapter_mb[engine_id] = adapter_mb.get(engine_id, 0.0) + adapter.size_bytes / _MB
    wrapper = next(iter(manager.punica_wrapper_mapping.values()), None)
    slots = manager.slots.total
    return {
        "adapters": {
            "registered": len(loaded),
            "active": len(active),
            "capacity": manager.lora_config.max_cpu_loras,
            "slots": slots,
            "utilisation": len(active) / slots,
        },
        "memory": {
            "adapter_mb": adapter_mb,
            "host_mb": host_bytes / _MB,
            "slot_mb": slot_bytes(manager.modules, manager.slots) / _MB,
            "device": str(device),
            "efficiency": active_bytes / host_bytes if host_bytes else 0.0,
        },
        "performance": {
            "instant": all(adapter.is_instant for _, adapter in loaded) if loaded else None,
            "kernel_backend": type(wrapper).__name__,
        },
    }


def slot_bytes(modules: Mapping[str, Any], slots: Slots) -> int:
    """Return the bytes of memory that the modules' slots take: pointed slots are never written, and take none."""
    return sum(
        # A stack of pointed slots is a view of a single zero: its storage is smaller than its shape.
        min(int(tensor[: slots.copied].nbytes), int(tensor.untyped_storage().nbytes()))
        for module in modules.values()
        for name in (*_STACKS, *_STACKS_OF_EXPERTS)
        # Layers of experts also have a list, whose members are views of the stacks: skip the list.
        if not isinstance(stacks := getattr(module, name, ()), list)
        for tensor in ([stacks] if isinstance(stacks, torch.Tensor) else stacks)
    )
