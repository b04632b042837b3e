"""What API servers and offline engines ask of the planner, as utilities of vLLM's engine core.

Methods are added to `EngineCore` (vllm/v1/engine/core.py, 0.30 to 0.33), where vLLM's clients reach them by name, and
those that vLLM has for adapters are replaced.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.process import moves_running
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.messages import AdapterSpec, AdapterState, Change, Outcome, PlannerFigures
from lora_plugins.scheduler.planner import Planner
from lora_plugins.scheduler.state import PlannerState
from lora_plugins.vllm_patches.engine_core.scheduler import AdmissionMixin
from lora_plugins.vllm_patches.engine_core.utilities import answer_of, then, true_or_raise, utility
from lora_plugins.vllm_patches.wrapping import wrap


def patch() -> None:
    """Give every engine core of this process these utilities."""
    from vllm.v1.engine.core import EngineCore

    for added in (_load, _pin, _unpin, _retire, _residency, _figures):
        setattr(EngineCore, f"lora_plugins{added.__name__}", added)
    for name, wrapper in _WRAPPERS.items():
        wrap(EngineCore, name, wrapper)


# `self` is an EngineCore.


@utility
def _load(self: Any, spec: AdapterSpec, wants_slot: bool, moves: bool = False) -> Future[Outcome] | Outcome:
    """Load an adapter into host memory, and into a slot if one is idle; what runs with its id moves to it, or not."""
    scheduler = _scheduler(self)
    planned, state = scheduler.planned(spec), scheduler.planner.state
    known = state.current.get(planned.engine_id)
    was_loaded = known is not None and known.is_loaded and known.spec.path == planned.path

    def with_size(answer: Outcome) -> Outcome:
        adapter = state.current.get(planned.engine_id)
        if adapter is None or answer.error is not None:
            return answer
        return Outcome(state.cache.expected_bytes(adapter.spec), None if was_loaded else adapter.load_s)

    load = scheduler.planner.load(planned, time.monotonic(), wants_slot=wants_slot, moves=moves)
    answer: Future[Outcome] | Outcome = then(answer_of(self, load), with_size)
    return answer


@utility
def _pin(self: Any, spec: AdapterSpec) -> Future[Outcome] | Outcome:
    """Keep an adapter in host memory and in a slot."""
    scheduler = _scheduler(self)
    return answer_of(self, scheduler.planner.pin(scheduler.planned(spec), time.monotonic()))


@utility
def _unpin(self: Any, engine_id: int) -> bool:
    """Allow a pinned adapter to be evicted; returns whether it was pinned."""
    return bool(_scheduler(self).planner.unpin(engine_id, time.monotonic()))


@utility
def _retire(self: Any, engine_id: int, refusal: LoRAPluginsError | None) -> Future[Outcome] | Outcome:
    """Evict an adapter as soon as it is not used; API servers give its id to no other."""
    retired = _scheduler(self).planner.retire(engine_id, time.monotonic(), refusal, is_last=True)
    return answer_of(self, retired, is_enough_to_begin=True)


@utility
def _residency(self: Any) -> list[AdapterState]:
    """What is known of each adapter: where it is, and which requests are held and run."""
    state = _planner(self).state
    return [
        replace(_state(state, adapter), held=tuple(adapter.held), running=tuple(adapter.running))
        for adapter in state.adapters.values()
    ]


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
    """What the planner counts, for metrics."""
    state = _planner(self).state
    cache = state.cache
    return PlannerFigures(
        slots=state.slots.total,
        held=state.held_count,
        host_bytes=cache.used_bytes,
        host_max_adapters=cache.max_adapters,
        host_max_bytes=cache.max_bytes,
        loaded=tuple(_state(state, adapter) for adapter in state.adapters.values() if adapter.is_loaded),
        stats=state.stats,
    )


def _adding(original: Any) -> Any:
    def add_lora(self: Any, lora_request: Any) -> Any:
        planner = _planner_if_any(self)
        if planner is None:
            return original(self, lora_request)
        spec, is_other = self.scheduler.spec_of(lora_request), self.scheduler.is_other(lora_request)
        load = planner.load(spec, time.monotonic(), is_other=is_other, wants_slot=True, moves=moves_running())
        return then(answer_of(self, load), true_or_raise)

    return add_lora


def _removing(original: Any) -> Any:
    def remove_lora(self: Any, lora_id: int) -> Any:
        planner = _planner_if_any(self)
        if planner is None:
            return original(self, lora_id)
        is_known = lora_id in planner.state.current
        retired = planner.retire(lora_id, time.monotonic())
        if self.scheduler.is_stopped and not retired.done() and self.scheduler.get_request_counts()[0]:
            return is_known  # what runs does not end during this pause
        return then(answer_of(self, retired, is_enough_to_begin=True), lambda _: is_known)

    return remove_lora


def _pinning(original: Any) -> Any:
    def pin_lora(self: Any, lora_id: int) -> Any:
        planner = _planner_if_any(self)
        known = None if planner is None else planner.state.current.get(lora_id)
        if planner is None or known is None:
            return original(self, lora_id)
        return then(answer_of(self, planner.pin(known.spec, time.monotonic())), true_or_raise)

    return pin_lora


def _listing(original: Any) -> Any:
    """What later requests find: not what was removed, or replaced, and still runs."""

    def list_loras(self: Any) -> Any:
        planner = _planner_if_any(self)
        if planner is None:
            return original(self)
        current = planner.state.current.items()
        return {engine_id for engine_id, it in current if it.is_loaded or it.replaces is not None}

    return list_loras


def _calling(original: Any) -> Any:
    """A caller's own code in workers may add adapters and remove them: the planner knows of it before it returns."""

    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        planner = _planner_if_any(self)
        if planner is None or method == "take_notifications":  # in vLLM's own loop (vllm-project/vllm#51433)
            return original(self, method, *args, **kwargs)
        try:
            result = original(self, method, *args, **kwargs)
        except Exception:
            _take_back(self, _changes(self))
            raise
        of_workers = _changes(self)
        if not any(of_workers):
            return result
        agreed = _agreed(of_workers)
        if agreed is None:
            _take_back(self, of_workers)
            raise InvalidAdapter(
                "workers that were given different adapters, or in another order",
                expected="the same in each worker",
                remedy="give every worker the same, in one collective_rpc",
            )

        def end(answer: Outcome) -> Any:
            if answer.error is not None:
                _take_back(self, of_workers, is_planned=True)
            return true_or_raise(answer) and result

        return then(answer_of(self, planner.given(agreed, time.monotonic())), end)

    return collective_rpc


def _changes(core: Any) -> list[list[Change]]:
    """What each worker was given and told to remove; the n-th of all is known by one number in each."""
    first = core.scheduler.given_numbers
    of_workers: list[list[Change]] = core.model_executor.collective_rpc("lora_plugins_changes", args=(first,))
    core.scheduler.given_numbers += max(map(len, of_workers), default=0)
    return of_workers


def _take_back(core: Any, of_workers: list[list[Change]], *, is_planned: bool = False) -> None:
    """What not all workers have, or there is no room for, none keeps; what one has removed, none has."""
    changes = [change for of_worker in of_workers for change in of_worker]
    given = {change.spec.given for change in changes if change.spec is not None}
    if given:
        core.model_executor.collective_rpc("lora_plugins_forget_given", args=(given,))
    removed = [Change(change.engine_id) for change in changes if change.spec is None or is_planned]
    _planner(core).given(removed, time.monotonic())


def _agreed(of_workers: list[list[Change]]) -> list[Change] | None:
    """What all workers were given and told to remove, each its part of it; None where they differ."""
    if len({tuple((change.engine_id, change.spec is None) for change in changes) for changes in of_workers}) > 1:
        return None
    agreed = []
    for first, *others in zip(*of_workers, strict=True):
        if first.spec is not None:
            size_bytes = max(change.spec.size_bytes for change in (first, *others) if change.spec is not None)
            first = replace(first, spec=replace(first.spec, size_bytes=size_bytes))  # noqa: PLW2901 - the largest part
        agreed.append(first)
    return agreed


def _sleeping(original: Any) -> Any:
    """While the engine sleeps nothing is written to slots: what workers are doing ends first.

    An engine in a process of its own goes on with steps until they are done; one in the caller's makes none.
    """

    def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.v1.engine.core import EngineCoreProc

        if _planner_if_any(self) is not None and not isinstance(self, EngineCoreProc):
            self.model_executor.collective_rpc("lora_plugins_finish_jobs")
        return original(self, *args, **kwargs)

    return sleep


def _waking(original: Any) -> Any:
    """While the engine slept, what lay in slots may have been lost; the host cache was not."""

    def wake_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _planner_if_any(self) is not None and not self.model_executor.is_sleeping:
            self.model_executor.collective_rpc("lora_plugins_rewrite_slots")
        return result

    return wake_up


def _scheduler(core: Any) -> Any:
    scheduler = core.scheduler
    if not isinstance(scheduler, AdmissionMixin) or scheduler.planner is None:
        raise RuntimeError("lora_plugins: this engine has no planner, as LoRA is off")
    return scheduler


def _planner_if_any(core: Any) -> Planner | None:
    scheduler = getattr(core, "scheduler", None)  # none yet, where vLLM calls workers while it makes an engine
    planner: Planner | None = getattr(scheduler, "planner", None)
    return planner


def _planner(core: Any) -> Planner:
    planner: Planner = _scheduler(core).planner
    return planner


_WRAPPERS = {
    "add_lora": _adding,
    "remove_lora": _removing,
    "pin_lora": _pinning,
    "list_loras": _listing,
    "collective_rpc": _calling,
    "sleep": _sleeping,
    "wake_up": _waking,
}

LEDGER = (
    Patch(
        """
        vllm.v1.engine.core:
            EngineCore{scheduler, model_executor}
            EngineCore.add_lora(self, lora_request)
            EngineCore.remove_lora(self, lora_id)
            EngineCore.pin_lora(self, lora_id)
            EngineCore.list_loras(self)
            EngineCore.collective_rpc(self, method, timeout, args, kwargs)
        vllm.lora.request:
            LoRARequest{lora_name, lora_int_id, lora_path, is_3d_lora_weight, load_inplace}
        vllm.v1.executor.abstract:
            Executor.collective_rpc(self, method, timeout, args, ...)
        """,
        what="wrapped: loaded, evicted and pinned by the planner; utilities named lora_plugins_… are added. Where the "
        "engine is in the caller's process no steps are made meanwhile, so workers are called with lora_plugins_step",
        why="they run in the engine's loop, and would load there and then",
    ),
    Patch(
        "vllm.v1.engine.core: EngineCoreProc EngineCore.sleep(self, level, mode)",
        what="wrapped: where the engine is in the caller's process, what workers write to slots ends first",
        why="a thread that writes a slot of a sleeping GPU would end the process",
        remove="vLLM has adapters loaded again after a sleep",
    ),
    Patch(
        "vllm.v1.engine.core: EngineCore.wake_up(self, tags)",
        what="wrapped: once nothing sleeps, every worker writes its slots again",
        why="sleep may discard or unmap the memory that slots lie in",
        remove="vLLM has adapters loaded again after a sleep",
    ),
)
