"""Which adapters have slots, and take requests: slots, and room, pass on in the order of vLLM's queue."""

from __future__ import annotations

from collections.abc import Mapping

from lora_plugins.scheduler.adapter import LONGEST_DRAIN_S, Adapter
from lora_plugins.scheduler.state import PlannerState, SlotPool

_PATIENT_RUNS = 2


def forget_expected(state: PlannerState, now: float) -> float:
    """Expect no more of clients' requests that were quiet, or drained, for too long; return when to look again."""
    next_at = float("inf")
    for adapter in state.expecting:
        for client in [client for client, until in adapter.expected.items() if until <= now]:
            del adapter.expected[client]
            state.touched[adapter] = None
    for adapter in [it for it in state.leaving if it.takes_parts]:
        until = (adapter.leaving_since or 0.0) + LONGEST_DRAIN_S
        if until < now:
            state.take_no_parts(adapter)
        else:
            next_at = min(next_at, until)
    state.settle(now)
    return min((until for adapter in state.expecting for until in adapter.expected.values()), default=next_at)


def give_slots(state: PlannerState) -> dict[SlotPool, list[Adapter]]:
    """Give slots to the next adapters, as far as slots can be had.

    Returns for each kind of slot the first adapters without a slot, more than adapters leave.
    """
    waiting: dict[SlotPool, list[Adapter]] = {pool: [] for pool in (state.copied, state.pointed) if pool.size}
    enough = {pool: 2 + sum(it in pool.running for it in state.leaving) for pool in waiting}
    # Calls that wait for a slot come first: no adapter with requests overtakes them.
    for adapter in [it for it in state.calling if it.needs_slot]:
        waiting[state.pool_of(adapter)].append(adapter)
    left = len(waiting)
    for adapter in state.ready:
        pool = state.pool_of(adapter)
        without_slot = waiting[pool]
        if adapter.slot is not None or len(without_slot) >= enough[pool] or adapter in state.draining:
            continue
        # An adapter takes a slot only if no earlier adapter of the pool waits for a slot: no later arrival overtakes.
        if without_slot or not state.activate(adapter, displaces=True):
            without_slot.append(adapter)  # each slot is used, or being written
            left -= len(without_slot) >= enough[pool]
            if not left:
                break
    return waiting


def have_one_leave(
    state: PlannerState,
    now: float,
    waiting: dict[SlotPool, list[Adapter]],
    without_room: list[Adapter],
    patience_s: float,
) -> float:
    """Have one more adapter take no further requests, where others wait and neither slot nor room became free.

    Returns when to look again: others wait for a while first. `waiting`: for slots (`give_slots`). `without_room`:
    for room in the host cache, in order.
    """
    next_at = float("inf")
    for pool, without_slot in waiting.items():
        # vLLM passes over these; the others wait for rows, as without adapters.
        if adapters := [it for it in without_slot if it.waits_since is not None]:
            next_at = min(next_at, _pass_slots_on(state, pool, adapters, now, patience_s))
        else:
            # Nobody waits: the patience counts from now, and adapters that left this pool take requests again.
            pool.passed_on_at = now
            for adapter in [it for it in state.leaving if it in pool.owners and it not in state.draining]:
                state.leave(adapter, None)
    if state.reserved_for is None:
        if not without_room or without_room[0].waits_since is None:
            return next_at
        look_at = max(state.made_room_at, without_room[0].waits_since) + share_s(state, patience_s)
        if look_at > now:
            return min(next_at, look_at)
    is_unused = _reserve(state, state.reserved_for or without_room[0], now)
    return now if is_unused else next_at  # the next step has the room


def share_s(state: PlannerState, patience_s: float) -> float:
    """Return for how many seconds all running adapters together may pass on nothing."""
    passing_on = len(state.copied.running) + len(state.pointed.running)
    return max(patience_s, _PATIENT_RUNS * state.mean_run_s) / max(1, passing_on)


def _pass_slots_on(state: PlannerState, pool: SlotPool, waiting: list[Adapter], now: float, patience_s: float) -> float:
    best = waiting[0].order[1]
    for adapter in [it for it in state.leaving if it in pool.running and it.leaves_for != best]:
        state.leave(adapter, adapter.leaving_since, best)
    running, leaving = len(pool.running), sum(it in pool.running for it in state.leaving)
    # The last adapter that takes requests stays, unless no adapter would leave.
    while len(waiting) > leaving and (running - leaving > 1 or running - leaving == running == 1):
        look_at = max(pool.passed_on_at, min(it.waits_since for it in waiting if it.waits_since is not None))
        look_at += share_s(state, patience_s)
        if look_at > now:
            return look_at
        # A request never makes requests of a better priority drain.
        priority = waiting[leaving].order[1]
        taking = [it for it in pool.owners if it in pool.running and it.leaving_since is None]
        taking = [it for it in taking if it.best_priority >= priority]
        if not taking:
            return float("inf")
        state.waits_for = "--max-loras" if pool is state.copied else "--max-cpu-loras"
        # `look_at`, not `now`: in a late step as many adapters leave as steps in time would have made leave.
        pool.passed_on_at = look_at
        state.leave(min(taking, key=lambda it: len(it.running)), now, priority)
        leaving += 1
    if len(waiting) <= leaving:
        pool.passed_on_at = now
    return float("inf")


def _reserve(state: PlannerState, adapter: Adapter, now: float) -> bool:
    """Choose adapters to evict, once unused, for `adapter`: later arrivals, then the fewest running requests.

    The choice stands until the load: without a reservation, requests would use freed room before enough room is free.
    Returns whether one of those that were chosen now runs nothing.
    """
    state.reserved_for, cache = adapter, state.cache
    gone = [it.key for it in state.draining if it.key not in cache.idle]
    places, size_bytes = cache.over([cache.expected_bytes(adapter.spec)], gone)
    if places > 0 >= size_bytes:
        state.waits_for = "--max-cpu-loras"
    # Idle adapters may go at any time, so only the rest has to drain.
    places, size_bytes = places - len(cache.idle), size_bytes - cache.idle_bytes
    chosen = _fewest(_may_drain(state, adapter), places, size_bytes, cache.sizes_bytes)
    for other in chosen:
        state.draining[other] = None
        state.leave(other, now if other.leaving_since is None else other.leaving_since, adapter.order[1])
    return any(other.can_be_displaced for other in chosen)


def _may_drain(state: PlannerState, adapter: Adapter) -> list[Adapter]:
    """Return the adapters that may drain for `adapter`, in the order in which they are chosen."""
    residents = [state.adapters[key] for key in state.cache.sizes_bytes if key not in state.cache.idle]
    residents = [it for it in residents if not it.is_unevictable and it not in state.draining]
    behind = [it for it in residents if it.can_be_displaced and it.order > adapter.order]
    running = [it for it in residents if it.is_in_flight and it.best_priority >= adapter.order[1]]
    behind.sort(key=lambda it: it.order, reverse=True)
    return behind + sorted(running, key=lambda it: len(it.running))


def _fewest(in_turn: list[Adapter], places: int, size_bytes: int, sizes_bytes: Mapping[int, int]) -> list[Adapter]:
    """Return the first adapters that together free so many places and bytes, without those that can be spared."""
    enough = list[Adapter]()
    for other in in_turn:
        if places <= 0 and size_bytes <= 0:
            break
        enough.append(other)
        places, size_bytes = places - 1, size_bytes - sizes_bytes[other.key]
    needed = list[Adapter]()
    for other in enough:
        # A large adapter at the end frees what small ones before would have freed.
        if places < 0 and size_bytes + sizes_bytes[other.key] <= 0:
            places, size_bytes = places + 1, size_bytes + sizes_bytes[other.key]
        else:
            needed.append(other)
    return needed
