"""Loads into the host cache: which adapters are loaded now, and which others leave for them.

Runs in the engine core process, in each plan of a step. In go the adapters that requests or calls want and host memory
lacks, in the order of vLLM's queue (`PlannerState.absent`); the plan gets commands to evict and to load; out come the
adapters without room. During a pause only calls load. A pause that stops running requests too (`is_stopped`) lets
adapters with waiting requests be evicted for calls: nothing would run before the pause ends. `state.py` has the words.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.state import MAX_LOADS, PlannerState

_MOST_LOOKED_AT = 2 * MAX_LOADS


def load_wanted(state: PlannerState, now: float, *, is_paused: bool, is_stopped: bool = False) -> list[Adapter]:
    """Have the workers load the next adapters, as far as there is room; return adapters without room.

    A later adapter is loaded only if room stays for the earlier ones. During a pause held requests wait, calls do not:
    where the pause `is_stopped`, adapters with held requests make room for calls, and are loaded again afterwards.
    """
    without_room: list[Adapter] = []
    for adapter in _next_ones(state, is_paused=is_paused):
        # A bound on the work of a step: later adapters are looked at in a later step.
        if state.loads >= MAX_LOADS or len(without_room) >= MAX_LOADS:
            break
        # `[0]`: is a place free at all? Without one, and with none idle, no later adapter finds room either.
        if without_room and not (is_stopped or state.cache.idle or state.cache.has_room([0])):
            break
        if not adapter.calls and not _runs_soon(state, adapter):
            break
        # While all is stopped only calls load, and nothing runs that an adapter without room would have to wait for.
        is_first = is_stopped or not without_room
        victims = _victims(state, adapter, is_stopped) if is_first else _victims_behind(state, adapter, without_room)
        if victims is None:
            without_room.append(adapter)
            continue
        if not without_room:
            state.made_room_at = now  # `turns.py` reserves room once no adapter has found room for a while
        for victim in (state.adapters[key] for key in victims):
            if is_stopped and victim.spec.engine_id == adapter.spec.engine_id and not victim.goes_on:
                for request_id in list(victim.held):  # they wait for the later generation from now on
                    state.hold_elsewhere(victim, adapter, request_id)
            state.evict(victim)
        state.load(adapter)
    return without_room


def _next_ones(state: PlannerState, *, is_paused: bool) -> list[Adapter]:
    """Return the first adapters to load, the one that room is reserved for before all others."""
    if is_paused:
        return [adapter for adapter in state.calling if adapter in state.absent][:_MOST_LOOKED_AT]
    first = state.reserved_for
    next_ones = list(islice(state.absent, _MOST_LOOKED_AT))
    return next_ones if first is None else [first, *(adapter for adapter in next_ones if adapter is not first)]


def _victims(state: PlannerState, adapter: Adapter, is_stopped: bool) -> list[int] | None:
    """Return the keys to evict so that an adapter fits; None where all that may go are not enough."""
    sizes_bytes = [state.cache.expected_bytes(adapter.spec)]
    choices = (state.cache.victims(sizes_bytes, keys) for keys in _may_go(state, adapter, is_stopped))
    return next((victims for victims in choices if victims is not None), None)


def _may_go(state: PlannerState, adapter: Adapter, is_stopped: bool) -> Iterator[list[int]]:
    """Yield the keys of adapters that may go for another, beside idle ones: more only where fewer are not enough."""
    yield []  # idle adapters alone
    if (old := adapter.replaces) is not None and old.is_loaded and not old.is_used:
        # If the new generation's load fails, the old generation is loaded again. Weights that workers were given past
        # the plan are lost: the caller has replaced them.
        yield [old.key]
    if adapter is state.reserved_for:
        yield [other.key for other in state.draining if other.can_be_displaced]
    if is_stopped:
        resting = [it for it in map(state.adapters.__getitem__, state.cache.sizes_bytes) if it.is_loaded]
        resting = [it for it in resting if not (it.calls or it.is_in_flight or it.is_activating)]
        # The requests of earlier generations can wait for the adapter.
        own = [it.key for it in resting if it.spec.engine_id == adapter.spec.engine_id and not it.goes_on]
        yield own
        # An adapter stays if nobody could load the weights again, or if the adapter is to replace another.
        others = [it.key for it in resting if not (it.is_pinned or it.spec.given or it.replaces)]
        yield list({*own, *others})


def _victims_behind(state: PlannerState, adapter: Adapter, before: list[Adapter]) -> list[int] | None:
    """Return the keys to evict so that an adapter fits; None where adapters `before`, without room now, need the room.

    The adapters `before` wait for the `draining` adapters to go, or without a reservation for all others.
    """
    cache = state.cache
    sizes_bytes = [cache.expected_bytes(it.spec) for it in (adapter, *before)]
    if state.reserved_for is None:
        # Only unevictable adapters stay for ever.
        staying = [other.key for other in state.staying if other.key in cache.sizes_bytes]
        return cache.victims(sizes_bytes[:1]) if cache.has_room_beside(sizes_bytes, staying) else None
    # Once the draining adapters have gone there must be room for all, and now for the first.
    victims = cache.victims(sizes_bytes, gone={other.key for other in state.draining})
    return victims if victims is not None and cache.has_room(sizes_bytes[:1], victims) else None


def _runs_soon(state: PlannerState, adapter: Adapter) -> bool:
    """Return whether a loaded adapter would run soon: few adapters in host memory come before.

    A load that comes too early evicts an adapter that would run before.
    """
    return state.ready.count_before(adapter) < state.slots.total + MAX_LOADS - state.loads
