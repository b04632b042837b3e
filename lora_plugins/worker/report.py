"""What a worker tells about its adapters, as plain values that an RPC can carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_plugins.worker.jobs import Entry

_MB = 1e6


def report(entries: Mapping[int, Entry], manager: Any, device: Any) -> dict[str, Any]:
    """The groups of `get_lora_metrics()`: adapters, memory and kernels of one worker.

    `efficiency` is the part of the host cache's bytes that adapters in slots hold.
    """
    loaded = {engine_id: entry.adapter for engine_id, entry in entries.items() if entry.adapter is not None}
    active = [engine_id for engine_id in manager.lora_index_to_id if engine_id is not None and engine_id > 0]
    held_bytes = sum(adapter.size_bytes for adapter in loaded.values())
    active_bytes = sum(adapter.size_bytes for engine_id, adapter in loaded.items() if engine_id in active)
    wrapper = next(iter(manager.punica_wrapper_mapping.values()), None)
    return {
        "adapters": {
            "registered": len(loaded),
            "active": len(active),
            "capacity": manager.capacity,
            "slots": manager.lora_slots,
            "utilisation": len(active) / manager.lora_slots,
        },
        "memory": {
            "adapter_mb": {str(engine_id): adapter.size_bytes / _MB for engine_id, adapter in loaded.items()},
            "host_mb": held_bytes / _MB,
            "slot_mb": slot_bytes(manager) / _MB,
            "device": str(device),
            "efficiency": active_bytes / held_bytes if held_bytes else 0.0,
        },
        "performance": {
            "instant": all(adapter.is_instant for adapter in loaded.values()) if loaded else None,
            "kernel_backend": type(wrapper).__name__,
        },
    }


def slot_bytes(manager: Any) -> int:
    """Bytes of all slots of all modules."""
    return sum(
        tensor.numel() * tensor.element_size()
        for module in manager.modules.values()
        for name in ("lora_a_stacked", "lora_b_stacked")
        for tensor in getattr(module, name, ())
    )
