"""Which running adapters take no further requests, so that a slot or room in host memory passes on to others.

Runs in the engine core process, in each plan of a step, after free slots and free room were given away. In go the
adapters that still wait; the functions change the planner's state, and return the time at which to plan again though
nothing changes.

`state.py` has the words. A leaving adapter still runs requests that have run before, further parts of clients' requests
that run, and requests of a better priority than the request that waits for its place. Leaving and draining end as soon
as no adapter waits any more.
"""

from __future__ import annotations

from collections.abc import Mapping

from lora_plugins.scheduler.adapter import LONGEST_DRAIN_S, Adapter
from lora_plugins.scheduler.request_queue import priority_of
from lora_plugins.scheduler.state import PlannerState, SlotPool

_NEVER = float("inf")
_PATIENT_RUNS = 2  # the patience is at least the mean duration of a run, times this


def pass_slots_on(state: PlannerState, now: float, waiting: dict[SlotPool, list[Adapter]], patience_s: float) -> float:
    """Have one more adapter leave its slot where no slot has passed on for a while; return when to look again.

    `waiting`: the first adapters without a slot, of each pool (`give_slots`).
    """
    look_at = _NEVER
    for pool, without_slot in waiting.items():
        # vLLM passes over adapters with a time in `waits_since`. Requests of other adapters wait for rows in a batch,
        # as requests of the base model do: a slot would not help.
        if adapters := [it for it in without_slot if it.waits_since is not None]:
            look_at = min(look_at, _pass_slots_of(pool, state, adapters, now, patience_s))
        else:
            # Nobody waits: the patience counts from now, and adapters that left this pool take requests again.
            pool.passed_on_at = now
            for adapter in [it for it in state.leaving if it in pool.owners and it not in state.draining]:
                state.leave(adapter, None)
    return look_at


def pass_room_on(state: PlannerState, now: float, without_room: list[Adapter], patience_s: float) -> float:
    """Reserve room for the first adapter that has waited for room for a while; return when to look again.

    `without_room`: adapters without room in the host cache, in order (`load_wanted`).
    """
    adapter = state.reserved_for
    if adapter is None:
        if not without_room or without_room[0].waits_since is None:
            return _NEVER
        adapter = without_room[0]
        look_at = max(state.made_room_at, without_room[0].waits_since) + share_s(state, patience_s)
        if look_at > now:
            return look_at
    # A chosen adapter that runs nothing can be evicted in the next step. The others end with events, which plan again.
    return now if _reserve(state, adapter, now) else _NEVER


def forget_expected(state: PlannerState, now: float) -> float:
    """Expect no parts that are overdue, and let no adapter take parts for too long; return when to look again."""
    next_at = _NEVER
    for adapter in state.expecting:
        for client in [client for client, until in adapter.expected.items() if until <= now]:
            del adapter.expected[client]
            state.touched[adapter] = None
    for adapter in [it for it in state.leaving if it.takes_parts]:
        # Every adapter in `leaving` has a time; `or` is for the type checker.
        until = (adapter.leaving_since or 0.0) + LONGEST_DRAIN_S
        if until < now:
            state.take_no_parts(adapter)
        else:
            next_at = min(next_at, until)
    state.settle(now)
    # Parts are expected for fractions of a second: `next_at` can wait for the plan after such a time.
    return min((until for adapter in state.expecting for until in adapter.expected.values()), default=next_at)


def share_s(state: PlannerState, patience_s: float) -> float:
    """Return for how many seconds no slot, or no room, may pass on: the more adapters run, the fewer."""
    # Pinned adapters do not count (`SlotPool.running`): they pass nothing on.
    passing_on = len(state.copied.running) + len(state.pointed.running)
    return max(patience_s, _PATIENT_RUNS * state.mean_run_s) / max(1, passing_on)


def _pass_slots_of(pool: SlotPool, state: PlannerState, waiting: list[Adapter], now: float, patience_s: float) -> float:
    # Adapters that leave already leave for the request that is first now.
    best = priority_of(waiting[0].order)
    for adapter in [it for it in state.leaving if it in pool.running and it.leaves_for != best]:
        state.leave(adapter, adapter.leaving_since, best)
    running, leaving = len(pool.running), sum(it in pool.running for it in state.leaving)
    # As many adapters leave as wait. The last adapter that takes requests stays, unless no other adapter runs.
    while len(waiting) > leaving and (running - leaving > 1 or running - leaving == running == 1):
        look_at = max(pool.passed_on_at, min(it.waits_since for it in waiting if it.waits_since is not None))
        look_at += share_s(state, patience_s)
        if look_at > now:
            return look_at
        # Of the first waiting adapter that no adapter leaves for yet. A request never makes requests of a better
        # priority drain.
        priority = priority_of(waiting[leaving].order)
        taking = [it for it in pool.owners if it in pool.running and it.leaving_since is None]
        taking = [it for it in taking if it.best_priority >= priority]
        if not taking:
            return _NEVER
        state.waits_for = "--max-loras" if pool is state.copied else "--max-cpu-loras"
        # `look_at`, not `now`: in a late step as many adapters leave as steps in time would have made leave.
        pool.passed_on_at = look_at
        state.leave(min(taking, key=lambda it: len(it.running)), now, priority)
        leaving += 1
    if len(waiting) <= leaving:  # enough adapters leave: the patience counts from now
        pool.passed_on_at = now
    return _NEVER


def _reserve(state: PlannerState, adapter: Adapter, now: float) -> bool:
    """Choose adapters to evict, once unused, for `adapter`: later arrivals, then the fewest running requests.

    The choice stands until the load: without a reservation, requests would use freed room before enough room is free.
    Returns whether one of the adapters that this call has chosen runs nothing.
    """
    state.reserved_for, cache = adapter, state.cache
    # Draining adapters count as gone; the idle adapters among them are counted with all idle adapters below.
    gone = [it.key for it in state.draining if it.key not in cache.idle]
    places, size_bytes = cache.over([cache.expected_bytes(adapter.spec)], gone)
    if places > 0 >= size_bytes:  # bytes are enough, and the number of adapters is not
        state.waits_for = "--max-cpu-loras"
    # Idle adapters may go at any time, so only the rest has to drain.
    places, size_bytes = places - len(cache.idle), size_bytes - cache.idle_bytes
    chosen = _fewest(_may_drain(state, adapter), places, size_bytes, cache.sizes_bytes)
    for other in chosen:
        state.draining[other] = None
        state.leave(other, now if other.leaving_since is None else other.leaving_since, priority_of(adapter.order))
    return any(other.can_be_displaced for other in chosen)


def _may_drain(state: PlannerState, adapter: Adapter) -> list[Adapter]:
    """Return the adapters that may drain for `adapter`, in the order in which they are chosen."""
    # Idle adapters need not drain: they can be evicted at any time.
    residents = [state.adapters[key] for key in state.cache.sizes_bytes if key not in state.cache.idle]
    residents = [it for it in residents if not it.is_unevictable and it not in state.draining]
    behind = [it for it in residents if it.can_be_displaced and it.order > adapter.order]
    running = [it for it in residents if it.is_in_flight and it.best_priority >= priority_of(adapter.order)]
    behind.sort(key=lambda it: it.order, reverse=True)
    return behind + sorted(running, key=lambda it: len(it.running))


def _fewest(in_turn: list[Adapter], places: int, size_bytes: int, sizes_bytes: Mapping[int, int]) -> list[Adapter]:
    """Return the first adapters that together free so many places and bytes, without adapters that need not go."""
    enough = list[Adapter]()
    for other in in_turn:
        if places <= 0 and size_bytes <= 0:
            break
        enough.append(other)
        places, size_bytes = places - 1, size_bytes - sizes_bytes[other.key]
    needed = list[Adapter]()
    for other in enough:
        # A large adapter at the end may free what small adapters before would have freed. Then `places` and
        # `size_bytes` are below 0 by what is freed too much, and the small adapters stay.
        if places < 0 and size_bytes + sizes_bytes[other.key] <= 0:
            places, size_bytes = places + 1, size_bytes + sizes_bytes[other.key]
        else:
            needed.append(other)
    return needed
