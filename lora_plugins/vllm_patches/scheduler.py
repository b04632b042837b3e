"""vLLM's scheduler, with admission by adapter before it.

`SchedulerConfig.get_scheduler_cls` is wrapped to return a subclass of whatever class it names. A request that names an
adapter is held until the planner admits it; from then on it is vLLM's like any other. Requests without an adapter pass
through. Only public methods are overridden (`SchedulerInterface` in vllm/v1/core/sched/interface.py, 0.30 to 0.33).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable
from typing import Any

from cachetools import LRUCache

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.scheduler.early_load_reports import EarlyLoadReports
from lora_plugins.scheduler.messages import AdapterSpec, Command
from lora_plugins.scheduler.planner import Planner
from lora_plugins.vllm_patches.held_counts import HeldCounts
from lora_plugins.vllm_patches.planner import planner_of
from lora_plugins.vllm_patches.request_errors import refused_output

COMMANDS = "lora_plugins_commands"  # on SchedulerOutput
REPORTS = "lora_plugins_reports"  # on ModelRunnerOutput
_REMEMBERED = 10_000


class AdmissionMixin(HeldCounts):
    """What precedes a scheduler class of vLLM in a subclass."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.planner = planner_of(vllm_config)
        self._refused: list[tuple[Any, LoRAPluginsError]] = []
        self._later_parts: dict[str, list[Any]] = {}  # of sessions that are held, by request id
        self.early_reports: EarlyLoadReports | None = None  # made with the first urgent call
        self.uris: LRUCache[int, str] = LRUCache(_REMEMBERED)  # what adapters were loaded from, by engine id
        self._by_priority = vllm_config.scheduler_config.policy == "priority"
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    # --- requests ---

    def add_request(self, request: Any) -> None:
        """Hold a request that names an adapter; later parts of a session that is held follow it."""
        planner: Planner | None = self.planner
        if (
            planner is None
            or request.lora_request is None
            or getattr(request, "abort_immediately", False)
            or request.request_id in self.requests  # type: ignore[attr-defined]
        ):
            super().add_request(request)  # type: ignore[misc]
            return
        if planner.admission.is_held(request.request_id):
            self._later_parts.setdefault(request.request_id, []).append(request)
            return
        if self.log_stats:  # type: ignore[attr-defined]
            from vllm.v1.engine import EngineCoreEventType

            request.record_event(EngineCoreEventType.QUEUED)
        error = self.evict_other_with_id_of(request.lora_request)
        if error is not None:
            self._refused.append((request, error))
            return
        priority = request.priority if self._by_priority else 0
        spec = self.spec_of(request.lora_request)
        planner.arrived(spec, request.request_id, request, time.monotonic(), priority)

    def evict_other_with_id_of(self, lora_request: Any, *, reload: bool = False) -> LoRAPluginsError | None:
        """Evict another adapter that has this one's id; the error where that one is in use.

        API servers give no id twice; users who make `LoRARequest`s themselves may. `reload`: also from the same path.
        """
        engine_id = lora_request.lora_int_id
        known = None if self.planner is None else self.planner.adapters.get(engine_id)
        if self.planner is None or known is None:
            return None
        if known.spec.path == lora_request.lora_path and not reload:
            return None
        if self.planner.evict_unused(engine_id):
            return None
        return InvalidAdapter(
            f"lora_int_id {engine_id}, which '{known.spec.name}' from {known.spec.path} has, and is used",
            expected="an id of its own for each adapter",
            remedy="give it another lora_int_id, or wait for the requests of the other",
            adapter=lora_request.lora_name,
        )

    def spec_of(self, lora_request: Any) -> AdapterSpec:
        """What the planner knows an adapter by, of vLLM's `LoRARequest`."""
        known = None if self.planner is None else self.planner.adapters.get(lora_request.lora_int_id)
        if known is not None and known.spec.path == lora_request.lora_path:
            return known.spec
        return AdapterSpec(
            lora_request.lora_int_id,
            lora_request.lora_name,
            lora_request.lora_path,
            self.uris.get(lora_request.lora_int_id),
            bool(getattr(lora_request, "is_3d_lora_weight", False)),
            _weights_bytes(lora_request.lora_path),
        )

    def _admit(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if self.log_stats and len(request.events) > 1:  # type: ignore[attr-defined]
            request.events.pop()  # it has been queued since it came
        for part in self._later_parts.pop(request.request_id, ()):
            super().add_request(part)  # type: ignore[misc]

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """As vLLM's, of held requests too."""
        planner: Planner | None = self.planner
        if planner is None:
            return super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        elif request_ids is not None:
            request_ids = list(request_ids)
        cancelled = planner.cancel(request_ids)
        for request in cancelled:
            self._forget(request, finished_status)
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        planner.finished([request.request_id for request in finished], time.monotonic())
        return cancelled + finished

    def _forget(self, request: Any, status: Any) -> None:
        """End a held request, of which the scheduler itself knows nothing."""
        request.status = status
        self._later_parts.pop(request.request_id, None)
        if self.finished_req_ids_dict is not None:  # type: ignore[attr-defined]
            self.finished_req_ids_dict[request.client_index].add(request.request_id)  # type: ignore[attr-defined]

    def has_request(self, request_id: str) -> bool:
        """As vLLM's (which has it from 0.33), of held requests too."""
        if self.planner is not None and self.planner.admission.is_held(request_id):
            return True
        vllms = getattr(super(), "has_request", None)
        return request_id in self.requests if vllms is None else bool(vllms(request_id))  # type: ignore[attr-defined]

    # --- steps ---

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Admit who is next, then schedule as vLLM does; commands for the workers ride on the output."""
        planner: Planner | None = self.planner
        if planner is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        commands = self.plan()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if commands:
            setattr(output, COMMANDS, commands)
        return output

    def plan(self) -> list[Command]:
        """Admit who is next; returns what the workers have to do before these requests run."""
        if self.planner is None:
            return []
        plan = self.planner.plan(time.monotonic(), is_paused=self._is_paused)
        for request in plan.admitted:
            self._admit(request)
        self._refused.extend(plan.refused)
        if self.early_reports is None:
            return plan.commands
        return self.early_reports.with_addresses(plan.commands, self.planner)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM's, with what the workers report, and errors for requests that were refused."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        planner: Planner | None = self.planner
        if planner is None:
            return outputs
        now = time.monotonic()
        for of_client in outputs.values():
            ended = [output.request_id for output in of_client.outputs if output.finish_reason is not None]
            if ended:
                planner.finished([one for one in ended if self._has_ended(one)], now)
        planner.carried_out(getattr(scheduler_output, COMMANDS, ()))
        planner.reported(getattr(model_runner_output, REPORTS, ()), now)
        self._refused.extend(planner.take_refused())
        if self._refused:
            self._answer_refused(outputs)
        return outputs

    def _has_ended(self, request_id: str) -> bool:
        """Whether it has left; a session that waits for its next part has a finish reason too."""
        request = self.requests.get(request_id)  # type: ignore[attr-defined]
        return request is None or bool(request.is_finished())

    def _answer_refused(self, outputs: dict[int, Any]) -> None:
        from vllm.v1.engine import EngineCoreOutputs

        for request, error in self._refused:
            self._later_parts.pop(request.request_id, None)
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.append(refused_output(request, error))
            if self.finished_req_ids_dict is not None:  # type: ignore[attr-defined]
                of_client.finished_requests = (of_client.finished_requests or set()) | {request.request_id}
        self._refused.clear()


def _weights_bytes(path: str) -> int:
    """What the weights will take of host memory, as far as their file says; the workers find out more."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.name.startswith("adapter_model."))
    except OSError:
        return 0  # on another node; the workers will report what is wrong with it


def get_scheduler_cls_with_admission(original: Any) -> Any:
    """`SchedulerConfig.get_scheduler_cls`, of classes with admission before them."""

    @functools.wraps(original)
    def get_scheduler_cls(self: Any) -> type:
        return with_admission(original(self))

    return get_scheduler_cls


@functools.cache
def with_admission(scheduler: type) -> type:
    """A subclass of a scheduler class of vLLM's, or of a user's."""
    return type(f"{scheduler.__name__}WithAdmission", (AdmissionMixin, scheduler), {})


def patch() -> None:
    """Have every engine of this process plan its adapters."""
    from vllm.config.scheduler import SchedulerConfig

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls_with_admission(SchedulerConfig.get_scheduler_cls)


LEDGER = (
    Patch(
        """
        vllm.config.scheduler:
            SchedulerConfig.get_scheduler_cls(self)
        vllm.v1.core.sched.scheduler:
            Scheduler.__init__(self, vllm_config, ...)
            Scheduler{requests, log_stats, finished_req_ids_dict}
        vllm.v1.core.sched.interface:
            SchedulerInterface.add_request(self, request)
            SchedulerInterface.finish_requests(self, request_ids, finished_status)
            SchedulerInterface.has_request(self, request_id)  # since 0.33
            SchedulerInterface.schedule(self, throttle_prefills)
            SchedulerInterface.update_from_output(self, scheduler_output, model_runner_output)
        vllm.v1.request:
            Request{request_id, lora_request, client_index, priority, status, events, pooling_params, trace_headers}
            Request{resumable}
            Request.record_event(self, event_type, timestamp)
            Request.take_events(self)
            Request.is_finished(self)
        vllm.v1.engine:
            EngineCoreEventType{QUEUED}
            EngineCoreOutputs{outputs, finished_requests}
        """,
        what="get_scheduler_cls returns a subclass (Admission) of what it names; its methods are extended: a request "
        "that names an adapter is held until the planner admits it; QUEUED is recorded when it is held",
        why="no running request waits for an adapter that is not in its slot",
    ),
    Patch(
        """
        vllm.v1.core.sched.output: SchedulerOutput{total_num_scheduled_tokens}
        vllm.v1.outputs: ModelRunnerOutput
        """,
        what="plain dataclasses, given the attributes lora_plugins_commands and lora_plugins_reports",
        why="commands reach every worker with the batch that they are for, and reports the scheduler",
    ),
)
