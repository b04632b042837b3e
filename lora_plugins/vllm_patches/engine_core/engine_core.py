"""What API servers and offline engines ask an engine core about adapters: load, pin, retire, pause, and where each is.

Runs in the engine core, whose `EngineCore` (vllm/v1/engine/core.py, 0.30 to 0.33) gets one method `lora_plugins_…` for
each utility below, which vLLM's clients reach by name. vLLM's own methods for adapters, `add_lora` and the like, are
wrapped: the planner decides in their place. Calls return a value, or a Future that vLLM answers once the planner's
work has ended. `scheduler/state.py` has the words of the planner.

Where the engine is in the caller's process, no steps are made during a call, so the workers are called with
`lora_plugins_step`.

Touches:
    vllm.v1.engine.core:
        EngineCore{scheduler, model_executor, add_lora(self, lora_request), remove_lora(self, lora_id),
            abort_requests(self, request_ids), pin_lora(self, lora_id), list_loras(self), is_scheduler_paused(self)}
    vllm.lora.request: LoRARequest{lora_name, lora_int_id, lora_path, load_inplace}
    vllm.v1.executor.abstract: Executor.collective_rpc(self, method, timeout, args, ...)
Why: vLLM's own methods run in the engine's loop, and would load there and then.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.process import moves_running
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.messages import AdapterSpec, AdapterState, Outcome, PlannerFigures, RequestsOfName
from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.scheduler.state import PlannerState
from lora_plugins.vllm_patches.engine_core.given_adapters import collective_rpc
from lora_plugins.vllm_patches.engine_core.pausing import pause
from lora_plugins.vllm_patches.engine_core.scheduler import has_planner
from lora_plugins.vllm_patches.engine_core.utilities import answer_of, then, true_or_raise, utility
from lora_plugins.vllm_patches.wrapping import wrap


def patch() -> None:
    """Give every engine core of this process these utilities."""
    from vllm.v1.engine.core import EngineCore

    for added in _UTILITIES:
        # A client sends the name of a utility as text, and the engine core looks the name up on itself
        # (`_handle_client_request` in vllm/v1/engine/core.py, 0.32).
        setattr(EngineCore, f"lora_plugins{added.__name__}", added)
    for method in _METHODS:
        wrap(EngineCore, method.__name__.removeprefix("_"), method, only=has_planner)


# `self` is an EngineCore.


@utility
def _load(self: Any, spec: AdapterSpec, wants_slot: bool, succeeds: int | None = None) -> Future[Outcome] | Outcome:
    """Load an adapter into host memory, and with `wants_slot` into an idle slot.

    `succeeds` is the engine id of an earlier version, whose requests `_move` then moves to this adapter.
    """
    planner = self.scheduler.planner
    planned, state = self.scheduler.specs.complete(spec), planner.state
    # Before the load: afterwards a load and a hit look alike.
    known = state.current.get(planned.engine_id)
    was_loaded = known is not None and known.is_loaded and known.spec.path == planned.path

    def with_size(answer: Outcome) -> Outcome:
        # Of a hit, no time of loading is reported.
        adapter = state.current.get(planned.engine_id)
        if adapter is None or answer.error is not None:
            return answer
        return Outcome(state.cache.expected_bytes(adapter.spec), None if was_loaded else adapter.load_s)

    load = planner.load(planned, time.monotonic(), moves=moves_running(), succeeds=succeeds, wants_slot=wants_slot)
    answer: Future[Outcome] | Outcome = then(answer_of(self, load), with_size)
    return answer


@utility
def _move(self: Any, engine_id: int) -> None:
    """Have requests of the version that the loaded adapter of this id succeeds go on with this adapter."""
    self.scheduler.planner.move(engine_id, time.monotonic())


@utility
def _pin(self: Any, spec: AdapterSpec) -> Future[Outcome] | Outcome:
    """Keep an adapter in host memory and in a slot."""
    return answer_of(self, self.scheduler.planner.pin(self.scheduler.specs.complete(spec), time.monotonic()))


@utility
def _unpin(self: Any, engine_id: int) -> bool:
    """Allow a pinned adapter to be evicted; returns whether it was pinned."""
    return bool(self.scheduler.planner.unpin(engine_id, time.monotonic()))


@utility
def _retire(self: Any, engine_id: int, refusal: LoRAPluginsError | None) -> Future[Outcome] | Outcome:
    """Evict an adapter as soon as it is not used; API servers give its engine id to no other adapter.

    With a `refusal`, requests that have not run, and later requests of the id, end with this error.
    """
    retired = self.scheduler.planner.retire(engine_id, time.monotonic(), refusal, is_last=True)
    return answer_of(self, retired, is_enough_to_begin=True)


@utility
def _pause(self: Any, name: str, mode: PauseMode) -> RequestsOfName:
    """Hold new requests of a name until a resume; return all requests of the name."""
    request_ids = pause(self.scheduler, name, mode)
    # The other engines learn of these clients' requests; with `ABORT` also of requests whose parts all wait.
    clients = self.scheduler.pauses.clients(name, with_waiting=mode is PauseMode.ABORT)
    return RequestsOfName(tuple(request_ids), tuple(clients))


@utility
def _paused(self: Any, name: str, clients: list[str]) -> Future[bool]:
    """Wait until no request of a paused name runs, or its pause ends.

    `clients` are the clients' requests of which any engine runs a part: their parts here run or end first.
    """
    self.scheduler.join(name, clients)
    paused: Future[bool] = self.scheduler.pauses.paused(name)
    return paused


@utility
def _resume(self: Any, name: str) -> None:
    """End the pause of a name: its requests go on."""
    self.scheduler.resume(name)


def _end_api_server(self: Any, number: int) -> None:
    """End the requests of the API server with this number, which has died; engines without LoRA do so too."""
    of_dead = [name for name, request in self.scheduler.requests.items() if request.client_index == number]
    self.abort_requests(of_dead)


@utility
def _residency(self: Any) -> list[AdapterState]:
    """Return each adapter's place, and the ids of its held and running requests."""
    state = self.scheduler.planner.state
    states = {
        # For a caller, a request that a pause has stopped waits like a held request.
        it.spec.engine_id: replace(_state(state, it), held=(*it.held, *it.stopped), running=tuple(it.running))
        for it in state.adapters.values()
    }
    # Requests that came during a pause belong to no adapter yet: the planner learns of them after the resume.
    for request in self.scheduler.pauses.held:
        engine_id = request.lora_request.lora_int_id
        known = states.get(engine_id) or AdapterState(engine_id, request.lora_request.lora_name)
        states[engine_id] = replace(known, held=(*known.held, request.request_id))
    return list(states.values())


def _state(state: PlannerState, adapter: Adapter) -> AdapterState:
    return AdapterState(
        adapter.spec.engine_id,
        adapter.spec.name,
        state.cache.sizes_bytes.get(adapter.key, 0),
        adapter.is_loaded,
        adapter.is_active,
        adapter.is_pinned,
        adapter.rank,
    )


@utility
def _figures(self: Any) -> PlannerFigures:
    """Return the planner's counts, for metrics."""
    state = self.scheduler.planner.state
    cache = state.cache
    return PlannerFigures(
        slots=(state.pointed if state.pointed.size else state.copied).size,  # the kind that ordinary adapters take
        held=state.closed_count + self.scheduler.stopped_count,
        host_bytes=cache.used_bytes,
        host_max_adapters=cache.max_adapters,
        host_max_bytes=cache.max_bytes,
        loaded=tuple(_state(state, adapter) for adapter in state.adapters.values() if adapter.is_loaded),
        stats=state.stats,
        is_paused=self.is_scheduler_paused(),
    )


# Replacements of vLLM's methods, where the engine has a planner; `original` is vLLM's own.


def _add_lora(_: Any, self: Any, lora_request: Any) -> Any:
    """Load by the planner, and answer as vLLM does: once the adapter is loaded, true or an error."""
    specs = self.scheduler.specs
    spec, is_other = specs.of(lora_request), specs.is_other(lora_request)
    load = self.scheduler.planner.load(
        spec, time.monotonic(), is_other=is_other, wants_slot=True, moves=moves_running()
    )
    return then(answer_of(self, load), true_or_raise)


def _remove_lora(_: Any, self: Any, lora_id: int) -> bool:
    """Retire the adapter: as in vLLM, later requests do not find the id, and the call waits for no running request."""
    planner = self.scheduler.planner
    is_known = lora_id in planner.state.current
    answer_of(self, planner.retire(lora_id, time.monotonic()), is_enough_to_begin=True)
    return is_known


def _pin_lora(original: Any, self: Any, lora_id: int) -> Any:
    planner = self.scheduler.planner
    known = planner.state.current.get(lora_id)
    if known is None:  # vLLM's own method then raises its error for an unknown id
        return original(self, lora_id)
    return then(answer_of(self, planner.pin(known.spec, time.monotonic())), true_or_raise)


def _list_loras(_: Any, self: Any) -> Any:
    """Return the ids that later requests find, without generations that were removed or replaced and still run."""
    current = self.scheduler.planner.state.current.items()
    return {engine_id for engine_id, it in current if it.is_loaded or it.replaces is not None}


def _sleep(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """While the engine sleeps nothing writes to slots: the workers' jobs end first.

    In its own process an engine makes steps until its slots are written; in the caller's the engine makes no steps.

    Touches: vllm.v1.engine.core: EngineCore{sleep(self, level, mode), wake_up(self, tags)}
    Why: a thread that writes a slot of a sleeping GPU would end the process, and sleep may discard or unmap the memory
        that slots lie in.
    Until: vLLM has adapters loaded again after a sleep.
    """
    from vllm.v1.engine.core import EngineCoreProc

    if not isinstance(self, EngineCoreProc):
        self.model_executor.collective_rpc("lora_plugins_finish_jobs")
    return original(self, *args, **kwargs)


def _wake_up(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """While the engine slept, slots may have lost their contents; the host cache has not."""
    result = original(self, *args, **kwargs)
    # A wake-up by tags (`wake_up(["weights"])`) leaves the rest asleep: the slots may be unmapped until the last call.
    if not self.model_executor.is_sleeping:
        self.model_executor.collective_rpc("lora_plugins_rewrite_slots")
    return result


_UTILITIES = (_load, _move, _pin, _unpin, _retire, _pause, _paused, _resume, _end_api_server, _residency, _figures)
_METHODS = (_add_lora, _remove_lora, _pin_lora, _list_loras, collective_rpc, _sleep, _wake_up)
