"""vLLM's scheduler, which takes a request from its queue only while the request's adapter is in a slot.

In an engine core, vLLM makes its scheduler of the class that `SchedulerConfig.get_scheduler_cls` names: wrapped, the
method names a subclass, whose methods (`AdmittingScheduler`) precede vLLM's. An engine without LoRA gets an object of
vLLM's own class. In come requests, and the workers' outputs with reports; out go batches with commands for the
workers, and outputs with errors and versions for API servers.

vLLM's waiting queues are replaced by ours (`AdapterQueue`). Each request enters its queue on arrival and keeps its
place, but vLLM sees no request whose adapter has no slot. From the queues, the planner learns which requests come and
which begin to run. Order, priority, counts, grammars, connectors, sessions and aborts are vLLM's own.
`scheduler/state.py` has the words of the planner. A *session* is a request of vLLM's whose input comes in parts.

`has_unfinished_requests` leaves out requests of paused adapters; `has_requests` is also true while workers load.
`lora_config` is copied, with as many `max_loras` as workers have slots.

Touches:
    vllm.config.scheduler: SchedulerConfig.get_scheduler_cls(self)
    vllm.v1.core.sched.scheduler:
        Scheduler{requests, running, waiting, lora_config, hash_block_size, kv_cache_manager, connector,
            max_num_running_reqs, __init__(self, vllm_config, ...),
            _preempt_request(self, request, timestamp, drop_stale_output),
            _free_request(self, request, delay_free_blocks)}
        Scheduler{skipped_waiting} # until 0.30
        Scheduler{kv_holding_waiting, deferred_waiting} # since 0.31
    vllm.v1.core.sched.request_queue:
        RequestQueue{add_request(self, request), pop_request(self), peek_request(self), prepend_request(self, request),
            prepend_requests(self, requests), remove_request(self, request), remove_requests(self, requests)}
    vllm.v1.core.kv_cache_manager: KVCacheManager{usage, get_block_ids(self, request_id), evict_blocks(self, block_ids)}
    vllm.v1.core.sched.interface:
        SchedulerInterface{add_request(self, request), finish_requests(self, request_ids, finished_status),
            schedule(self, throttle_prefills), update_from_output(self, scheduler_output, model_runner_output),
            get_num_unfinished_requests(self), has_unfinished_requests(self), has_requests(self), pause_state(self),
            set_pause_state(self, pause_state)}
        PauseState{UNPAUSED}
    vllm.v1.request:
        Request{request_id, lora_request, client_index, priority, status, pooling_params, trace_headers,
            num_preemptions, take_events(self), is_finished(self)}
        RequestStatus{RUNNING, WAITING_FOR_REMOTE_KVS, WAITING_FOR_STREAMING_REQ, FINISHED_STOPPED,
            FINISHED_LENGTH_CAPPED, FINISHED_ABORTED, FINISHED_ERROR}
    vllm.v1.engine: EngineCoreOutputs{outputs} EngineCoreOutput{kv_transfer_params}
Why: no running request waits for an adapter that is not in its slot, and requests keep their places in vLLM's queue.
Until: vLLM's scheduler asks a plugin before it takes a request from its queue (vllm-project/vllm#51608).
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lora_plugins.errors import AdapterNotFound, InvalidSettings, LoRAPluginsError
from lora_plugins.log import logger
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.messages import AdapterSpec, Command, Failed, Report
from lora_plugins.scheduler.pauses import Pauses
from lora_plugins.scheduler.request_queue import AdapterQueue, Order, QueuePlaces
from lora_plugins.vllm_patches import message_fields
from lora_plugins.vllm_patches.engine_core.answer_versions import AnswerVersions
from lora_plugins.vllm_patches.engine_core.engine_planner import AdapterSpecs, make_planner
from lora_plugins.vllm_patches.engine_core.finite_answers import FiniteAnswers, no_numbers
from lora_plugins.vllm_patches.engine_core.request import (
    assign,
    has_begun,
    has_kv_cache,
    has_weights,
    hash_again,
    is_beam,
    is_in_store,
    is_moved,
    move,
    name_of,
    patch_offloading,
    path_of,
    take_client,
    weights_of,
    weights_path,
)
from lora_plugins.vllm_patches.wrapping import wrap
from lora_plugins.worker.request_types import is_inplace

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
else:
    Scheduler = object  # `with_admission` puts a scheduler class behind `AdmittingScheduler`

_FULL = 0.5  # the fraction of the KV cache in use, above which a server has no memory left for more adapters
# vLLM's queues by attribute, with ranks: vLLM takes from the queue of rank 0 first, whose requests have blocks of the
# KV cache. Releases have different queues: `skipped_waiting` is 0.30's.
_QUEUES = {"kv_holding_waiting": 0, "skipped_waiting": 1, "waiting": 1}


def patch() -> None:
    """Have every engine of this process plan its adapters."""
    from vllm.config.scheduler import SchedulerConfig

    wrap(SchedulerConfig, "get_scheduler_cls", lambda original, config: with_admission(original(config)))


def has_planner(core: Any) -> bool:
    """Return whether the scheduler of an engine core admits requests by a planner of ours: LoRA is on."""
    scheduler = getattr(core, "scheduler", None)  # none yet, where vLLM calls workers while it makes an engine
    return isinstance(scheduler, AdmittingScheduler)


@functools.cache
def with_admission(scheduler: type) -> type:
    """Return a subclass of a scheduler class, vLLM's or a user's; without LoRA, its objects are of the class itself."""

    def make(cls: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        # An object of another class: Python then calls no `__init__` of ours.
        return scheduler(vllm_config, *args, **kwargs) if vllm_config.lora_config is None else object.__new__(cls)

    # Ours first, so that its methods come before vLLM's and reach them by `super()`.
    return type(f"{scheduler.__name__}WithAdmission", (AdmittingScheduler, scheduler), {"__new__": make})


class AdmittingScheduler(Scheduler):  # type: ignore[misc]  # mypy does not read vLLM
    """The methods that precede a scheduler class of vLLM in a subclass.

    Attributes:
        planner: decides which adapters are loaded and active.
        specs: makes the planner's specs of vLLM's `LoRARequest`s.
        given_numbers: the next number for adapters that callers give to workers past the plan (`given_adapters.py`).
        pauses: names whose requests wait for a resume.
        answer_versions: which weights compute which tokens of the answers.
        queues: ours, in the place of vLLM's queues of waiting requests.
    """

    lora_config: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.planner = make_planner(vllm_config)
        self.specs = AdapterSpecs(self.planner.state)
        self.pauses = Pauses(self.planner)
        self.given_numbers = 1
        rows_are_requests = vllm_config.speculative_config is None
        self._finite_answers = FiniteAnswers(self.planner.state.of_request, rows_are_requests=rows_are_requests)
        self.answer_versions = AnswerVersions()
        self._waiting_with_kv: dict[str, Any] = {}  # requests that wait with blocks of the KV cache, by id
        self._counts_loads = True  # whether `has_requests` is true while workers load, without any request
        if vllm_config.kv_transfer_config is not None:
            patch_offloading()
        super().__init__(vllm_config, *args, **kwargs)
        # `schedule` skips a waiting request whose adapter would be the first above `max_loras` in the batch, and
        # asserts the number (vllm/v1/core/sched/scheduler.py, 0.32). Pointed slots may be more than `max_loras`.
        self.lora_config = copy.copy(self.lora_config)
        self.lora_config.max_loras = self.planner.state.slots.total  # vLLM's own limit never binds
        self._places = QueuePlaces(self._enters_queue, self._group_of, self.planner.state.open_groups)
        self.queues = [self._replace_queue(name, rank) for name, rank in _QUEUES.items() if hasattr(self, name)]

    def _replace_queue(self, name: str, rank: int) -> AdapterQueue:
        """Replace the queue of this attribute; raises InvalidSettings where it is not one of vLLM's own classes."""
        from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue

        if type(getattr(self, name)) not in (FCFSRequestQueue, PriorityRequestQueue):
            raise InvalidSettings(
                f"lora_lru_manager with a queue of another kind, {type(getattr(self, name)).__name__}",
                expected="a scheduler class with vLLM's own queues",
                remedy="leave --scheduler-cls out, or lora_lru_manager",
            )
        queue = AdapterQueue(self._places, rank)
        setattr(self, name, queue)
        return queue

    # --- requests ---

    def add_request(self, request: Any) -> None:
        """Add as vLLM does; a session that waited for its next part in the queue waits for its adapter from now on."""
        from vllm.v1.request import RequestStatus

        session = self.requests.get(request.request_id)
        was_idle = session is not None and session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        take_client(request)
        super().add_request(request)
        # vLLM keeps an idle session in the queue: its next part does not enter, so `_enters_queue` is not called.
        if was_idle and session.lora_request is not None and not session.is_finished():
            self._waiting_with_kv[session.request_id] = session
            self._arrives_at_its_place(session)

    def _enters_queue(self, request: Any, rank: int, is_front: bool) -> tuple[Hashable, Order]:
        """Return group and place of a request that enters a queue: a new or preempted request, or an idle session.

        The group None is the base model's, and always open.
        """
        from vllm.v1.request import RequestStatus

        state, name = self.planner.state, request.request_id
        order = state.queue_order.of_request(request, rank, is_front=is_front)
        if request.lora_request is None:
            return None, order
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            # A session that waits for its next part: for the planner, the part that has run is a whole request.
            self._finite_answers.is_whole(name)
            self.planner.ended([name], time.monotonic())
        elif name not in state.of_request:
            self._arrives(request, order)
        elif name in state.of_request[name].running:
            self.planner.waits_again(name, request, order, time.monotonic())
        if has_kv_cache(request):
            self._waiting_with_kv[name] = request
        group = self._group_of(request)
        if group not in state.open_groups and hasattr(self, "deferred_waiting"):
            self.deferred_waiting.add(request)  # as vLLM counts requests that it passes over
        return group, order

    def _group_of(self, request: Any) -> Hashable:
        """Return the group of a waiting request, None for the base model's."""
        return None if request.lora_request is None else self.planner.state.group_of(request.request_id)

    def _arrives_at_its_place(self, request: Any) -> None:
        """Have the planner learn of a request that is in a queue already, and keeps its place there."""
        for queue in self.queues:
            # A session that vLLM has dropped is in no queue.
            if (place := queue.place_of(request)) is not None:
                self._arrives(request, place)
                queue.regroup(request)

    def _arrives(self, request: Any, order: Order) -> None:
        """Hold a request of a paused name; have any other request wait for its adapter."""
        name = request.lora_request.lora_name
        if self.pauses.holds(name, request.lora_client):
            self.pauses.hold(name, request.request_id, request, request.lora_client)
        elif has_begun(request):
            self._arrives_again(request, order)
        else:
            spec, is_other = self.specs.adapter_for_request(request.lora_request)
            self._waits(request, spec, order, is_other=is_other)

    def _arrives_again(self, session: Any, order: Order) -> None:
        """Have a session wait for the weights that it began with: its KV cache is of them."""
        generations, key = self.planner.state.generations, session.lora_request.lora_int_id
        spec, path = self.specs.known(engine_id := generations.engine_id_of(key)), weights_path(session)
        if spec is None and is_in_store(path):  # unloaded between two parts
            spec = self.specs.complete(AdapterSpec(engine_id, session.lora_request.lora_name, path))
        is_current = spec is not None and generations.key_of(spec.engine_id) == key
        if spec is None or not is_current or not has_weights(session, spec, generations.weights_key_of(spec.engine_id)):
            self._refuse(session, _replaced(session))
        else:
            self._waits(session, spec, order, is_other=False)

    def _waits(self, request: Any, spec: AdapterSpec, order: Order, *, is_other: bool) -> None:
        """Have a request wait for the adapter of this spec, of a further generation if `is_other`."""
        self.planner.arrived(
            spec,
            request.request_id,
            request,
            time.monotonic(),
            is_other=is_other,
            is_bound=is_inplace(request.lora_request),
            has_run=has_begun(request),
            order=order,
            client=request.lora_client,
        )
        adapter = self.planner.state.of_request.get(request.request_id)
        if adapter is None:
            return  # refused on arrival
        if (error := self._finite_answers.why_quarantined(adapter)) is not None:
            self._refuse(request, error)
        elif not has_begun(request):
            self._assign(request, adapter)

    def _refuse(self, request: Any, error: LoRAPluginsError) -> None:
        """Have a request end with this error after the next step (`_answer_refused`)."""
        self.planner.ended([request.request_id], time.monotonic())
        self.planner.state.refuse(request, error)

    def _assign(self, request: Any, adapter: Adapter) -> None:
        """Give a request that has not begun its adapter's weights, and note these if the request asked for others."""
        asked_for = request.lora_request.lora_path
        assign(request, adapter)
        if is_in_store(asked_for) and asked_for != request.lora_request.lora_path:  # another version of the name
            self.answer_versions.begin(request.request_id, weights_of(adapter))

    def regroup(self) -> None:
        """Have requests follow the planner: their adapter, its weights, or whether they may run has changed."""
        for request in self.planner.take_regrouped():
            adapter = self.planner.state.of_request.get(request.request_id)
            if adapter is not None and request.request_id in adapter.held:
                self._follow(request, adapter)
            for queue in self.queues:
                queue.regroup(request)

    def _follow(self, request: Any, adapter: Adapter) -> None:
        """Give a held request the present weights of its adapter, or refuse it where its KV cache rules them out."""
        if not has_begun(request):
            self._assign(request, adapter)
        elif adapter.key != request.lora_request.lora_int_id:  # its KV cache is of another generation
            self._refuse(request, _replaced(request))
        elif weights_path(request) != path_of(adapter):
            self._move([(request, adapter)])

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Free as vLLM does, and have the planner learn that the request has ended, in whatever way."""
        from vllm.v1.request import RequestStatus

        freed = super()._free_request(request, *args, **kwargs)
        is_whole = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if is_whole:
            self._finite_answers.is_whole(request.request_id)
        expects_more = is_whole and is_beam(request.request_id)
        self.planner.ended([request.request_id], time.monotonic(), expects_more=expects_more)
        return freed

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """Finish as vLLM does, and forget what is noted of the requests, among them requests that wait for a resume."""
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._forget(request.request_id)
        return finished

    def _forget(self, request_id: str) -> None:
        self.answer_versions.forget(request_id)
        self.pauses.ended(request_id)

    def resume(self, name: str) -> None:
        """Have the requests that a pause has stopped or held go on."""
        self.planner.go_on(name, time.monotonic())
        self._go_on(self.pauses.resume(name))

    def join(self, name: str, clients: Collection[str]) -> None:
        """Have stopped and held parts of these clients' requests run or end, as the parts do that other engines run.

        Without the parts here, a request that has begun elsewhere would be whole only after the pause.
        """
        if (joined := self.pauses.join(name, clients)) is not None:
            self.planner.go_on(name, time.monotonic(), clients)
            self._go_on(joined)

    def _go_on(self, requests: Iterable[Any]) -> None:
        """Have the planner learn of these requests, which a pause has held in vLLM's queues."""
        self.regroup()
        for request in requests:
            self._arrives_at_its_place(request)

    # --- steps ---

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule as vLLM does, from the adapters that are ready; the output carries commands for the workers."""
        commands = self.plan()
        self._places.begin_step()
        output = super().schedule(*args, **kwargs)
        self.answer_versions.batch_is_scheduled()
        self._has_scheduled()
        # Workers carry the commands out before the batch.
        if commands:
            message_fields.attach_commands(output, commands)
        return output

    def plan(self) -> list[Command]:
        """Plan the step; return the work of the workers before its requests run."""
        plan = self.planner.plan(time.monotonic(), is_paused=self._is_paused, is_stopped=self.is_stopped)
        # Moved adapters: their requests go on with the weights of another adapter.
        self._move([(self.requests[name], adapter) for adapter in plan.moved for name in adapter.running])
        self.regroup()
        if self._waiting_with_kv:
            self._preempt_waiting()
        if self.planner.state.waits_for:
            self._say_what_is_short()
        self.answer_calls()
        return plan.commands

    def _say_what_is_short(self) -> None:
        """Log once that a flag makes requests wait although memory is left, as a KV cache with room shows."""
        state, stats = self.planner.state, self.planner.stats
        flag, state.waits_for = state.waits_for, ""
        if not stats.short_of and self.kv_cache_manager.usage < _FULL:
            stats.short_of = flag
            logger.warning("Requests wait for others' adapters, while memory is left for more adapters: raise %s", flag)

    def answer_calls(self) -> None:
        """Answer the calls (of operators, of `collective_rpc`) that can be answered by now."""
        self.planner.answer_calls(time.monotonic(), is_paused=self._is_paused, is_stopped=self.is_stopped)
        self.pauses.answer()

    def set_pause_state(self, pause_state: Any) -> None:
        """Pause or resume as vLLM does; calls do not wait for requests that the pause holds."""
        super().set_pause_state(pause_state)
        self.answer_calls()

    def _preempt_waiting(self) -> None:
        """Preempt sessions that wait for their adapter: others need their KV cache, and their places in the workers."""
        for name, session in list(self._waiting_with_kv.items()):
            if not has_kv_cache(session):  # runs, or has ended, or was preempted
                del self._waiting_with_kv[name]
            elif self._group_of(session) not in self.planner.state.open_groups:
                self.preempt_waiting(session)

    def preempt_waiting(self, request: Any) -> None:
        """Preempt a waiting request that has a KV cache, as vLLM preempts a running request."""
        from vllm.v1.request import RequestStatus

        status, request.status = request.status, RequestStatus.RUNNING  # which `_preempt_request` asserts
        for queue in self.queues:
            if request in queue:
                queue.remove_request(request)  # not `remove_requests`: vLLM has not dropped the session
        self._preempt_request(request, time.monotonic(), drop_stale_output=True)
        request.status = status  # so that the workers get a session's next part as a new request

    def _has_scheduled(self) -> None:
        """Have the planner learn which requests run from now on, and which wait for an adapter while others run."""
        now = time.monotonic()
        self.planner.began(self._places.take_popped(), now)
        if self._is_paused:
            return
        # With room for further requests and none that may run, every waiting request was passed over (None); else those
        # before the last place that vLLM has looked at.
        if self._places.is_exhausted and len(self.running) < self.max_num_running_reqs:
            self.planner.passed_over(None, now)
        elif self._places.reached is not None:
            self.planner.passed_over(self._places.reached, now)

    def _move(self, running: list[tuple[Any, Adapter]]) -> None:
        """Have requests go on with their adapters' present weights."""
        for request, adapter in running:
            name, weights = request.request_id, weights_of(adapter)
            # Tokens that are computed keep their weights: from the next token on, the answer is of the present weights.
            if request.num_computed_tokens or request.num_output_tokens:
                self.answer_versions.move(name, name_of(weights_path(request)), weights)
                move(request, adapter, self.hash_block_size)
            else:  # nothing is computed yet, or a preemption has dropped all of it
                assign(request, adapter)
                self.answer_versions.begin(name, weights)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Preempt as vLLM does; a moved request is computed again with its present weights, under their keys."""
        super()._preempt_request(request, *args, **kwargs)
        if is_moved(request):
            hash_again(request, self.hash_block_size)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Update as vLLM does, with the workers' reports, and errors for requests that were refused."""
        self.answer_versions.batch_is_back(self.requests)
        # Before vLLM takes the step's output: tokens sampled from NaN, or of no weights, must reach no client.
        reports = message_fields.reports_of(model_runner_output)
        errors = self._errors_of_step(model_runner_output, reports)
        for request in errors:
            self._end_without_tokens(request)
        outputs, now = super().update_from_output(scheduler_output, model_runner_output), time.monotonic()
        self._end_dropped()
        # vLLM drops the tokens of requests that have ended, so the errors are their only output.
        for request, error in errors.items():
            _answer(outputs, request, error)
        for output in (output for of_client in outputs.values() for output in of_client.outputs):
            if (versions := self.answer_versions.spans.get(output.request_id)) is not None:
                output.kv_transfer_params = (output.kv_transfer_params or {}) | {message_fields.VERSIONS: versions}
            if output.finish_reason is not None and self._has_ended(output.request_id):
                self._forget(output.request_id)
        self.planner.carried_out(message_fields.commands_of(scheduler_output))
        self.planner.reported(reports, now)
        self._answer_refused(outputs)
        self.answer_calls()
        return outputs

    def _errors_of_step(self, output: Any, reports: Collection[Report]) -> dict[Any, LoRAPluginsError]:
        """Return errors by request, where a step's tokens are of NaN, or of a slot that a worker could not write."""
        errors: dict[Any, LoRAPluginsError] = {
            request: no_numbers(request.lora_request.lora_name, "an answer")
            for request in self._finite_answers.without_numbers(self.requests, output)
        }
        # A report with a key is of a slot that could not be written before the batch: its requests had no weights.
        lost = {report.key: report.error for report in reports if isinstance(report, Failed) and report.key}
        for request in self.running if lost else ():
            if request.lora_request is not None and request.lora_request.lora_int_id in lost:
                errors[request] = lost[request.lora_request.lora_int_id]
        return errors

    def _end_dropped(self) -> None:
        """Free the places of sessions that vLLM has dropped from its queues, and that never run again.

        A preempted session whose stale output ends its part is queued again, and then removed (`stopped_preempted_reqs`
        in vllm/v1/core/sched/scheduler.py, 0.30 to 0.33).
        """
        removed, self._places.removed = self._places.removed, []
        for request in removed:
            is_queued = any(request in queue for queue in self.queues)
            if not is_queued and self.requests.get(request.request_id) is request:
                self.planner.ended([request.request_id], time.monotonic())

    def _end_without_tokens(self, request: Any) -> None:
        """End a request, and drop its blocks from the prefix cache: their values are of NaN, or of no weights."""
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
        """End the refused requests, with an output for each; an error of None ends a request as aborted."""
        from vllm.v1.request import RequestStatus

        for request, error in self.planner.take_refused():
            if self.requests.get(request.request_id) is not request:
                continue  # the client has left
            status = RequestStatus.FINISHED_ABORTED if error is None else RequestStatus.FINISHED_ERROR
            if self.finish_requests(request.request_id, status):
                _answer(outputs, request, error)

    # --- counts ---

    @property
    def _is_paused(self) -> bool:
        return bool(self.pause_state != 0)  # 0 is `PauseState.UNPAUSED`

    @property
    def is_stopped(self) -> bool:
        """Whether nothing runs until a pause ends: nothing is in flight, or the pause stops what is in flight too."""
        return self._is_paused and self.get_num_unfinished_requests() <= 0

    @property
    def stopped_count(self) -> int:
        """How many requests wait for the resume of their adapter."""
        return self.planner.state.stopped_count + self.pauses.held_count

    def has_unfinished_requests(self) -> bool:
        """Answer as vLLM does, without requests that wait for the resume of their adapter: vLLM must not spin for them.

        Requests wait for a resume in `waiting`, and are in no count during a pause of vLLM's.
        """
        stopped = 0 if self._is_paused else self.stopped_count
        return bool(self.get_num_unfinished_requests() > stopped) or self._receives_kv

    @property
    def _receives_kv(self) -> bool:
        """Whether a connector loads blocks for a waiting request: steps must go on to see the end of the load."""
        from vllm.v1.request import RequestStatus

        if self.connector is None or not self.stopped_count:
            return False
        # The last of the queues, `waiting`, has no request with blocks.
        statuses = (request.status for queue in self.queues[:-1] for request in queue)
        return any(status == RequestStatus.WAITING_FOR_REMOTE_KVS for status in statuses)

    def has_requests(self) -> bool:
        """Return whether to go on with steps: for requests, and for jobs of the workers without any request."""
        has_work = super().has_requests() or self.planner.state.refused
        has_work = has_work or (self.pauses.expects_parts and not self._is_paused)
        if not self._counts_loads:  # see `without_loads`
            return bool(has_work) or self.planner.is_writing
        return bool(has_work) or self.planner.has_work(is_paused=self._is_paused, is_stopped=self.is_stopped)

    @contextmanager
    def without_loads(self) -> Iterator[None]:
        """Within the block, `has_requests` counts requests and slots that are being written, for which a pause waits.

        Loads into host memory, for which a pause does not wait, are left out.
        """
        self._counts_loads = False
        try:
            yield
        finally:
            self._counts_loads = True


def _answer(outputs: dict[int, Any], request: Any, error: LoRAPluginsError | None) -> None:
    """Add a last output for a request to its client's outputs, with the error; None for an aborted request."""
    from vllm.v1.engine import EngineCoreOutputs

    of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
    of_client.outputs.append(message_fields.last_output(request, error))


def _replaced(session: Any) -> AdapterNotFound:
    return AdapterNotFound("a version that was replaced meanwhile", adapter=session.lora_request.lora_name)
