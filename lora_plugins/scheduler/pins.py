"""Which pins are refused: those that would leave too few slots, or too little host memory, for what is not pinned."""

from __future__ import annotations

from lora_plugins.errors import NoFreeSlot
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.scheduler.state import PlannerState


def why_not(state: PlannerState, spec: AdapterSpec) -> NoFreeSlot | None:
    """Why an adapter cannot be pinned; None where it can."""
    cache = state.cache
    # Two versions of one name are pinned for as long as the old one drains.
    staying = [adapter for adapter in state.staying if adapter.spec.name != spec.name]
    pinned = [adapter for adapter in staying if adapter.is_pinned]
    places = min(state.slots.pointed or state.slots.copied, cache.max_adapters)
    if len(pinned) + 1 >= places:
        return _no_slot_left(places, len(pinned), spec.name)
    if cache.max_bytes is None:
        return None
    free_bytes = cache.max_bytes - sum(cache.expected_bytes(it) for it in [spec, *(it.spec for it in staying)])
    served = [adapter.spec for adapter in state.current.values()]
    served += [known for known, _ in cache.known_bytes.values()]
    kept = {spec.name, *(adapter.spec.name for adapter in staying)}
    names = sorted({it.name for it in served if cache.expected_bytes(it) > free_bytes} - kept)
    if not names:
        return None
    return NoFreeSlot(
        f"a pin that would leave {max(0, free_bytes)} bytes of host memory, too few for {', '.join(names)}",
        expected="room for each adapter that is served",
        remedy="unpin or unload an adapter, or raise LORA_PLUGINS_HOST_MAX_BYTES",
        adapter=spec.name,
    )


def takes_last_slot(state: PlannerState, adapter: Adapter) -> NoFreeSlot | None:
    """Why a pin has to be undone, which is known only once it is loaded; None where it may stay."""
    pool, name = state.pool_of(adapter), adapter.spec.name
    others = [it for it in state.pinned if it.spec.name != name and state.pool_of(it) is pool]
    if not (adapter.is_pinned and adapter.is_loaded) or len(others) + 1 < pool.size:
        return None
    return _no_slot_left(pool.size, len(others), name)


def _no_slot_left(slots: int, pinned: int, name: str) -> NoFreeSlot:
    return NoFreeSlot(
        f"{slots} slots, of which {pinned} are pinned",
        expected="one slot at least that is left for all others",
        remedy="unpin an adapter, or raise --max-loras",
        adapter=name,
    )
