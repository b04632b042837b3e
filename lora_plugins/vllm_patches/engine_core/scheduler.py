"""vLLM's scheduler, with admission by adapter before its queues.

`SchedulerConfig.get_scheduler_cls` is wrapped to return a subclass of whatever class it names. A request that names an
adapter is vLLM's from its arrival: connectors hear of it, aborts and errors end it as any other. Only its way into a
queue waits until the planner admits it (`_enqueue_waiting_request`, the one place by which new requests and sessions
enter a queue, in vllm/v1/core/sched/scheduler.py, 0.30 to 0.33). Requests without an adapter pass through.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cachetools import LRUCache

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot
from lora_plugins.ledger import Patch
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.messages import AdapterSpec, Command
from lora_plugins.scheduler.planner import Planner
from lora_plugins.vllm_patches.engine_core.finite_answers import FiniteAnswers
from lora_plugins.vllm_patches.engine_core.request import (
    VERSIONS,
    assign,
    has_weights_of,
    is_in_store,
    move,
    name_of,
    refused_output,
    tokens_of,
    weights_of,
)
from lora_plugins.vllm_patches.step_messages import StepCommands, StepReports, attach, attached
from lora_plugins.vllm_patches.wrapping import wrap
from lora_plugins.worker.lora_request import is_inplace, is_vllms

_REMEMBERED = 10_000
# The ids by which vLLM's API server divides a client's request: a token of its beams, a prompt of several, one of n.
_BEAM = re.compile(r"(.+)-[0-9a-f]{16}-beam-\d+(-[0-9a-f]{8})?")
_PROMPT = re.compile(r"(cmpl-.+)-\d+-[0-9a-f]{8}")
_OF_SEVERAL = re.compile(r"\d+_(.+)")


class AdmissionMixin(FiniteAnswers):
    """What precedes a scheduler class of vLLM in a subclass."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # By which versions an answer is computed, each from which token on, where it is not the one asked for.
        self._versions: dict[str, list[tuple[str, int]]] = {}
        self.given_numbers = 1  # of what workers were given past the plan
        self.uris: LRUCache[int, str] = LRUCache(_REMEMBERED)  # what adapters were loaded from, by engine id
        self._by_priority = vllm_config.scheduler_config.policy == "priority"
        self._held_again: dict[str, Any] = {}  # sessions with a KV cache, which wait for their adapter since this step
        super().__init__(vllm_config, *args, **kwargs)

    # --- requests ---

    def add_request(self, request: Any) -> None:
        """As vLLM's; a session that has waited for this part, without a place for its adapter, is held again."""
        from vllm.v1.request import RequestStatus

        session = self.requests.get(request.request_id)  # type: ignore[attr-defined]
        was_idle = session is not None and session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        super().add_request(request)  # type: ignore[misc]
        if was_idle and not session.is_finished() and self._is_to_be_held(session):
            for name in ("waiting", "kv_holding_waiting", "skipped_waiting"):  # not every release has both of the last
                if hasattr(self, name):
                    getattr(self, name).remove_requests([session])
            getattr(self, "deferred_waiting", set()).discard(session)
            self._hold_again(session)

    def _enqueue_waiting_request(self, request: Any) -> None:
        """As vLLM's, once a request's adapter has its place; before, it is held."""
        if self._is_to_be_held(request):
            self._hold(request)
        else:
            super()._enqueue_waiting_request(request)  # type: ignore[misc]

    def _is_to_be_held(self, request: Any) -> bool:
        from vllm.v1.request import RequestStatus

        return (
            self.planner is not None
            and request.lora_request is not None
            and request.request_id not in self.planner.state.of_request
            and request.status != RequestStatus.WAITING_FOR_STREAMING_REQ
        )

    def _hold(self, request: Any) -> None:
        spec, is_other = self._meant_by(request.lora_request)
        self._arrived(request, spec, is_other=is_other)

    def _hold_again(self, session: Any) -> None:
        """Hold a session for the weights that it began with: its KV cache is of these."""
        generations, key = self.planner.state.generations, session.lora_request.lora_int_id  # type: ignore[union-attr]
        spec = self._known_spec(generations.engine_id_of(key))
        is_current = spec is not None and generations.key_of(spec.engine_id) == key
        adapter = self.planner.state.adapters.get(key)  # type: ignore[union-attr]
        if spec is None or not is_current or not has_weights_of(session, adapter, spec):
            self.planner.state.refuse(session, _replaced(session))  # type: ignore[union-attr]
        else:
            self._arrived(session, spec, is_other=False)
            self._held_again[session.request_id] = session

    def _preempt_held(self) -> None:
        """Free what sessions keep that were not admitted: else others wait for it, whose slot these wait for.

        As vLLM preempts, so that a worker frees its place too; its next part is what workers are sent again.
        """
        from vllm.v1.request import RequestStatus

        held, self._held_again = self._held_again, {}
        for session in held.values():
            if session.status == RequestStatus.WAITING and session.num_computed_tokens:
                session.status = RequestStatus.RUNNING
                self._preempt_request(session, time.monotonic(), drop_stale_output=True)
                self.waiting.remove_request(session)  # type: ignore[attr-defined]
                session.status = RequestStatus.WAITING

    def _arrived(self, request: Any, spec: AdapterSpec, *, is_other: bool) -> None:
        planner: Planner = self.planner  # type: ignore[assignment]
        planner.arrived(
            spec,
            request.request_id,
            request,
            time.monotonic(),
            is_other=is_other,
            is_bound=is_inplace(request.lora_request),
            priority=request.priority if self._by_priority else 0,
            client=client_of(request.request_id),
        )
        adapter = planner.state.of_request.get(request.request_id)
        if adapter is not None and (error := self.why_quarantined(adapter)) is not None:
            planner.ended([request.request_id], time.monotonic())
            planner.state.refuse(request, error)
            return
        self._assign(request)

    def _assign(self, request: Any) -> None:
        adapter = self.planner.state.of_request.get(request.request_id)  # type: ignore[union-attr]
        if adapter is None:
            return
        asked_for = request.lora_request.lora_path
        assign(request, adapter)
        if is_in_store(asked_for) and asked_for != request.lora_request.lora_path:  # a version that is past, or to come
            self._versions[request.request_id] = [(weights_of(adapter), 0)]

    def is_other(self, lora_request: Any) -> bool:
        """Whether it names other bytes than those of its id: what a path of the store has never changes."""
        if not is_inplace(lora_request):
            return False
        known = self._known_spec(lora_request.lora_int_id)
        is_same_path = known is not None and known.path == lora_request.lora_path
        return not (is_same_path and is_in_store(lora_request.lora_path))

    def _meant_by(self, lora_request: Any) -> tuple[AdapterSpec, bool]:
        """What a request's adapter is, and whether it begins another generation.

        As in vLLM, that is what its id stands for, whatever its path; by another name, it is something else if there
        are files. An adapter that was evicted is still known, where the path has none.
        """
        known = self.planner.state.known(lora_request.lora_int_id)  # type: ignore[union-attr]
        if is_inplace(lora_request):
            return self.spec_of(lora_request), self.is_other(lora_request)
        if known is not None and known.spec.name == lora_request.lora_name:
            return known.spec, False
        spec = self.spec_of(lora_request)
        if not (spec.size_bytes or spec.lora_request is not None):
            return self._known_spec(lora_request.lora_int_id) or spec, False
        return spec, known is not None and known.spec.path != spec.path

    def _known_spec(self, engine_id: int) -> AdapterSpec | None:
        """Of the current generation, or of one that was loaded, and evicted since."""
        state = self.planner.state  # type: ignore[union-attr]
        adapter, evicted = state.known(engine_id), state.cache.known_bytes.get(engine_id)
        return adapter.spec if adapter is not None else evicted[0] if evicted is not None else None

    def spec_of(self, lora_request: Any) -> AdapterSpec:
        """What the planner knows an adapter by, of vLLM's `LoRARequest`."""
        spec = AdapterSpec(
            lora_request.lora_int_id,
            lora_request.lora_name,
            lora_request.lora_path,
            is_3d=bool(getattr(lora_request, "is_3d_lora_weight", False)),
            lora_request=None if is_vllms(lora_request) else lora_request,
        )
        return self.planned(spec, is_inplace=is_inplace(lora_request))

    def planned(self, spec: AdapterSpec, *, is_inplace: bool = False) -> AdapterSpec:
        """What the planner knows an adapter by; its URI is remembered for requests, which come without one."""
        if spec.uri is not None:
            self.uris[spec.engine_id] = spec.uri
        known = None if self.planner is None else self.planner.state.current.get(spec.engine_id)
        is_same = known is not None and known.spec.path == spec.path and spec.lora_request is None
        if known is not None and is_same and not (known.spec.given and is_inplace):
            return known.spec
        return replace(spec, uri=self.uris.get(spec.engine_id), size_bytes=self._weights_bytes(spec))

    def _weights_bytes(self, spec: AdapterSpec) -> int:
        """What the weights will take of host memory; for what was evicted, no file system is asked that may hang."""
        evicted = None if self.planner is None else self.planner.state.cache.known_bytes.get(spec.engine_id)
        if evicted is not None and evicted[0].path == spec.path and is_in_store(spec.path):
            return evicted[0].size_bytes
        return _weights_bytes(spec.path)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """As vLLM's, which knows held requests too."""
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        if self.planner is not None:
            self.planner.ended([request.request_id for request in finished], time.monotonic())
            for request in finished:
                self._versions.pop(request.request_id, None)
        return finished

    # --- steps ---

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Admit who is next, then schedule as vLLM does; commands for the workers ride on the output."""
        commands, self._counts_held = self.plan(), False
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._counts_held = True
        if commands:
            attach(output, StepCommands(tuple(commands)))
        return output

    def plan(self) -> list[Command]:
        """Admit who is next; returns what the workers have to do before these requests run."""
        planner: Planner | None = self.planner
        if planner is None:
            return []
        now = time.monotonic()
        plan = planner.plan(now, is_paused=self._is_paused, is_stopped=self.is_stopped)
        if self.is_stopped and not self._has_work:
            planner.answer_stopped(_in_use(), now)
        self._move(plan.moved)
        for request in plan.admitted:
            self._held_again.pop(request.request_id, None)
            is_begun = request.num_computed_tokens or request.num_preemptions  # a session
            if is_begun and not self._has_own_generation(request):
                planner.state.refuse(request, _replaced(request))
                continue
            self._assign(request)  # the one that it arrived for may have failed to load
            super()._enqueue_waiting_request(request)  # type: ignore[misc]
        if self._held_again:
            self._preempt_held()
        return plan.commands

    def _has_own_generation(self, request: Any) -> bool:
        """Whether it runs with the generation that its KV cache is of."""
        key = self.planner.state.of_request[request.request_id].key  # type: ignore[union-attr]
        return bool(key == request.lora_request.lora_int_id)

    def _move(self, adapters: list[Adapter]) -> None:
        for adapter in adapters:
            for name in adapter.running:
                request = self.requests[name]  # type: ignore[attr-defined]
                if not (request.num_computed_tokens or request.num_output_tokens):
                    assign(request, adapter)  # nothing of it is computed
                    self._versions[name] = [(weights_of(adapter), 0)]
                    continue
                versions = self._versions.setdefault(name, [(name_of(request.lora_request.lora_path), 0)])
                versions.append((weights_of(adapter), tokens_of(request)))
                move(request, adapter, self.hash_block_size)  # type: ignore[attr-defined]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; what has moved is computed again with the weights that it has now, and under their keys."""
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        if len(self._versions.get(request.request_id, ())) > 1:
            adapter = self.planner.state.of_request[request.request_id]  # type: ignore[union-attr]
            move(request, adapter, self.hash_block_size)  # type: ignore[attr-defined]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM's, with what the workers report, and errors for requests that were refused."""
        planner: Planner | None = self.planner
        ended = [] if planner is None else self.end_without_numbers(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if planner is None:
            return outputs
        for request, error in ended:
            _answer(outputs, request, error)
        now = time.monotonic()
        for of_client in outputs.values():
            for output in of_client.outputs:
                if (versions := self._versions.get(output.request_id)) is not None:
                    output.kv_transfer_params = (output.kv_transfer_params or {}) | {VERSIONS: versions}
                if output.finish_reason is not None and self._has_ended(output.request_id):
                    self._versions.pop(output.request_id, None)
                    self.has_ended(output)
                    is_beam = _BEAM.fullmatch(output.request_id) is not None
                    planner.ended([output.request_id], now, expects_more=is_beam)
        planner.carried_out(attached(scheduler_output, StepCommands).commands)
        planner.reported(attached(model_runner_output, StepReports).reports, now)
        if self.lora_config.max_loras != planner.state.slots.total:  # type: ignore[has-type]
            self.lora_config = copy.copy(self.lora_config)  # type: ignore[has-type]
            self.lora_config.max_loras = planner.state.slots.total  # vLLM's own limit never binds
        self._answer_refused(outputs, planner.take_refused())
        return outputs

    def _has_ended(self, request_id: str) -> bool:
        """Whether it has left, or is a session that waits for its next part."""
        from vllm.v1.request import RequestStatus

        request = self.requests.get(request_id)  # type: ignore[attr-defined]
        return request is None or request.is_finished() or request.status == RequestStatus.WAITING_FOR_STREAMING_REQ

    def _answer_refused(self, outputs: dict[int, Any], refused: list[tuple[Any, LoRAPluginsError]]) -> None:
        from vllm.v1.request import RequestStatus

        for request, error in refused:
            if self.requests.get(request.request_id) is not request:  # type: ignore[attr-defined]
                continue  # it has been aborted
            if self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR):
                _answer(outputs, request, error)


def _answer(outputs: dict[int, Any], request: Any, error: LoRAPluginsError) -> None:
    from vllm.v1.engine import EngineCoreOutputs

    outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(refused_output(request, error))


def _replaced(session: Any) -> AdapterNotFound:
    return AdapterNotFound("a version that was replaced meanwhile", adapter=session.lora_request.lora_name)


def _in_use() -> NoFreeSlot:
    return NoFreeSlot(
        "room that requests use, which do not go on during this pause",
        expected="room for one more adapter",
        remedy="resume before, or raise --max-cpu-loras or LORA_PLUGINS_HOST_MAX_BYTES",
    )


def client_of(request_id: str) -> str:
    """What a client's request is called in all the requests that vLLM divides it into; empty where it does not.

    Source: vllm/entrypoints/generate/beam_search/online.py, vllm/entrypoints/openai/completion/serving.py,
    vllm/v1/engine/{parallel_sampling,input_processor}.py, 0.30 to 0.33.
    """
    of_several = _OF_SEVERAL.fullmatch(request_id)
    request_id = of_several.group(1) if of_several else request_id
    part = _BEAM.fullmatch(request_id) or _PROMPT.fullmatch(request_id)
    return part.group(1) if part else request_id if of_several else ""


def _weights_bytes(path: str) -> int:
    """What the weights will take of host memory, as far as their file says; the workers find out more."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.name.startswith("adapter_model."))
    except OSError:
        return 0  # on another node; the workers will report what is wrong with it


def get_scheduler_cls_with_admission(original: Any) -> Any:
    """`SchedulerConfig.get_scheduler_cls`, of classes with admission before them."""

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

    wrap(SchedulerConfig, "get_scheduler_cls", get_scheduler_cls_with_admission)


LEDGER = (
    Patch(
        """
        vllm.config.scheduler:
            SchedulerConfig.get_scheduler_cls(self)
        vllm.v1.core.sched.scheduler:
            Scheduler.__init__(self, vllm_config, ...)
            Scheduler._enqueue_waiting_request(self, request)
            Scheduler._preempt_request(self, request, timestamp, drop_stale_output)
            Scheduler{requests, waiting, lora_config, hash_block_size}
        vllm.v1.core.sched.request_queue:
            RequestQueue.remove_requests(self, requests)
        vllm.v1.core.sched.interface:
            SchedulerInterface.add_request(self, request)
            SchedulerInterface.finish_requests(self, request_ids, finished_status)
            SchedulerInterface.schedule(self, throttle_prefills)
            SchedulerInterface.update_from_output(self, scheduler_output, model_runner_output)
        vllm.v1.request:
            Request{request_id, lora_request, client_index, priority, status, pooling_params, trace_headers}
            Request.take_events(self)
            Request.is_finished(self)
            RequestStatus{WAITING_FOR_STREAMING_REQ, FINISHED_ERROR}
        vllm.v1.engine:
            EngineCoreOutputs{outputs}
            EngineCoreOutput{kv_transfer_params}
        """,
        what="get_scheduler_cls returns a subclass (Admission) of what it names; its methods are extended: a request "
        "that names an adapter enters no queue until the planner admits it; lora_config is copied, with as many "
        "max_loras as workers have slots. Ids of requests are read, to admit what one client asked for as one",
        why="no running request waits for an adapter that is not in its slot",
        remove="vLLM's scheduler asks a plugin before it takes a request from its queue",
    ),
)
