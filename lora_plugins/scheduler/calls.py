"""Answers to open calls: callers who wait for an adapter to be loaded or activated, without a request.

Runs in the engine core process, for the planner, in each plan and after each call or report. A call is answered once
its effect holds for later requests, or once nothing that runs can bring the effect about:

- A call for the load alone is answered as the workers report the load.
- A call that `wants_slot` takes an idle slot. The plan that finds no idle slot, or may write none because of a pause,
  ends the wish, and the call is answered like a call for the load alone.
- A call that `needs_slot`, of a pin, waits for a slot, and for the end of a pause.
- Where no request goes on during a pause and the workers have nothing to do, a load without room is refused.
"""

from __future__ import annotations

from concurrent.futures import Future

from lora_plugins.errors import NoFreeSlot
from lora_plugins.scheduler.state import PlannerState


def activate_called(state: PlannerState, *, is_paused: bool) -> None:
    """Activate the adapters that calls want or need in a slot; an idle slot for a call that `wants_slot`."""
    for adapter in state.calling:
        if not adapter.is_loaded or adapter.is_active:
            continue
        for call in adapter.calls:
            # No slot is written during a pause. A call that only `wants_slot` displaces nobody.
            is_asking = not is_paused and (call.wants_slot or call.needs_slot)
            if is_asking and state.activate(adapter, displaces=call.needs_slot) and adapter.can_be_displaced:
                state.pool_of(adapter).unused[adapter] = None  # a later call of this loop may take the slot
            call.wants_slot = call.wants_slot and adapter.is_activating


def take_answered(state: PlannerState) -> list[Future[None]]:
    """Remove the calls that are done, as far as their callers need to wait; return their futures."""
    answered = []
    for adapter in state.calling:
        if adapter.is_loaded and not adapter.is_activating:
            done = [it for it in adapter.calls if adapter.is_active or not (it.wants_slot or it.needs_slot)]
            if done:
                adapter.calls = [it for it in adapter.calls if it not in done]
                answered += [it.future for it in done]
                state.touched[adapter] = None
    return answered


def without_room(state: PlannerState) -> list[Future[None]]:
    """Return the futures of loads that cannot begin before a pause ends, where nothing runs and no job is left."""
    waiting = [adapter for adapter in state.calling if not adapter.is_loaded]
    return [call.future for adapter in waiting for call in adapter.calls if not call.needs_slot]


def in_use() -> NoFreeSlot:
    """The error of a load without room."""
    return NoFreeSlot(
        "room that requests use, which do not go on during this pause",
        expected="room for one more adapter",
        remedy="resume before, or raise --max-cpu-loras or LORA_PLUGINS_HOST_MAX_BYTES",
    )
