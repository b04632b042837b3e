"""Which requests may run: those whose adapter is in a slot. Slots, and room, pass on in a fair order."""

from __future__ import annotations

from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.state import PlannerState, SlotPool

_PATIENT_RUNS = 2


def forget_expected(state: PlannerState, now: float) -> float:
    """Expect no more of clients' requests of which too long nothing came; returns when the next of them is due."""
    expecting = [adapter for adapter in state.in_flight if adapter.expected]
    for adapter in expecting:
        for client in [client for client, until in adapter.expected.items() if until <= now]:
            del adapter.expected[client]
            state.touched[adapter] = None
    state.settle(now)
    return min((until for adapter in expecting for until in adapter.expected.values()), default=float("inf"))


def begin(state: PlannerState, now: float) -> tuple[list[object], dict[SlotPool, list[Adapter]]]:
    """Give slots to those that are next, as far as they can be had.

    Returns the requests that run from now on, and for each kind of slot adapters that wait for one: the first ones,
    and more than could have one.
    """
    admitted: list[object] = []
    waiting: dict[SlotPool, list[Adapter]] = {pool: [] for pool in (state.copied, state.pointed) if pool.size}
    for adapter in [it for it in state.calling if it.needs_slot]:
        waiting[state.pool_of(adapter)].append(adapter)
    left = len(waiting)
    for adapter in state.ready:  # which changes when the state is settled
        pool = state.pool_of(adapter)
        without_slot = waiting[pool]
        if adapter in state.draining or len(without_slot) > pool.size:
            continue
        if (without_slot and adapter.slot is None) or not state.activate(adapter, displaces=True):
            without_slot.append(adapter)  # each slot is used, or being written
            left -= len(without_slot) > pool.size
            if not left:
                break
        elif adapter.is_active:
            admitted += state.admit(adapter, now)
            pool.passed_on_at = now
    return admitted, waiting


def join(state: PlannerState, now: float) -> list[object]:
    """The requests that run from now on beside others of their adapter."""
    return [request for adapter in state.in_flight if adapter.held for request in state.admit(adapter, now)]


def pass_on(
    state: PlannerState,
    now: float,
    waiting: dict[SlotPool, list[Adapter]],
    without_room: list[Adapter],
    patience_s: float,
) -> float:
    """Have one more adapter leave, where others wait and nothing has passed on for a while; returns when to look again.

    `waiting`: for slots, as `begin` says. `without_room`: for room in the host cache, in order.
    """
    next_at = float("inf")
    for pool, adapters in waiting.items():
        if adapters:
            next_at = min(next_at, _pass_slots_on(state, pool, adapters, now, patience_s))
        else:
            pool.passed_on_at = now
            for adapter in pool.owners:
                adapter.leaves_since = adapter.leaves_since if adapter in state.draining else None
    if state.reserved_for is not None:
        _reserve(state, state.reserved_for, now)
    elif without_room:
        look_at = max(state.made_room_at, without_room[0].waits_since or 0.0) + _share(state, patience_s)
        if look_at > now:
            return min(next_at, look_at)
        _reserve(state, without_room[0], now)
        if any(it.can_be_displaced for it in state.draining):
            return now  # the next step has the room
    return next_at


def _share(state: PlannerState, patience_s: float) -> float:
    """How long all that run together may pass on nothing."""
    return max(patience_s, _PATIENT_RUNS * state.mean_run_s) / max(1, sum(not it.is_pinned for it in state.in_flight))


def _pass_slots_on(state: PlannerState, pool: SlotPool, waiting: list[Adapter], now: float, patience_s: float) -> float:
    running = [it for it in pool.owners if it.is_in_flight and not it.is_pinned]
    taking = [it for it in running if it.leaves_since is None]
    # The last that takes any requests stays, unless nobody else would leave.
    while len(waiting) > len(running) - len(taking) and (len(taking) > 1 or (taking and len(running) == 1)):
        share_s = _share(state, patience_s)
        look_at = max(pool.passed_on_at, min(it.waits_since or now for it in waiting)) + share_s
        if look_at > now:
            return look_at
        pool.passed_on_at = look_at
        leaver = min(taking, key=lambda it: len(it.running))
        leaver.leaves_since = now
        taking.remove(leaver)
    if len(waiting) <= len(running) - len(taking):
        pool.passed_on_at = now
    return float("inf")


def _reserve(state: PlannerState, adapter: Adapter, now: float) -> None:
    """Choose who is evicted for an adapter once it is not used: who came later, then who runs the fewest requests.

    The choice stands until it is loaded: else room that one leaves would be used again before the next has left.
    """
    size_bytes = [state.cache.expected_bytes(adapter.spec)]
    residents = [state.adapters[key] for key in state.cache.sizes_bytes]
    residents = [it for it in residents if not it.stays and it not in state.draining]
    behind = [it for it in residents if it.can_be_displaced and not it.is_idle and it.order > adapter.order]
    running = [it for it in residents if it.is_in_flight]
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
        other.leaves_since = now if other.leaves_since is None else other.leaves_since
