"""vLLM's scheduler, with admission by adapter before its queues.

`SchedulerConfig.get_scheduler_cls` is wrapped to return a subclass of its answer. A request that names an adapter is
vLLM's from its arrival: connectors learn of the request, and aborts and errors end it as any other. Only the way into a
queue waits until the planner admits the request (`_enqueue_waiting_request`, the only place by which new requests and
sessions enter a queue, in vllm/v1/core/sched/scheduler.py, 0.30 to 0.33). Requests without an adapter pass through, and
an engine without LoRA gets an object of vLLM's own class.

A held request waits and is unfinished, so vLLM's counts include held requests. vLLM 0.30 counts its queues in several
places, later releases by `get_request_counts`.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.messages import AdapterSpec, Command
from lora_plugins.scheduler.pauses import Pauses
from lora_plugins.vllm_patches.answer_messages import VERSIONS, aborted_output, refused_output
from lora_plugins.vllm_patches.engine_core.adapter_specs import AdapterSpecs
from lora_plugins.vllm_patches.engine_core.executor import make_planner
from lora_plugins.vllm_patches.engine_core.finite_answers import FiniteAnswers, no_numbers
from lora_plugins.vllm_patches.engine_core.pausing import leave_queues, stop_kept
from lora_plugins.vllm_patches.engine_core.request import (
    assign,
    client_of,
    has_weights_of,
    is_beam,
    is_in_store,
    move,
    name_of,
    weights_of,
)
from lora_plugins.vllm_patches.step_messages import StepCommands, StepReports, attach, attached
from lora_plugins.vllm_patches.wrapping import wrap
from lora_plugins.worker.lora_request import is_inplace

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
else:
    Scheduler = object  # `with_admission` puts a scheduler class behind `AdmittingScheduler`


class AdmittingScheduler(Scheduler):  # type: ignore[misc]  # mypy does not read vLLM
    """The methods that precede a scheduler class of vLLM in a subclass.

    Attributes:
        specs: the meaning of vLLM's `LoRARequest`s. given_numbers: the next number for adapters given past the plan.
        pauses: names whose requests wait for a resume.
    """

    lora_config: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.planner = make_planner(vllm_config)
        self.specs = AdapterSpecs(self.planner.state)
        self.pauses = Pauses(self.planner.state)
        self.given_numbers = 1
        rows_are_requests = vllm_config.speculative_config is None
        self._finite_answers = FiniteAnswers(self.planner.state.of_request, rows_are_requests=rows_are_requests)
        # The versions that compute an answer, each with its first token, unless only the version asked for computes.
        self._versions: dict[str, list[tuple[str, int]]] = {}
        self._by_priority = vllm_config.scheduler_config.policy == "priority"
        self._held_again: dict[str, Any] = {}  # sessions with a KV cache, held since this step
        self._counts_held = self._counts_paused = True
        super().__init__(vllm_config, *args, **kwargs)

    # --- requests ---

    def add_request(self, request: Any) -> None:
        """Add as vLLM does; a session whose adapter has lost its place is held again when its next part comes."""
        from vllm.v1.request import RequestStatus

        session = self.requests.get(request.request_id)
        was_idle = session is not None and session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        # vLLM queues a session's next part inside the call: the session is taken out again afterwards.
        super().add_request(request)
        if was_idle and not session.is_finished() and self._is_to_be_held(session):
            leave_queues(self, session)
            self._hold_again(session)

    def _enqueue_waiting_request(self, request: Any) -> None:
        """Enqueue as vLLM does, once a request's adapter has its place, and its name no pause; before, hold."""
        if self._is_to_be_held(request):
            name = request.lora_request.lora_name
            if self.pauses.holds(name, client := client_of(request.request_id)):
                self.pauses.hold(name, request.request_id, request, client)
                return
            spec, is_other = self.specs.adapter_for_request(request.lora_request)
            self._hold(request, spec, is_other=is_other)
        elif not self._is_stopped(request):  # a session whose next part was there already
            super()._enqueue_waiting_request(request)

    def _is_stopped(self, request: Any) -> bool:
        adapter = self.planner.state.of_request.get(request.request_id)
        return adapter is not None and request.request_id in adapter.stopped and not self._has_ended(request.request_id)

    def _is_to_be_held(self, request: Any) -> bool:
        from vllm.v1.request import RequestStatus

        return (
            request.lora_request is not None
            and request.request_id not in self.planner.state.of_request
            and request.status != RequestStatus.WAITING_FOR_STREAMING_REQ
        )

    def _hold_again(self, session: Any) -> None:
        """Hold a session for the weights that it began with: its KV cache is of them."""
        if self.pauses.holds(name := session.lora_request.lora_name):
            self.pauses.hold(name, session.request_id, session)
            self._held_again[session.request_id] = session
            return
        generations, key = self.planner.state.generations, session.lora_request.lora_int_id
        spec = self.specs.known(generations.engine_id_of(key))
        is_current = spec is not None and generations.key_of(spec.engine_id) == key
        adapter = self.planner.state.adapters.get(key)
        if spec is None or not is_current or not has_weights_of(session, adapter, spec):
            self.planner.state.refuse(session, _replaced(session))
        else:
            self._hold(session, spec, is_other=False)
            self._held_again[session.request_id] = session

    def _preempt_held(self) -> None:
        """Free the KV cache of sessions that were not admitted: a request that waits for blocks may keep their slot.

        As vLLM preempts, so that workers free their places too; the next part is sent to the workers again.
        """
        from vllm.v1.request import RequestStatus

        held, self._held_again = self._held_again, {}
        for session in held.values():
            if session.status == RequestStatus.WAITING and session.num_computed_tokens:
                session.status = RequestStatus.RUNNING  # `_preempt_request` asserts RUNNING
                self._preempt_request(session, time.monotonic(), drop_stale_output=True)
                self.waiting.remove_request(session)
                session.status = RequestStatus.WAITING

    def _hold(self, request: Any, spec: AdapterSpec, *, is_other: bool) -> None:
        self.planner.arrived(
            spec,
            request.request_id,
            request,
            time.monotonic(),
            is_other=is_other,
            is_bound=is_inplace(request.lora_request),
            priority=self.priority_of(request),
            client=client_of(request.request_id),
        )
        adapter = self.planner.state.of_request.get(request.request_id)
        if adapter is None:
            return  # refused on arrival
        if (error := self._finite_answers.why_quarantined(adapter)) is None:
            self._assign(request, adapter)
        else:
            self.planner.ended([request.request_id], time.monotonic())
            self.planner.state.refuse(request, error)

    def priority_of(self, request: Any) -> int:
        """The priority by which adapters are served; 0 where vLLM's own queue has none."""
        return int(request.priority) if self._by_priority else 0

    def _assign(self, request: Any, adapter: Adapter) -> None:
        asked_for = request.lora_request.lora_path
        assign(request, adapter)
        if is_in_store(asked_for) and asked_for != request.lora_request.lora_path:  # an earlier version, or a later
            self._versions[request.request_id] = [(weights_of(adapter), 0)]

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """Finish as vLLM does, held requests too."""
        finished = super().finish_requests(request_ids, finished_status)
        self.planner.ended([request.request_id for request in finished], time.monotonic())
        for request in finished:
            self._forget(request.request_id)
        return finished

    def _forget(self, request_id: str) -> None:
        self._versions.pop(request_id, None)
        self.pauses.ended([request_id])

    def resume(self, name: str) -> None:
        """Have the requests that a pause has stopped or held go on."""
        self.planner.go_on(name, time.monotonic())
        self._go_on(self.pauses.resume(name))

    def join(self, name: str, clients: Collection[str]) -> None:
        """Have parts of clients' requests run, or end, that a pause has stopped or held: other engines had parts."""
        if (joined := self.pauses.join(name, clients)) is not None:
            self.planner.go_on(name, time.monotonic(), clients)
            self._go_on(joined)

    def _go_on(self, requests: Iterable[Any]) -> None:
        for request in requests:
            if request.num_computed_tokens or request.num_preemptions:
                self._hold_again(request)
            else:
                self._enqueue_waiting_request(request)

    # --- steps ---

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Admit the next requests, then schedule as vLLM does; the output carries commands for the workers."""
        # Inside `schedule` vLLM counts its own queues (`get_request_counts`).
        commands, self._counts_held = self.plan(), False
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._counts_held = True
        if commands:
            attach(output, StepCommands(tuple(commands)))
        return output

    def plan(self) -> list[Command]:
        """Admit the next requests; return the work of the workers before these requests run."""
        state = self.planner.state
        stop_kept(self)  # first: a stopped request's slot is free for this plan
        plan = self.planner.plan(time.monotonic(), is_paused=self._is_paused, is_stopped=self.is_stopped)
        self._move([(name, adapter) for adapter in plan.moved for name in adapter.running])
        for request in plan.admitted:
            self._held_again.pop(request.request_id, None)
            adapter = state.of_request[request.request_id]
            is_begun = request.num_computed_tokens or request.num_preemptions  # a session
            if is_begun and adapter.key != request.lora_request.lora_int_id:  # its KV cache is of another generation
                state.refuse(request, _replaced(request))
                continue
            if is_begun and self._has_other_weights(request, adapter):  # a pause has stopped it
                self._move([(request.request_id, adapter)])
                super()._enqueue_waiting_request(request)
                continue
            self._assign(request, adapter)  # the generation of its arrival may have failed to load
            super()._enqueue_waiting_request(request)
        if self._held_again:
            self._preempt_held()
        self.pauses.answer()
        return plan.commands

    def _move(self, running: list[tuple[str, Adapter]]) -> None:
        """Have requests go on with their adapters' present weights."""
        for name, adapter in running:
            request = self.requests[name]
            if not (request.num_computed_tokens or request.num_output_tokens):
                assign(request, adapter)
                self._versions[name] = [(weights_of(adapter), 0)]
                continue
            versions = self._versions.setdefault(name, [(name_of(request.lora_request.lora_path), 0)])
            begins_at = request.num_output_tokens + request.num_output_placeholders  # computed, or on the way
            versions.append((weights_of(adapter), begins_at))
            move(request, adapter, self.hash_block_size)

    def _has_other_weights(self, request: Any, adapter: Adapter) -> bool:
        versions = self._versions.get(request.request_id)
        name = versions[-1][0] if versions else name_of(request.lora_request.lora_path)
        return bool(name != weights_of(adapter))

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Preempt as vLLM does; a moved request is computed again with its present weights, under their keys."""
        super()._preempt_request(request, *args, **kwargs)
        if len(self._versions.get(request.request_id, ())) > 1:
            move(request, self.planner.state.of_request[request.request_id], self.hash_block_size)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Update as vLLM does, with the workers' reports, and errors for requests that were refused."""
        # Before vLLM takes the step's output: tokens sampled from NaN must reach no client.
        without_numbers = self._finite_answers.without_numbers(self.requests, model_runner_output)
        for request in without_numbers:
            self._end_without_numbers(request)
        outputs, now = super().update_from_output(scheduler_output, model_runner_output), time.monotonic()
        for request in without_numbers:
            _answer(outputs, request, no_numbers(request.lora_request.lora_name, "an answer"))
        for of_client in outputs.values():
            for output in of_client.outputs:
                if (versions := self._versions.get(output.request_id)) is not None:
                    output.kv_transfer_params = (output.kv_transfer_params or {}) | {VERSIONS: versions}
                if output.finish_reason is not None and self._has_ended(output.request_id):
                    self._forget(output.request_id)
                    self._finite_answers.has_ended(output)
                    self.planner.ended([output.request_id], now, expects_more=is_beam(output.request_id))
        self.planner.carried_out(attached(scheduler_output, StepCommands).commands)
        self.planner.reported(attached(model_runner_output, StepReports).reports, now)
        slots = self.planner.state.slots.total
        # `schedule` skips a waiting request whose adapter would be the first above `max_loras` in the batch, and
        # asserts the number (vllm/v1/core/sched/scheduler.py, 0.32); pointed slots are more.
        if self.lora_config.max_loras != slots:
            self.lora_config = copy.copy(self.lora_config)
            self.lora_config.max_loras = slots  # vLLM's own limit never binds
        self._answer_refused(outputs)
        self.pauses.answer()
        return outputs

    def _end_without_numbers(self, request: Any) -> None:
        from vllm.v1.request import RequestStatus

        # Before the end: vLLM forgets which blocks a finished request had.
        blocks = {block for of_group in self.kv_cache_manager.get_block_ids(request.request_id) for block in of_group}
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        # The blocks of a finished request keep their keys until another request takes the blocks.
        self.kv_cache_manager.evict_blocks(blocks)

    def _has_ended(self, request_id: str) -> bool:
        """Return whether a request has left, or is a session that waits for its next part."""
        from vllm.v1.request import RequestStatus

        request = self.requests.get(request_id)
        return request is None or request.is_finished() or request.status == RequestStatus.WAITING_FOR_STREAMING_REQ

    def _answer_refused(self, outputs: dict[int, Any]) -> None:
        from vllm.v1.request import RequestStatus

        refused: list[tuple[Any, LoRAPluginsError | None]] = [*self.planner.take_refused()]
        refused += [(request, None) for request in self.pauses.take_aborted()]
        for request, error in refused:
            if self.requests.get(request.request_id) is not request:
                continue  # the client has left
            status = RequestStatus.FINISHED_ABORTED if error is None else RequestStatus.FINISHED_ERROR
            if self.finish_requests(request.request_id, status):
                _answer(outputs, request, error)

    # --- counts ---

    @property
    def _is_paused(self) -> bool:
        return bool(self.pause_state != 0)

    @property
    def is_stopped(self) -> bool:
        """Whether nothing runs until a pause ends: nothing is in flight, or the pause stops what is in flight too."""
        return self._is_paused and self.get_num_unfinished_requests() <= 0

    def get_request_counts(self) -> tuple[int, int]:
        """Return running and waiting requests, with held among waiting; while vLLM schedules, only queued requests.

        From 0.31 on vLLM cuts long prompts, and spreads prefills, by the number of requests.
        """
        running, waiting = super().get_request_counts()
        return running, waiting + (self._held_count if self._counts_held else 0)

    @property
    def _held_count(self) -> int:
        return self.planner.state.held_count + self.pauses.held_count

    def get_num_unfinished_requests(self) -> int:
        """Count as vLLM does, with held requests, unless new requests are paused."""
        if not self._held_count or self._is_paused:
            return int(super().get_num_unfinished_requests())
        unfinished = sum(self.get_request_counts()) - int(self.num_waiting_for_streaming_input)
        return unfinished if self._counts_paused else unfinished - self.pauses.held_count

    def has_finished_requests(self) -> bool:
        """Answer as vLLM does: vLLM compares queued requests with known requests, and held requests are in no queue."""
        if not super().has_finished_requests():
            return False
        is_any_more = len(self.requests) > sum(self.get_request_counts())
        return not self._held_count or bool(self.finished_req_ids) or is_any_more

    def has_requests(self) -> bool:
        """Return whether to go on with steps: for the workers' jobs without any request too; not for paused ones."""
        # vLLM must not spin for requests that a pause holds.
        self._counts_paused = False
        try:
            has_work = super().has_requests() or self.planner.state.refused or self._held_again
        finally:
            self._counts_paused = True
        has_work = has_work or self.pauses.has_aborted or (self.pauses.expects_parts and not self._is_paused)
        return bool(has_work) or self.planner.has_work(is_paused=self._is_paused, is_stopped=self.is_stopped)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Make stats as vLLM does, with held requests among the waiting."""
        stats, state = super().make_stats(*args, **kwargs), self.planner.state
        if stats is not None and self._held_count:
            stats.num_waiting_reqs = self.get_request_counts()[1] - stats.num_skipped_waiting_reqs
            stats.waiting_lora_adapters.update(state.held_by_name + self.pauses.held_by_name)
        return stats


def _answer(outputs: dict[int, Any], request: Any, error: LoRAPluginsError | None) -> None:
    from vllm.v1.engine import EngineCoreOutputs

    output = aborted_output(request) if error is None else refused_output(request, error)
    outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)


def _replaced(session: Any) -> AdapterNotFound:
    return AdapterNotFound("a version that was replaced meanwhile", adapter=session.lora_request.lora_name)


@functools.cache
def with_admission(scheduler: type) -> type:
    """Return a subclass of a scheduler class, vLLM's or a user's; without LoRA, its objects are of the class itself."""

    def make(cls: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        # An object of another class: Python then calls no `__init__` of ours.
        return scheduler(vllm_config, *args, **kwargs) if vllm_config.lora_config is None else object.__new__(cls)

    # Ours first, so that its methods come before vLLM's and reach them by `super()`.
    return type(f"{scheduler.__name__}WithAdmission", (AdmittingScheduler, scheduler), {"__new__": make})


def patch() -> None:
    """Have every engine of this process plan its adapters."""
    from vllm.config.scheduler import SchedulerConfig

    wrap(SchedulerConfig, "get_scheduler_cls", lambda original: lambda config: with_admission(original(config)))


LEDGER = (
    Patch(
        """
        vllm.config.scheduler:
            SchedulerConfig.get_scheduler_cls(self)
        vllm.v1.core.sched.scheduler:
            Scheduler.__init__(self, vllm_config, ...)
            Scheduler._enqueue_waiting_request(self, request)
            Scheduler._preempt_request(self, request, timestamp, drop_stale_output)
            Scheduler{
                requests, waiting, lora_config, hash_block_size, kv_cache_manager, finished_req_ids,
                num_waiting_for_streaming_input}
        vllm.v1.core.kv_cache_manager:
            KVCacheManager.get_block_ids(self, request_id)
            KVCacheManager.evict_blocks(self, block_ids)
        vllm.v1.core.sched.interface:
            SchedulerInterface.add_request(self, request)
            SchedulerInterface.finish_requests(self, request_ids, finished_status)
            SchedulerInterface.schedule(self, throttle_prefills)
            SchedulerInterface.update_from_output(self, scheduler_output, model_runner_output)
            SchedulerInterface.get_request_counts(self)
            SchedulerInterface.get_num_unfinished_requests(self)
            SchedulerInterface.has_finished_requests(self)
            SchedulerInterface.has_requests(self)
            SchedulerInterface.make_stats(self)
            SchedulerInterface.pause_state(self)
            PauseState{UNPAUSED}
        vllm.v1.metrics.stats:
            SchedulerStats{num_waiting_reqs, num_skipped_waiting_reqs, waiting_lora_adapters}
        vllm.v1.request:
            Request{
                request_id, lora_request, client_index, priority, status, pooling_params, trace_headers,
                num_preemptions}
            Request.take_events(self)
            Request.is_finished(self)
            RequestStatus{WAITING_FOR_STREAMING_REQ, FINISHED_ABORTED, FINISHED_ERROR}
        vllm.v1.engine:
            EngineCoreOutputs{outputs}
            EngineCoreOutput{kv_transfer_params}
        """,
        what="get_scheduler_cls returns a subclass (Admission) of what it names; its methods are extended: a request "
        "that names an adapter enters no queue until the planner admits it, and waits and is unfinished until then; "
        "has_requests is also true while workers load; lora_config is copied, with as many max_loras as workers have "
        "slots. Ids of requests are read, to admit what one client asked for as one",
        why="no running request waits for an adapter that is not in its slot; vLLM's metrics and load balancer know of "
        "held requests, and the engine's loop goes on for them",
        remove="vLLM's scheduler asks a plugin before it takes a request from its queue",
    ),
)
