"""Which adapters are loaded, which have slots, and whose requests may run: one planner for each engine.

Runs in the engine core process, in vLLM's scheduler (`vllm_patches/engine_core/scheduler.py`), which notifies the
planner of requests, calls of API servers, pauses and workers' reports, and asks for a plan before each step. Out come
commands for the workers (`messages.py`), the groups of requests that vLLM may run (`PlannerState.open_groups`), and
futures for callers. This file says what each event means, and in which order a step is planned; each decision has its
file in this folder: `loading.py`, `slots.py`, `turns.py`, `calls.py`, `pins.py`; `state.py` carries decisions out.

`state.py` has the words. The unit is a generation of an adapter: an engine id finds the current generation, and a later
generation is loaded beside the current. The rules:

- Requests wait in vLLM's queue, and vLLM runs them in its order. vLLM sees the requests of adapters in slots; the other
  requests keep their places, and vLLM passes over them.
- An adapter with running requests keeps its slot until the last such request has ended, and takes further requests at
  once. Adapters whose activation costs a copy use the copied slots, others the pointed slots, if there are any. A copy
  that is short beside a step is made before the step (`StepTimes`).
- Adapters are loaded, and get slots, in the order in which vLLM would run their first requests. Where vLLM passes over
  adapters, and for `turns.share_s` no slot has gone from one adapter to another, the adapter with the fewest running
  requests leaves: of its requests only those that have run before, parts of clients' running requests, and requests of
  a better priority than the request that waits for the slot still run. No adapter leaves for requests of a worse
  priority than its running requests have. The last adapter that takes all requests stays, unless no other adapter runs.
- A wanted adapter is loaded at once, unless enough adapters wait in host memory to take all slots before. An adapter
  that finds no room for `turns.share_s` gets room reserved: as few adapters as needed drain, and are then evicted.
- An adapter that can never fit, by size or beside pins, is refused at once, and delays no other adapter.

No adapter starves: docs/explanation/manager.md has the longest wait, which tests/scheduler/test_no_starvation.py holds.

Times are seconds of a clock that never goes back. Not thread-safe: the engine's loop calls the planner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from cachetools import LRUCache

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.scheduler.adapter import Adapter, Held, LoadCall
from lora_plugins.scheduler.calls import activate_called, in_use, take_answered, without_room
from lora_plugins.scheduler.futures import all_of, failed, resolve
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.loading import load_wanted
from lora_plugins.scheduler.messages import (
    Activated,
    AdapterSpec,
    Change,
    Command,
    Evict,
    Failed,
    Loaded,
    Report,
    Slots,
)
from lora_plugins.scheduler.pins import why_not_pinned, why_takes_last_slot
from lora_plugins.scheduler.request_queue import Order, QueueOrder
from lora_plugins.scheduler.slots import give_slots
from lora_plugins.scheduler.state import PlannerState
from lora_plugins.scheduler.stats import Stats
from lora_plugins.scheduler.turns import forget_expected, pass_room_on, pass_slots_on, share_s

PATIENCE_S = 1.0  # see `Planner`
EXPECTED_S = 0.2  # an API server takes at most so long to ask for the next token of beams
_REMEMBERED = 10_000  # the latest so many ended engine ids are known


@dataclass(slots=True)
class StepPlan:
    """The work of one step.

    Attributes:
        commands: for the workers.
        moved: adapters whose running requests go on with other weights.
    """

    commands: list[Command] = field(default_factory=list)
    moved: list[Adapter] = field(default_factory=list)


class Planner:
    """The planner of one engine; the module has the rules.

    Args:
        slots: places in the workers' device memory.
        cache: the budget of the host cache.
        patience_s: for how many seconds no slot may pass to a waiting adapter before an adapter leaves: fewer, the
            more adapters run, and more where runs take longer (`turns.share_s`).
        order: gives the places of calls, and of requests that come without a place; None: a new order.

    Attributes:
        state: read by others; changed by this class, and by functions of this folder that this class calls.
    """

    def __init__(
        self, slots: Slots, cache: HostCache, *, patience_s: float = PATIENCE_S, order: QueueOrder | None = None
    ) -> None:
        self.stats = Stats()
        self.state = PlannerState(slots, cache, self.stats, order or QueueOrder())
        self._patience_s = patience_s
        # Engine ids retired for good: the error for later requests of the id; None where later requests are served all
        # the same. An id that is missing has not ended.
        self._ended_ids: LRUCache[int, LoRAPluginsError | None] = LRUCache(_REMEMBERED)
        # By the id of an adapter that a call has loaded: the id whose requests `move` will give it, and the adapter.
        self._awaiting_move: dict[int, tuple[int, AdapterSpec]] = {}
        self._is_changed = False  # since the last plan
        self._planned_in = (False, False)  # `is_paused` and `is_stopped` of the last plan
        self._look_at = float("inf")  # when to plan again though nothing changes

    def has_work(self, *, is_paused: bool, is_stopped: bool = False) -> bool:
        """Return whether a step without any request would do more than answer refused requests."""
        calling = bool(self.state.calling)
        # A pause that has begun, drained or ended since the last plan changes which calls find room.
        has_news = calling and (is_paused, is_stopped) != self._planned_in
        waits = self._look_at < float("inf")  # as for a client whose next part is expected
        # Without a request, the plan at `_look_at` can help calls, and evictions of retired adapters, only.
        return self.is_busy or has_news or (waits and (calling or any(it.is_retired for it in self.state.in_flight)))

    @property
    def is_busy(self) -> bool:
        """Whether the workers have something to do, or the next plan may find something."""
        return bool(self._is_changed or self.state.jobs or self.state.evicting or self.state.commands)

    @property
    def is_writing(self) -> bool:
        """Whether workers write slots in the background."""
        return any(adapter.is_activating for adapter in self.state.jobs.values())

    # --- requests ---

    def arrived(
        self,
        spec: AdapterSpec,
        request_id: str,
        request: Any,
        now: float,
        *,
        is_other: bool = False,
        is_bound: bool = False,
        has_run: bool = False,
        order: Order,
        client: str = "",
    ) -> None:
        """Note that a request came into vLLM's queue; the request runs, or is refused. Other parameters: see `Held`.

        The request gets the current generation of its engine id, whatever path the spec has, as in vLLM. A spec that
        `is_other` has other weights, and begins a new generation. If the request's generation cannot be loaded, the
        generation before answers, unless the request `is_bound`.
        """
        self.move(spec.engine_id, now)  # API servers name the id only once they have decided for the move
        adapter = self._generation(spec, begins=is_other)
        error = self._ended_ids.get(spec.engine_id) or self.state.cache.why_never_fits(adapter, self.state.staying)
        if error is not None:
            self.state.refuse(request, error)
        else:
            before = adapter.order if adapter.held and not adapter.is_in_flight else None
            held = Held(request, now, adapter.found, order, client, is_bound=is_bound or has_run, has_run=has_run)
            self.state.hold(adapter, request_id, held)
            if before is not None and adapter.order == before:
                return  # one more waiting request, behind the first, changes no plan
        self.state.touched[adapter] = None
        # An adapter in flight has its slot: vLLM runs the request without another plan.
        self._is_changed = self._is_changed or not adapter.is_in_flight

    def began(self, request_ids: Iterable[str], now: float) -> None:
        """Note that vLLM runs requests from now on; requests without an adapter are left alone."""
        for request_id in request_ids:
            if (adapter := self.state.of_request.get(request_id)) is not None:
                self._is_changed = self._is_changed or not adapter.is_in_flight
                self.state.began(adapter, request_id, now)

    def waits_again(self, request_id: str, request: Any, order: Order, now: float) -> None:
        """Note that a running request waits in vLLM's queue again: preempted, or a session with another part."""
        self.state.waits_again(self.state.of_request[request_id], request_id, request, order, now)
        self._is_changed = True

    def passed_over(self, before: Order | None, now: float) -> None:
        """Note that vLLM could have run more requests, and passed over those whose adapters were not ready.

        `before`: the last place in the queue that vLLM has reached; None: vLLM has reached the end.
        """
        self.state.settle(now)
        for adapter in list(takewhile(lambda it: before is None or it.order <= before, self.state.newly_held)):
            if adapter not in self.state.open_groups:
                adapter.waits_since = now
                self.state.newly_held.keep(adapter, is_in=False)
                self._look_at = min(self._look_at, now + share_s(self.state, self._patience_s))

    def ended(self, request_ids: Iterable[str], now: float, *, expects_more: bool = False) -> None:
        """Note that requests have left vLLM's scheduler, in whatever way; requests without an adapter are left alone.

        `expects_more`: the requests are parts of clients' requests with more to come; adapters wait for the next parts.
        """
        for request_id in request_ids:
            adapter = self.state.of_request.get(request_id)
            if adapter is None:
                continue
            if request_id in adapter.held:
                self.state.release(adapter, request_id)
            elif request_id in adapter.stopped:
                self.state.unstop(adapter, request_id)
            elif (client := self.state.ended(adapter, request_id, now)) and expects_more:
                adapter.expected[client] = now + EXPECTED_S
            # While other requests of the adapter run, and no part is expected, the end changes no plan.
            if not adapter.running or adapter.expected:
                self.state.touched[adapter] = None
                self._is_changed = True

    def stop(self, request_id: str) -> None:
        """Note that a pause stops a waiting request; the request keeps its generation in any case."""
        self.state.stop(self.state.of_request[request_id], request_id)
        self._is_changed = True

    def go_on(self, name: str, now: float, clients: Collection[str] | None = None) -> None:
        """Note that the pause of a name has ended: stopped requests wait to run again.

        `clients`: the clients' requests whose parts go on; None: all requests go on.
        """
        for adapter in [it for it in self.state.of_name(name) if it.stopped]:
            self.state.go_on(adapter, now, clients)
            self._changed(adapter, now)

    # --- adapters ---

    def load(
        self,
        spec: AdapterSpec,
        now: float,
        *,
        is_other: bool = False,
        moves: bool = False,
        succeeds: int | None = None,
        wants_slot: bool = False,
        needs_slot: bool = False,
    ) -> Future[None]:
        """Load an adapter into host memory without a request, and perhaps into a slot (`LoadCall`).

        A path unlike the current generation's, or `is_other`, begins another generation, pinned if the current is.
        With `moves`, running requests go on with the new generation's weights from one step on. `succeeds`: another
        engine id, whose requests go on with the adapter once `move` is called; until then nothing of that id changes.
        The future raises a LoRAPluginsError where the adapter cannot be loaded.
        """
        if succeeds is not None:
            self._awaiting_move[spec.engine_id] = succeeds, spec
        known = self.state.known(spec.engine_id)
        adapter = self._generation(spec, begins=is_other or (known is not None and known.spec.path != spec.path))
        is_pinned = known is not None and known.is_pinned
        # A second call for the same generation does not undo the move that the first call asked for.
        adapter.moves = adapter.replaces is not None and (moves or (adapter is known and adapter.moves))
        error = self._ended_ids.get(spec.engine_id) or self.state.cache.why_never_fits(adapter, self.state.staying)
        future = Future[None]() if error is None else failed(error)
        if error is None:
            adapter.is_pinned = is_pinned
            order = self.state.queue_order.of_call(now)
            adapter.calls.append(LoadCall(future, order, wants_slot, needs_slot))
            if is_pinned and adapter is not known:  # a pin needs its slot; nobody reads this future
                adapter.calls.append(LoadCall(Future(), order, needs_slot=True))
        self._changed(adapter, now)
        return future

    def move(self, engine_id: int, now: float) -> None:
        """Have requests of one engine id go on with the adapter `engine_id`, which `load` got as successor of that id.

        From one step on running requests go on, and later requests of the old id get the successor too, as does a pin.
        A request for the successor may come before this call, and does the same (`arrived`). Without such a `load`
        nothing happens.
        """
        state, (succeeded, spec) = self.state, self._awaiting_move.pop(engine_id, (None, None))
        if succeeded is None or spec is None:
            return
        state.generations.follow(succeeded, spec)
        state.cache.known_bytes.pop(succeeded, None)
        if (old := state.known(succeeded)) is None:
            return
        adapter, is_pinned = self._generation(spec, begins=False), old.is_pinned
        adapter.replaces, adapter.moves, adapter.is_pinned = old, True, adapter.is_pinned or is_pinned
        if is_pinned or not adapter.is_loaded:  # a pin needs its slot; an adapter evicted since `load` is loaded again
            adapter.calls.append(LoadCall(Future(), state.queue_order.of_call(now), needs_slot=is_pinned))
        self._retire(old, now)
        self._changed(adapter, now)
        self._undo_pin_of_last_slot(adapter, now)

    def given(self, changes: Iterable[Change], now: float) -> Future[None]:
        """Take up adapters that workers were given, or had to remove, past the plan: each is a new generation.

        The future ends with all loads, or with the first error.
        """
        futures = []
        for change in changes:
            if change.spec is None:
                self.retire(change.engine_id, now)
            else:
                futures.append(self.load(change.spec, now, is_other=True))
        self._refuse_what_never_fits(now)
        whole = all_of(futures)

        def withdraw_rest(done: Future[None]) -> None:
            # The caller gets the first error: the other calls would wait for an answer that nobody reads.
            error = None if done.cancelled() else done.exception()
            for future in [it for it in futures if not it.done()]:
                if isinstance(error, LoRAPluginsError):
                    self.withdraw(future, error, now)

        whole.add_done_callback(withdraw_rest)
        return whole

    def answer_calls(self, now: float, *, is_paused: bool = False, is_stopped: bool = False) -> None:
        """Answer the calls that can be answered (`calls.py`): to be called after each call, plan and report."""
        self._answer(now)
        if is_stopped and not self.has_work(is_paused=is_paused, is_stopped=is_stopped):
            for future in without_room(self.state):
                self.withdraw(future, in_use(), now)

    def _answer(self, now: float) -> None:
        answered = take_answered(self.state)
        # The answered call may have been the last use of its adapter, whose slot another call may wait for.
        self._is_changed = self._is_changed or bool(answered and self.state.calling)
        resolve(answered)
        self.state.settle(now)

    def withdraw(self, future: Future[None], error: LoRAPluginsError, now: float) -> None:
        """Have a caller wait no more: the future raises `error`, and a pin is undone."""
        for adapter in list(self.state.calling):
            for call in [call for call in adapter.calls if call.future is future]:
                adapter.is_pinned = adapter.is_pinned and not call.needs_slot
                adapter.calls.remove(call)
                self._changed(adapter, now)
        if not future.done():
            future.set_exception(error)

    def pin(self, spec: AdapterSpec, now: float) -> Future[None]:
        """Keep an adapter in host memory and in a slot of its own; the future is done when the adapter is in the slot.

        The future raises NoFreeSlot where too little would be left for others, AdapterNotFound for a retired adapter,
        or an error of `load`.
        """
        if spec.engine_id in self._ended_ids:
            going = AdapterNotFound("a version that is being removed", adapter=spec.name)
            return failed(self._ended_ids[spec.engine_id] or going)  # None: retired without a refusal
        if (error := why_not_pinned(self.state, spec)) is not None:
            return failed(error)
        future = self.load(spec, now, needs_slot=True)
        if not future.done():
            adapter = self.state.current[spec.engine_id]
            adapter.is_pinned = True
            self._changed(adapter, now)
            self._undo_pin_of_last_slot(adapter, now)
            self._refuse_what_never_fits(now)
        return future

    def unpin(self, engine_id: int, now: float) -> bool:
        """Allow a pinned adapter to be evicted; returns whether the adapter was pinned."""
        pinned = [adapter for adapter in self.state.pinned if adapter.spec.engine_id == engine_id]
        for adapter in pinned:
            adapter.is_pinned = False
            self._changed(adapter, now)
        return bool(pinned)

    def retire(
        self, engine_id: int, now: float, refusal: LoRAPluginsError | None = None, *, is_last: bool = False
    ) -> Future[None]:
        """Evict an adapter as soon as nothing uses it; the future is done when the workers have evicted the adapter.

        Held requests are served first; with a `refusal`, held requests that have never run are refused. `is_last`: no
        later adapter gets the id, so later requests for the id are refused too, or served where `refusal` is None.
        """
        state = self.state
        self._awaiting_move.pop(engine_id, None)
        # An id may come back with other weights: its next generation gets a key that batches have never seen.
        if is_last:
            self._ended_ids[engine_id] = refusal or self._ended_ids.get(engine_id)  # an earlier refusal stays
        else:
            state.generations.begin(engine_id)
        adapters = [adapter for adapter in state.adapters.values() if adapter.spec.engine_id == engine_id]
        state.cache.known_bytes.pop(engine_id, None)
        futures = [Future[None]() for _ in adapters]
        # All futures before the first `_retire`, which may evict further adapters of this list.
        for adapter, future in zip(adapters, futures, strict=True):
            adapter.retirements.append(future)
            adapter.replaces = None
        for adapter in adapters:
            if refusal is not None:
                state.go_on(adapter, now)
                state.fail(adapter, refusal, spares_begun=True)
            self._retire(adapter, now)
        # Workers may not have carried out earlier evictions of the id: the caller waits for them too.
        for key, waiting in state.evicting.items():
            if state.generations.engine_id_of(key) == engine_id:
                futures.append(Future())
                waiting.append(futures[-1])
        return all_of(futures)

    def _retire(self, adapter: Adapter, now: float) -> None:
        """Have the engine id find the adapter no more; requests that have the adapter end with its weights."""
        adapter.is_retired, adapter.is_pinned = True, False
        if self.state.current.get(adapter.spec.engine_id) is adapter:
            del self.state.current[adapter.spec.engine_id]
        self._changed(adapter, now)

    # --- steps ---

    def plan(self, now: float, *, is_paused: bool = False, is_stopped: bool = False) -> StepPlan:
        """Return the plan of the step that begins now; while paused, no slot is written.

        `is_stopped`: no request goes on during this pause, so calls wait for no request's end, and adapters with
        held requests make room for calls.
        """
        state, plan = self.state, StepPlan()
        state.times.step_begins(now, is_running=bool(state.in_flight) and not is_paused)
        if self._is_changed or self._planned_in != (is_paused, is_stopped) or now >= self._look_at:
            self._planned_in, self._is_changed = (is_paused, is_stopped), False
            state.settle(now)
            self._look_at = forget_expected(state, now)
            if not is_paused:
                plan.moved = self._move_all(now)  # before a new generation gets a slot of its own
            activate_called(state, is_paused=is_paused)
            self._answer(now)
            # Before `give_slots`, which would give slots to adapters that `load_wanted` is about to evict.
            adapters_without_room = load_wanted(state, now, is_paused=is_paused, is_stopped=is_stopped)
            state.settle(now)
            if not is_paused:
                waiting = give_slots(state)
                state.settle(now)
                slots_at = pass_slots_on(state, now, waiting, self._patience_s)
                room_at = pass_room_on(state, now, adapters_without_room, self._patience_s)
                self._look_at = min(self._look_at, slots_at, room_at)
                state.settle(now)
        plan.commands, state.commands = state.commands, []
        self.answer_calls(now, is_paused=is_paused, is_stopped=is_stopped)
        return plan

    def reported(self, reports: Iterable[Report], now: float) -> None:
        """Take up the workers' reports: jobs that ended, or slots that a step could not write."""
        state = self.state
        state.settle(now)
        for report in reports:
            adapter = state.jobs.get(report.job)
            if isinstance(report, Failed) and report.key:  # without a job: a slot that a step could not write
                adapter = state.adapters.get(report.key)
            if adapter is None or not (adapter.job or adapter.is_loaded):
                continue  # evicted meanwhile
            match report:
                case Loaded():
                    self.stats.load_seconds.observe(report.load_s)
                    adapter.load_s, adapter.rank, adapter.is_instant = report.load_s, report.rank, report.is_instant
                    state.loaded(adapter, report.size_bytes, report.load_s)
                    self._undo_pin_of_last_slot(adapter, now)
                    # The room left to others is smaller than the files said, or this adapter was too large and evicted.
                    if adapter.is_unevictable or not adapter.is_loaded:
                        self._refuse_what_never_fits(now)
                    if adapter.is_loaded and adapter.replaces is not None and not adapter.moves:
                        self._replace(adapter, now)
                case Activated():
                    # The planner's own figures decide whether the next copy is made before a step (`StepTimes`).
                    self.stats.activate_seconds.observe(report.activate_s)
                    state.times.copied(state.cache.sizes_bytes[adapter.key], report.activate_s)
                    self.stats.background_activations += 1
                    adapter.is_active = True
                    state.end_job(adapter)
                case Failed():
                    self.stats.load_failures += 1
                    state.evict(adapter)
                    state.fail(adapter, report.error)
            state.touched[adapter] = None
            self._is_changed = True
            state.settle(now)

    def carried_out(self, commands: Sequence[Command]) -> None:
        """Note that the step of `commands` is over."""
        for command in commands:
            if isinstance(command, Evict):
                resolve(self.state.evicting.pop(command.key, ()))

    def take_refused(self) -> list[tuple[Any, LoRAPluginsError | None]]:
        """Return the requests that were refused since the last call, with the errors that answer them (`refused`)."""
        refused, self.state.refused = self.state.refused, []
        return refused

    def take_regrouped(self) -> Iterable[Any]:
        """Return the held requests whose group has changed since the last call."""
        regrouped, self.state.regrouped = self.state.regrouped, {}
        return regrouped.values()

    # --- after a change ---

    def _generation(self, spec: AdapterSpec, *, begins: bool) -> Adapter:
        """Return the current generation; a new generation where there is none, or where another `begins`.

        Later requests wait for the new generation. The generation before serves its own requests, and is retired once
        the new generation is loaded.
        """
        state, engine_id = self.state, spec.engine_id
        replaces = state.current.get(engine_id) or state.known(engine_id)
        if replaces is not None and not begins:
            return replaces
        evicted, is_retired = state.cache.known_bytes.get(engine_id), engine_id in self._ended_ids
        # Of a retired id nobody knows the last weights: a request from before may have the path of earlier weights.
        has_had_others = is_retired and state.generations.key_of(engine_id) != engine_id
        is_other = has_had_others if evicted is None else evicted[0].path != spec.path
        # A key in `adapters`: the id's requests have moved, and run under the key with another id's weights.
        if begins or is_other or state.generations.key_of(engine_id) in state.adapters:
            state.generations.begin(engine_id)
        key = state.generations.key_of(engine_id)
        weights_key = state.generations.weights_key_of(engine_id)
        adapter = Adapter(spec, key, weights_key=weights_key, is_retired=is_retired, replaces=replaces)
        state.adapters[key] = adapter
        if not is_retired:
            state.current[engine_id] = adapter
        return adapter

    def _replace(self, adapter: Adapter, now: float, until: Adapter | None = None) -> None:
        """Retire the generations before a loaded adapter, the latest first: all, or all after `until`."""
        self.state.touched[adapter] = None
        before, adapter.replaces = adapter.replaces, None
        while before is not until and before is not None:
            replaced, before = before, before.replaces
            replaced.replaces = None
            self._retire(replaced, now)

    def _move_all(self, now: float) -> list[Adapter]:
        """Give loaded generations' weights to requests of an earlier generation; return the earlier generations."""
        moved = []
        for adapter in list(self.state.moving):
            # The latest earlier generation with requests to move; generations in between have no such requests.
            earlier = adapter.replaces
            while earlier is not None and not (earlier.goes_on or earlier.stopped):
                earlier = earlier.replaces
            # Weights move between slots of one pool only: a pointed slot cannot take over weights of a copied slot.
            is_movable = earlier is not None and earlier.is_active and earlier.is_instant == adapter.is_instant
            if earlier is not None and earlier.is_in_flight and not is_movable:
                earlier = None  # running requests finish with their own weights
            self._replace(adapter, now, until=earlier)
            if earlier is not None:
                self.state.move(adapter, earlier)
                moved.append(earlier)
        self.state.settle(now)
        return moved

    def _changed(self, adapter: Adapter, now: float) -> None:
        self._is_changed = True
        self.state.touched[adapter] = None
        self.state.settle(now)

    def _undo_pin_of_last_slot(self, adapter: Adapter, now: float) -> None:
        """Undo a pin that leaves no slot for other adapters, and answer the calls that wait for the pin's slot."""
        if (error := why_takes_last_slot(self.state, adapter)) is not None:
            adapter.is_pinned = False
            for call in [call for call in adapter.calls if call.needs_slot]:
                self.withdraw(call.future, error, now)

    def _refuse_what_never_fits(self, now: float) -> None:
        """Refuse the requests and calls of absent adapters that find no room for as long as others stay."""
        self.state.settle(now)
        has_refused = True
        while has_refused:  # requests of a refused generation may then wait for the generation before
            has_refused = False
            for adapter in list(self.state.absent):
                if (error := self.state.cache.why_never_fits(adapter, self.state.staying)) is not None:
                    self.state.fail(adapter, error)
                    self._changed(adapter, now)
                    has_refused = True
