"""Loads into the host cache, when, and for which requests and calls; and which pins leave others too little."""

from __future__ import annotations

from itertools import islice

from lora_plugins.errors import NoFreeSlot
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.scheduler.state import MAX_LOADS, PlannerState

_MOST_LOOKED_AT = 2 * MAX_LOADS


def load_wanted(state: PlannerState, now: float, *, is_paused: bool, is_stopped: bool = False) -> list[Adapter]:
    """Have the workers load the next adapters, as far as there is room; return adapters without room.

    A later adapter is loaded only if room stays for an earlier adapter without room, once `draining` adapters have
    gone. During a pause held requests wait, calls do not. Where the pause `is_stopped`, adapters with held requests
    make room for calls, and are loaded again afterwards.
    """
    waiting = [adapter for adapter in state.calling if adapter in state.absent] if is_paused else state.absent
    next_ones = list(islice(waiting, _MOST_LOOKED_AT))
    first = state.reserved_for
    if not next_ones:
        return []
    if first is not None and not is_paused:
        next_ones = [first, *(adapter for adapter in next_ones if adapter is not first)]
    without_room: list[Adapter] = []
    for adapter in next_ones:
        # A bound on the work of a step: later adapters are looked at in a later step.
        if state.loads >= MAX_LOADS or len(without_room) >= MAX_LOADS:
            break
        if without_room and not (is_stopped or state.cache.idle or state.cache.has_room([0])):
            break
        if not adapter.calls and not _runs_soon(state, adapter):
            break
        victims = _room_in_a_pause(state, adapter) if is_stopped else _victims(state, adapter, without_room)
        if victims is None:
            without_room.append(adapter)
            continue
        if not without_room:
            state.made_room_at = now
        for key in victims:
            state.evict(state.adapters[key])
        state.load(adapter)
    return without_room


def _room_in_a_pause(state: PlannerState, adapter: Adapter) -> list[int] | None:
    """Keys to evict so that an adapter fits, adapters with held requests too; None where no choice is enough.

    Earlier generations of the adapter go first; their requests then wait for the adapter. An adapter stays if nobody
    could load the weights again, or if the adapter is to replace another.
    """
    victims = _victims(state, adapter, [])
    if victims is not None:
        return victims
    residents = [it for it in map(state.adapters.__getitem__, state.cache.sizes_bytes) if it.is_loaded and not it.calls]
    residents = [it for it in residents if not it.is_in_flight and not it.is_activating]
    own = {it.key: it for it in residents if it.spec.engine_id == adapter.spec.engine_id and not it.goes_on}
    others = {it.key: it for it in residents if not (it.is_pinned or it.spec.given or it.replaces)}
    sizes_bytes = [state.cache.expected_bytes(adapter.spec)]
    victims = state.cache.victims(sizes_bytes, own)
    if victims is None:
        victims = state.cache.victims(sizes_bytes, own | others)
    for key in own.keys() & set(victims or ()):
        for request_id in list(own[key].held):
            state.hold_elsewhere(own[key], adapter, request_id)
        state.touched |= {adapter: None, own[key]: None}
    return victims


def _victims(state: PlannerState, adapter: Adapter, before: list[Adapter]) -> list[int] | None:
    """Keys to evict so that an adapter fits, beside the adapters `before`; None where no choice is enough."""
    cache, size_bytes = state.cache, state.cache.expected_bytes(adapter.spec)
    if not before:
        victims = cache.victims([size_bytes])
        if victims is None and (old := adapter.replaces) is not None and old.is_loaded and not old.is_used:
            # If the new generation's load fails, the old generation is loaded again. Weights that workers were given
            # past the plan are lost: the caller has replaced them.
            victims = cache.victims([size_bytes], [old.key])
        if victims is not None or adapter is not state.reserved_for:
            return victims
        drained = [other.key for other in state.draining if other.can_be_displaced]
        return cache.victims([size_bytes], drained) if drained else None
    sizes_bytes = [size_bytes, *(cache.expected_bytes(other.spec) for other in before)]
    if state.reserved_for is None:
        # Only unevictable adapters stay for ever: the earlier adapters find room once all others have gone.
        staying = [other.key for other in state.staying if other.key in cache.sizes_bytes]
        return cache.victims([size_bytes]) if cache.has_room_beside(sizes_bytes, staying) else None
    victims = cache.victims(sizes_bytes, gone={other.key for other in state.draining})
    return victims if victims is not None and cache.has_room([size_bytes], victims) else None


def _runs_soon(state: PlannerState, adapter: Adapter) -> bool:
    """Return whether a loaded adapter would run soon: few adapters in host memory come before. Early loads evict."""
    return state.ready.count_before(adapter) < state.slots.total + MAX_LOADS - state.loads


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
