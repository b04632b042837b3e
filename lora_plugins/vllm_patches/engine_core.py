"""What API servers and offline engines ask of the planner, as utilities of vLLM's engine core.

Methods are added to `EngineCore` (vllm/v1/engine/core.py, 0.30 to 0.33), where vLLM's clients reach them by name, and
those that vLLM has for adapters are replaced.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from lora_plugins.errors import error_of
from lora_plugins.ledger import Patch
from lora_plugins.scheduler.adapter import Adapter, Residency
from lora_plugins.scheduler.early_load_reports import EarlyLoadReports
from lora_plugins.scheduler.messages import (
    AdapterSpec,
    AdapterState,
    Answer,
    PlannerFigures,
)
from lora_plugins.scheduler.planner import Planner
from lora_plugins.vllm_patches.engine_utilities import (
    answer_of,
    can_report_early,
    then,
    true_or_raise,
    utility,
)
from lora_plugins.vllm_patches.scheduler import AdmissionMixin


def patch() -> None:
    """Give every engine core of this process these utilities."""
    from vllm.v1.engine.core import EngineCore

    for added in (_load, _pin, _unpin, _retire, _residency, _figures):
        setattr(EngineCore, f"lora_plugins{added.__name__}", added)
    EngineCore.add_lora = _adding(EngineCore.add_lora)
    EngineCore.remove_lora = _removing(EngineCore.remove_lora)
    EngineCore.pin_lora = _pinning(EngineCore.pin_lora)
    EngineCore.sleep = _sleeping(EngineCore.sleep)
    EngineCore.wake_up = _waking(EngineCore.wake_up)


# `self` is an EngineCore.


@utility
def _load(self: Any, spec: AdapterSpec, wants_slot: bool, is_urgent: bool = False) -> Future[Answer] | Answer:
    """Load an adapter into host memory, and into a slot if one is idle.

    An urgent one is answered as soon as it is loaded, while the step goes on.
    """
    scheduler = _scheduler(self)
    planned = _planned_spec(scheduler, spec)
    was_loaded = planned.engine_id in scheduler.planner.placement.cache

    def with_size(answer: Answer) -> Answer:
        if answer != Answer():  # an error, or an early report's
            return answer
        adapter = scheduler.planner.adapters.get(planned.engine_id)
        if adapter is None:
            return answer
        return Answer(scheduler.planner.placement.size_bytes(adapter), None if was_loaded else adapter.load_s)

    is_urgent = is_urgent and can_report_early(self)
    if is_urgent and scheduler.early_reports is None:
        scheduler.early_reports = EarlyLoadReports(self.vllm_config.parallel_config.world_size)
    load = scheduler.planner.load(planned, time.monotonic(), wants_slot=wants_slot, is_urgent=is_urgent)
    answer: Future[Answer] | Answer = then(answer_of(self, load), with_size)
    return answer


@utility
def _pin(self: Any, spec: AdapterSpec) -> Future[Answer] | Answer:
    """Keep an adapter in host memory and in a slot."""
    scheduler = _scheduler(self)
    return answer_of(self, scheduler.planner.pin(_planned_spec(scheduler, spec), time.monotonic()))


@utility
def _unpin(self: Any, engine_id: int) -> bool:
    """Allow a pinned adapter to be evicted; returns whether it was pinned."""
    return bool(_scheduler(self).planner.unpin(engine_id))


@utility
def _retire(self: Any, engine_id: int, refusal: dict[str, str] | None) -> Future[Answer] | Answer:
    """Evict an adapter as soon as it is not used."""
    scheduler = _scheduler(self)
    error = None if refusal is None else error_of(refusal)
    return answer_of(self, scheduler.planner.retire(engine_id, error))


@utility
def _residency(self: Any) -> list[AdapterState]:
    """What is known of each adapter: where it is, and which requests are held and run."""
    planner = _planner(self)
    return [
        replace(_state(planner, adapter), held=tuple(adapter.held), running=tuple(adapter.running))
        for adapter in planner.adapters.values()
    ]


def _state(planner: Planner, adapter: Adapter) -> AdapterState:
    cache, engine_id = planner.placement.cache, adapter.engine_id
    size_bytes = cache.size_bytes(engine_id) if engine_id in cache else 0
    is_loaded = adapter.residency is Residency.LOADED
    name, is_active, is_pinned = adapter.spec.name, adapter.is_active, adapter.is_pinned
    return AdapterState(engine_id, name, size_bytes, is_loaded, is_active, is_pinned, adapter.rank)


@utility
def _figures(self: Any) -> PlannerFigures:
    """What the planner counts, for metrics."""
    planner = _planner(self)
    cache = planner.placement.cache
    loaded = (adapter for adapter in planner.adapters.values() if adapter.residency is Residency.LOADED)
    return PlannerFigures(
        slots=planner.max_running,
        spare_slots=planner.placement.slot_count - planner.max_running,
        held=planner.admission.held_count,
        host_bytes=cache.used_bytes,
        host_max_adapters=cache.max_adapters,
        host_max_bytes=cache.max_bytes,
        loaded=tuple(_state(planner, adapter) for adapter in loaded),
        stats=planner.stats,
    )


def _adding(original: Any) -> Any:
    @functools.wraps(original)
    def add_lora(self: Any, lora_request: Any) -> Any:
        scheduler = self.scheduler
        if _planner_if_any(self) is None:
            return original(self, lora_request)
        error = scheduler.evict_other_with_id_of(lora_request, reload=lora_request.load_inplace)
        if error is not None:
            raise error
        spec = scheduler.spec_of(lora_request)
        answer = answer_of(self, scheduler.planner.load(spec, time.monotonic(), wants_slot=True))
        return then(answer, true_or_raise)

    return add_lora


def _removing(original: Any) -> Any:
    @functools.wraps(original)
    def remove_lora(self: Any, lora_id: int) -> Any:
        planner = _planner_if_any(self)
        if planner is None:
            return original(self, lora_id)
        is_known = lora_id in planner.adapters
        return then(answer_of(self, planner.retire(lora_id, None)), lambda _: is_known)

    return remove_lora


def _pinning(original: Any) -> Any:
    @functools.wraps(original)
    def pin_lora(self: Any, lora_id: int) -> Any:
        planner = _planner_if_any(self)
        known = None if planner is None else planner.adapters.get(lora_id)
        if planner is None or known is None:
            return original(self, lora_id)
        return then(answer_of(self, planner.pin(known.spec, time.monotonic())), true_or_raise)

    return pin_lora


def _sleeping(original: Any) -> Any:
    """While the engine sleeps nothing is written to slots: what workers are doing ends first.

    An engine in a process of its own goes on with steps until they are done; one in the caller's makes none.
    """

    @functools.wraps(original)
    def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.v1.engine.core import EngineCoreProc

        if _planner_if_any(self) is not None and not isinstance(self, EngineCoreProc):
            self.model_executor.collective_rpc("lora_plugins_finish_jobs")
        return original(self, *args, **kwargs)

    return sleep


def _waking(original: Any) -> Any:
    """While the engine slept, what lay in slots may have been lost; the host cache was not."""

    @functools.wraps(original)
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
    planner: Planner | None = getattr(core.scheduler, "planner", None)
    return planner


def _planner(core: Any) -> Planner:
    planner: Planner = _scheduler(core).planner
    return planner


def _planned_spec(scheduler: Any, spec: AdapterSpec) -> AdapterSpec:
    """What the planner knows this adapter by, whose URI is remembered for requests that come with vLLM's own object."""
    from vllm.lora.request import LoRARequest

    if spec.uri is not None:
        scheduler.uris[spec.engine_id] = spec.uri
    request = LoRARequest(
        lora_name=spec.name, lora_int_id=spec.engine_id, lora_path=spec.path, is_3d_lora_weight=spec.is_3d
    )
    planned: AdapterSpec = scheduler.spec_of(request)
    return planned


LEDGER = (
    Patch(
        """
        vllm.v1.engine.core:
            EngineCore{scheduler, model_executor, vllm_config}
            EngineCore.add_lora(self, lora_request)
            EngineCore.remove_lora(self, lora_id)
            EngineCore.pin_lora(self, lora_id)
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
