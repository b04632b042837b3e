"""Give slots to adapters whose requests wait, in the order of vLLM's queue, as far as slots are free or unused.

Runs in the engine core process, in each plan of a step outside pauses. In goes the planner's state, in which adapters
get slots; out come the adapters that still wait for a slot. `turns.py` then decides whether adapters in use give up
their slots.
"""

from __future__ import annotations

from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.state import PlannerState, SlotPool


def give_slots(state: PlannerState) -> dict[SlotPool, list[Adapter]]:
    """Give slots to the next adapters, as far as slots can be had.

    Returns for each kind of slot the first adapters without a slot, more than adapters leave.
    """
    waiting: dict[SlotPool, list[Adapter]] = {pool: [] for pool in (state.copied, state.pointed) if pool.size}
    # A bound on the work of a step: thousands of adapters may wait, and the last ones change nothing.
    enough = {pool: 2 + sum(it in pool.running for it in state.leaving) for pool in waiting}
    # Calls that wait for a slot come first: no adapter with requests overtakes them.
    for adapter in [it for it in state.calling if it.needs_slot]:
        waiting[state.pool_of(adapter)].append(adapter)
    pools_to_fill = len(waiting)
    for adapter in state.ready:
        pool = state.pool_of(adapter)
        without_slot = waiting[pool]
        if adapter.slot is not None or len(without_slot) >= enough[pool] or adapter in state.draining:
            continue
        # An adapter takes a slot only if no earlier adapter of the pool waits for a slot: no later arrival overtakes.
        if without_slot or not state.activate(adapter, displaces=True):
            without_slot.append(adapter)  # each slot is used, or being written
            pools_to_fill -= len(without_slot) >= enough[pool]
            if not pools_to_fill:
                break
    return waiting
