"""What a worker tells about its adapters, as plain values that an RPC can carry."""

from __future__ import annotations

from typing import Any

from lora_plugins import errors
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.manager.host_tier import HostTier, Stage

_MB = 1e6


def failure(error: LoRAPluginsError) -> dict[str, Any]:
    """The state of an adapter that cannot be served; `lora_plugins.server.staging` raises it anew.

    `kind` is a class of `lora_plugins.errors`, as sources have kinds of their own below it.
    """
    return {
        "state": "failed",
        "kind": next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__),
        "fields": error.fields(),
    }


def report(tier: HostTier, manager: Any, device: Any) -> dict[str, Any]:
    """The three groups of `get_lora_metrics()`.

    Times are means in milliseconds: of an activation that had to copy in the engine loop, and of bringing an adapter
    into the host tier. `efficiency` is the part of the host tier's bytes that adapters in slots hold.
    """
    active = [adapter_id for adapter_id in manager.lora_index_to_id if adapter_id is not None and adapter_id > 0]
    entries = tier.snapshot()
    held_bytes = sum(entry.size_bytes for entry in entries)
    active_bytes = sum(entry.size_bytes for entry in entries if entry.adapter_id in active)
    wrapper = next(iter(manager.punica_wrapper_mapping.values()), None)
    return {
        "adapters": {
            "registered": len(tier.staged()),
            "active": len(active),
            "capacity": manager.capacity,
            "slots": manager.lora_slots,
            "utilisation": len(active) / manager.lora_slots,
        },
        "memory": {
            "adapter_mb": {str(entry.adapter_id): entry.size_bytes / _MB for entry in entries},
            "host_mb": held_bytes / _MB,
            "host_max_mb": None if tier.max_bytes is None else tier.max_bytes / _MB,
            "slot_mb": slot_bytes(manager) / _MB,
            "device": str(device),
            "efficiency": active_bytes / held_bytes if held_bytes else 0.0,
        },
        "performance": {
            "mean_activation_ms": _mean_ms(manager.copying_in_loop_s, manager.copies_in_loop),
            "mean_staging_ms": _mean_ms(tier.staging_s, tier.stagings),
            "mean_switching_ms": _mean_ms(manager.switching_s, manager.copies_in_loop + manager.flips),
            "copies_in_loop": manager.copies_in_loop,
            "flips": manager.flips,
            "evictions": tier.evictions,
            "kernel_backend": type(wrapper).__name__,
        },
    }


def residency(tier: HostTier, manager: Any) -> dict[int, dict[str, Any]]:
    """For each adapter of a worker: its bytes, its leases, and where it is."""
    return {
        entry.adapter_id: {
            "size_bytes": entry.size_bytes,
            "leases": len(entry.leases),
            "staged": entry.stage is Stage.STAGED,
            "slot": manager.is_ready(entry.adapter_id),
            "pinned": entry.pinned,
        }
        for entry in tier.snapshot()
    }


def slot_bytes(manager: Any) -> int:
    """Bytes of all slots of all modules."""
    return sum(
        tensor.numel() * tensor.element_size()
        for module in manager.modules.values()
        for name in ("lora_a_stacked", "lora_b_stacked")
        for tensor in getattr(module, name, ())
    )


def _mean_ms(total_s: float, count: int) -> float:
    return 1e3 * total_s / count if count else 0.0
