"""Which requests may run: those whose adapter is in a slot. Slots, and room, pass on in a fair order."""

from __future__ import annotations

from collections.abc import Iterable

from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.state import SlotPool, State

_PATIENT_RUNS = 2


def forget_expected(state: State, now: float) -> float:
    """Expect no more of clients' requests of which too long nothing came; returns when the next of them is due."""
    next_at = float("inf")
    for adapter in list(state.in_flight):
        for client in [client for client, until in adapter.expected.items() if until <= now]:
            del adapter.expected[client]
            state.touched[adapter] = None
        next_at = min([next_at, *adapter.expected.values()])
    state.settle(now)
    return next_at


def begin(state: State, now: float) -> list[object]:
    """Give slots to those that are next, as far as they can be had; returns the requests that run from now on."""
    admitted: list[object] = []
    used_up: set[SlotPool] = set()
    for adapter in list(state.ready):
        pool = state.pool_of(adapter)
        if adapter in state.draining or (pool in used_up and adapter.slot is None):
            continue
        if not state.activate(adapter, displaces=True):
            used_up.add(pool)  # each of its slots is used, or being written
        elif adapter.is_active:
            admitted += state.admit(adapter, now)
            pool.passed_on_at = now
    return admitted


def join(state: State, now: float) -> list[object]:
    """The requests that run from now on beside others of their adapter."""
    return [
        request
        for adapter in state.in_flight
        if adapter.held
        for request in state.admit(adapter, now, only_parts=adapter.leaves_since is not None)
    ]


def pass_on(state: State, now: float, without_room: list[Adapter], patience_s: float) -> float:
    """Have one more adapter leave, where others wait and nothing has passed on for a while; returns when to look again.

    `without_room`: those that wait for room in the host cache, in order.
    """
    running = [adapter for adapter in state.in_flight if not adapter.is_pinned]
    patience_s = max(patience_s, _PATIENT_RUNS * state.mean_run_s) / max(1, len(running))
    next_at = float("inf")
    if state.reserved_for is not None:
        _reserve(state, state.reserved_for, now)
    elif without_room:
        next_at = max(state.made_room_at, without_room[0].waits_since or 0.0) + patience_s
        if next_at <= now:
            _reserve(state, without_room[0], now)
    for pool in (state.copied, state.pointed):
        next_at = min(next_at, _pass_slots_on(state, pool, now, patience_s))
    return next_at


def _pass_slots_on(state: State, pool: SlotPool, now: float, patience_s: float) -> float:
    waiting = [it for it in _without_slot(state) if it.slot is None and state.pool_of(it) is pool]
    running = [it for it in pool.owners if it.is_in_flight and not it.is_pinned]
    taking = [it for it in running if it.leaves_since is None]
    if not waiting:
        for adapter in running:
            if adapter not in state.draining:
                adapter.leaves_since = None
    # The last that takes any requests stays, unless nobody else would leave.
    while len(waiting) > len(running) - len(taking) and (len(taking) > 1 or (taking and len(running) == 1)):
        look_at = max(pool.passed_on_at, min(it.waits_since or now for it in waiting)) + patience_s
        if look_at > now:
            return look_at
        pool.passed_on_at = look_at
        leaving = min(taking, key=lambda it: len(it.running))
        leaving.leaves_since = now
        taking.remove(leaving)
    if len(waiting) <= len(running) - len(taking):
        pool.passed_on_at = now
    return float("inf")


def _without_slot(state: State) -> Iterable[Adapter]:
    yield from (adapter for adapter in state.ready if adapter not in state.draining)
    yield from (adapter for adapter in state.calling if adapter.needs_slot and not adapter.held)


def _reserve(state: State, adapter: Adapter, now: float) -> None:
    """Choose who is evicted for an adapter once it is not used: who came later, then who runs the fewest requests.

    The choice stands until it is loaded: else room that one leaves would be used again before the next has left.
    """
    size_bytes = [state.cache.expected_bytes(adapter.spec)]
    residents = [it for key in state.cache.sizes_bytes if (it := state.adapters[key]) not in state.draining]
    behind = [it for it in residents if it.can_be_displaced and not it.is_idle and it.order > adapter.order]
    running = [it for it in residents if it.is_in_flight and not it.is_pinned]
    behind.sort(key=lambda it: it.order, reverse=True)
    running.sort(key=lambda it: len(it.running))
    gone, chosen = state.idle.keys() | {it.key for it in state.draining}, list[Adapter]()
    for other in (*behind, *running):
        if state.cache.has_room(size_bytes, gone | {it.key for it in chosen}):
            break
        chosen.append(other)
    for other in list(chosen):
        without = [it for it in chosen if it is not other]
        if state.cache.has_room(size_bytes, gone | {it.key for it in without}):
            chosen = without
    state.reserved_for = adapter
    for other in chosen:
        state.draining[other] = None
        other.leaves_since = now
