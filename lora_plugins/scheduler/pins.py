"""Which pins leave all other adapters too little: too few slots, or too little host memory.

Runs in the engine core process, when the planner is asked for a pin, and again once a load shows the kind of slot that
the pinned adapter takes. Each function returns the error to refuse the pin with, or None. `state.py` has the words.
"""

from __future__ import annotations

from lora_plugins.errors import NoFreeSlot
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.scheduler.state import PlannerState


def why_not_pinned(state: PlannerState, spec: AdapterSpec) -> NoFreeSlot | None:
    """Return why an adapter cannot be pinned, or None."""
    cache = state.cache
    # Two versions of one name are pinned for as long as the old one drains.
    staying = [adapter for adapter in state.staying if adapter.spec.name != spec.name]
    pinned = [adapter for adapter in staying if adapter.is_pinned]
    # The pool is known only after the load (`is_instant`): the pointed slots stand for any adapter's pool until then.
    places = min(state.slots.pointed or state.slots.copied, cache.max_adapters)
    if len(pinned) + 1 >= places:
        return _no_slot_left(places, len(pinned), spec.name)
    if cache.max_bytes is None:
        return None
    free_bytes = cache.max_bytes - sum(cache.expected_bytes(it) for it in [spec, *(it.spec for it in staying)])
    served = [adapter.spec for adapter in state.current.values()]
    # Evicted adapters that are served still: their next request needs room again.
    served += [known for known, _ in cache.known_bytes.values()]
    kept = {spec.name, *(adapter.spec.name for adapter in staying)}
    # Their number, not their names: a tenant whose name is pinned learns of no other tenant's adapters.
    count = len({it.name for it in served if cache.expected_bytes(it) > free_bytes} - kept)
    if not count:
        return None
    return NoFreeSlot(
        f"a pin that would leave {max(0, free_bytes)} bytes of host memory, too few for {count} of the served adapters",
        expected="room for each adapter that is served",
        remedy="unpin or unload an adapter, or raise LORA_PLUGINS_HOST_MAX_BYTES",
        adapter=spec.name,
    )


def why_takes_last_slot(state: PlannerState, adapter: Adapter) -> NoFreeSlot | None:
    """Return why a pin has to be undone, or None; only a load shows the pool that the pin takes a slot from."""
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
