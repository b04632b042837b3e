"""An engine in virtual time that asks the planner before each step and has workers that obey it.

The workers know nothing but what the commands say: a dict of what is loaded and a dict of slots. They check that every
command makes sense to them. Requests run for so many steps, one token each; at most `max_rows` of them in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Any

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError
from lora_plugins.scheduler.eviction_policies import make_policy
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import (
    Activate,
    Activated,
    AdapterSpec,
    Command,
    Evict,
    Failed,
    Load,
    Loaded,
    Move,
    Slots,
)
from lora_plugins.scheduler.planner import Planner, StepPlan
from lora_plugins.scheduler.request_queue import Order


def spec(engine_id: int, size_bytes: int = 100) -> AdapterSpec:
    return AdapterSpec(engine_id, f"adapter-{engine_id}", f"/adapters/{engine_id}", size_bytes=size_bytes)


def make_planner(
    slots: int = 2,
    pointed: int = 0,
    max_bytes: int | None = 1000,
    max_adapters: int = 100,
    policy: str = "lru",
    **options: float,
) -> Planner:
    return Planner(Slots(slots, pointed), HostCache(max_bytes, max_adapters, make_policy(policy)), **options)


def place_at_end(planner: Planner, now: float, priority: int = 0) -> Order:
    rank, _, *rest = planner.state.queue_order.of_call(now)
    return (rank, priority, *rest)


def held_count(planner: Planner) -> int:
    return sum(len(it.held) for it in planner.state.adapters.values())


def begin_next(planner: Planner, now: float, rows: int = 10**9) -> list[Any]:
    """Have requests run in the order of the queue, as vLLM does, and return them; requests of closed groups stay."""
    state = planner.state
    state.regrouped.clear()  # groups are looked up each time
    adapters = [adapter for adapter in state.adapters.values() if adapter.held and adapter.is_active]
    waiting = [(held.order, key, held.request) for adapter in adapters for key, held in adapter.held.items()]
    may_run = [it for it in waiting if state.group_of(it[1]) in state.open_groups]
    began = sorted(may_run, key=lambda it: it[0])[:rows]
    planner.began([request_id for _, request_id, _ in began], now)
    if len(began) < rows:
        planner.passed_over(None, now)
    elif began:
        planner.passed_over(began[-1][0], now)
    return [request for _, _, request in began]


@dataclass
class SimulatedWorkers:
    """How long things take, what they turn out to be, and which of them fail, is said by functions."""

    load_s: Callable[[AdapterSpec], float] = lambda _: 0.1
    activate_s: Callable[[int], float] = lambda _: 0.015
    size_bytes: Callable[[AdapterSpec], int] = lambda it: it.size_bytes
    is_instant: Callable[[int], bool] = lambda _: True
    fails: Callable[[Command], bool] = lambda _: False
    host: dict[int, AdapterSpec] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)  # owner by slot
    writing: dict[int, int] = field(default_factory=dict)  # owner by slot
    loading: dict[int, AdapterSpec] = field(default_factory=dict)
    activations: int = 0
    longest_load_s: float = 0.0
    longest_activation_s: float = 0.0
    _jobs: list[tuple[float, int, str, Command]] = field(default_factory=list)

    def carry_out(self, commands: Iterable[Command], now: float) -> None:
        for command in commands:
            match command:
                case Load():
                    self._load(command, now)
                case Activate():
                    self._activate(command, now)
                case Move(key, source):
                    assert source in self.host, "nothing to move"
                    assert source not in self.slots.values(), "it had a slot"
                    assert key not in self.slots.values() or self.is_instant(key) == self.is_instant(source)
                    self.host[key] = self.host.pop(source)
                case Evict(key):
                    assert key in self.host or key in self.loading, "nothing to evict"
                    self.host.pop(key, None)
                    self.loading.pop(key, None)
                    self._forget_slot(key)
                    self._jobs = sorted(job for job in self._jobs if job[3].key != key)

    def _forget_slot(self, key: int) -> None:
        for slots in (self.slots, self.writing):
            for slot in [slot for slot, owner in slots.items() if owner == key]:
                del slots[slot]

    def _load(self, command: Load, now: float) -> None:
        assert command.key not in self.host.keys() | self.loading.keys(), "loaded twice"
        self.loading[command.key] = command.spec
        duration = self.load_s(command.spec)
        self.longest_load_s = max(self.longest_load_s, duration)
        heappush(self._jobs, (now + duration, command.job, "load", command))

    def _activate(self, command: Activate, now: float) -> None:
        key = command.key
        assert key in self.host, "activated without being loaded"
        assert key not in self.slots.values(), "activated twice"
        self.activations += 1
        self._begin_writing(key, command.slot)
        if command.job is None:
            self.slots[command.slot] = self.writing.pop(command.slot)
            return
        duration = self.activate_s(key)
        self.longest_activation_s = max(self.longest_activation_s, duration)
        heappush(self._jobs, (now + duration, command.job, "activate", command))

    def _begin_writing(self, key: int, slot: int) -> None:
        assert slot not in self.writing, "a slot is written for two at once"
        assert key not in self.writing.values(), "an adapter is written to two slots"
        self.slots.pop(slot, None)  # whoever had it has lost it
        self.writing[slot] = key

    @property
    def next_report_at(self) -> float | None:
        return self._jobs[0][0] if self._jobs else None

    def reports(self, now: float) -> list[Any]:
        done: list[Any] = []
        while self._jobs and self._jobs[0][0] <= now:
            _, job, _, command = heappop(self._jobs)
            key = command.key
            if self.fails(command):
                self._forget_slot(key)
                done.append(Failed(job, InvalidAdapter("a simulated failure", adapter=str(key))))
            elif isinstance(command, Load):
                self.host[key] = self.loading.pop(key)
                size_bytes, load_s = self.size_bytes(command.spec), self.load_s(command.spec)
                done.append(Loaded(job, size_bytes, self.is_instant(key), load_s))
            else:
                slot = next(slot for slot, owner in self.writing.items() if owner == key)
                self.slots[slot] = self.writing.pop(slot)
                done.append(Activated(job, self.longest_activation_s))
        return done


@dataclass(eq=False)
class Request:
    id: str
    spec: AdapterSpec
    tokens: int
    priority: int = 0
    client: str = ""
    arrived_at: float = 0.0
    began_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    refusal: LoRAPluginsError | None = None
    was_cancelled: bool = False
    overtakers: int = 0  # adapters that waited and came before its own, at most

    @property
    def is_held(self) -> bool:
        return self.began_at is None and self.refusal is None and not self.was_cancelled

    @property
    def wait_s(self) -> float:
        assert self.began_at is not None
        return self.began_at - self.arrived_at


class Pause(Enum):
    """vLLM's `PauseState`: what waits in its queue is scheduled only without a pause."""

    NONE = auto()
    NEW = auto()  # what runs goes on
    ALL = auto()  # nothing does


class SimulatedEngine:
    """One step at a time; `step_s` is what a step with so many rows and so many new requests takes."""

    def __init__(
        self,
        planner: Planner,
        workers: SimulatedWorkers | None = None,
        *,
        step_s: Callable[[int, int], float] = lambda rows, new: 0.05,
        max_rows: int = 10**9,
    ) -> None:
        self.planner = planner
        self.workers = workers or SimulatedWorkers()
        self.now = 0.0
        self.pause = Pause.NONE
        self.requests: list[Request] = []
        self.running: dict[str, Request] = {}
        self.held: dict[str, Request] = {}  # in vLLM's queue
        self.began: list[Request] = []  # in the last step
        self.stopped: dict[str, Request] = {}  # by the pause of one adapter
        self.refused: list[tuple[Request, LoRAPluginsError]] = []  # in the last step
        self.steps = 0
        self.longest_step_s = 0.0
        self.is_watched = True  # what must always hold is looked at; that takes longer than the steps
        self.counts_overtakers = False
        self._step_s = step_s
        self._max_rows = max_rows
        self._reports: list[Any] = []

    def submit(
        self,
        engine_id_or_spec: int | AdapterSpec,
        tokens: int = 10,
        priority: int = 0,
        client: str = "",
        *,
        is_other: bool = False,
    ) -> Request:
        of = spec(engine_id_or_spec) if isinstance(engine_id_or_spec, int) else engine_id_or_spec
        request = Request(f"r{len(self.requests)}", of, tokens, priority, client, self.now)
        self.requests.append(request)
        self.held[request.id] = request
        self.planner.arrived(
            of,
            request.id,
            request,
            self.now,
            is_other=is_other,
            is_bound=is_other,
            order=place_at_end(self.planner, self.now, priority),
            client=client,
        )
        self.check_state()
        return request

    def abort(self, request: Request) -> None:
        if request.id in self.held:
            if request.id in self.planner.state.of_request:  # else it has been refused, which the next plan says
                self.planner.ended([request.id], self.now)
                request.was_cancelled = True
                del self.held[request.id]
        elif self.stopped.pop(request.id, None) is not None:
            self.planner.ended([request.id], self.now)
            request.was_cancelled = True
        elif request.id in self.running:
            self._end([request])
        self.check_state()

    def stop(self, name: str) -> None:
        """A pause of one adapter, which keeps the places of its requests."""
        for request in self._of_name(name, self.running):
            self.preempt(request)
        for request in self._of_name(name, self.held):
            self.stopped[request.id] = self.held.pop(request.id)
            self.planner.stop(request.id)
        self.check_state()

    def _of_name(self, name: str, requests: dict[str, Request]) -> list[Request]:
        adapters = [(request, self.planner.state.of_request.get(request.id)) for request in requests.values()]
        return [request for request, adapter in adapters if adapter is not None and adapter.spec.name == name]

    def preempt(self, request: Request) -> None:
        """As vLLM does where blocks are short: the request waits at the front of the queue."""
        self.held[request.id] = self.running.pop(request.id)
        request.began_at = None
        order = self.planner.state.queue_order.of_request(request, is_front=True)
        self.planner.waits_again(request.id, request, (order[0], request.priority, *order[2:]), self.now)
        self.check_state()

    def go_on(self, name: str) -> None:
        going_on = self._of_name(name, self.stopped)
        self.planner.go_on(name, self.now)
        for request in going_on:
            self.held[request.id] = self.stopped.pop(request.id)
            request.arrived_at, request.began_at = self.now, None
        self.check_state()

    def continue_session(self, request: Request, tokens: int) -> None:
        """A session's part ends here, and its next part comes at once."""
        del self.running[request.id]
        self.planner.ended([request.id], self.now)
        request.tokens, request.began_at, request.arrived_at = tokens, None, self.now
        self.held[request.id] = request
        order = place_at_end(self.planner, self.now, request.priority)
        self.planner.arrived(request.spec, request.id, request, self.now, order=order)
        self.check_state()

    def _end(self, requests: list[Request], *, expects_more: bool = False) -> None:
        for request in requests:
            self.running.pop(request.id, None)
            request.ended_at = self.now
        self.planner.ended([request.id for request in requests], self.now, expects_more=expects_more)

    @property
    def is_paused(self) -> bool:
        return self.pause is not Pause.NONE

    @property
    def is_busy(self) -> bool:
        """As `AdmittingScheduler.has_requests` says it: requests that wait in vLLM's queue are work while it runs."""
        return bool(self._batch or self.has_work or (self.held and not self.is_paused))

    @property
    def is_stopped(self) -> bool:
        """Whether a pause lets nothing go on, as `AdmittingScheduler.is_stopped` says it."""
        return self.is_paused and not self._batch

    @property
    def _batch(self) -> list[Request]:
        return [] if self.pause is Pause.ALL else list(self.running.values())

    @property
    def has_work(self) -> bool:
        return self.planner.has_work(is_paused=self.is_paused, is_stopped=self.is_stopped)

    def step(self) -> StepPlan:
        plan = self.planner.plan(self.now, is_paused=self.is_paused, is_stopped=self.is_stopped)
        self.refused = self.planner.take_refused()
        for request, error in self.refused:
            request.refusal = error
            self.held.pop(request.id, None)
            self.stopped.pop(request.id, None)
        self.workers.carry_out(plan.commands, self.now)
        self.began = [] if self.is_paused else self._begin_next()
        batch = self._batch
        duration = self._step_s(len(batch), len(self.began)) if batch else self._idle_s()
        self.longest_step_s = max(self.longest_step_s, duration)
        self.now += duration
        self.steps += 1
        self.planner.carried_out(plan.commands)
        self.planner.reported(self.workers.reports(self.now), self.now)
        self.planner.answer_calls(self.now, is_paused=self.is_paused, is_stopped=self.is_stopped)
        self.check_state()
        done = []
        for request in batch:
            if request.first_token_at is None:
                request.first_token_at = self.now
            request.tokens -= 1
            if request.tokens <= 0:
                done.append(request)
        self._end([request for request in done if not request.client])
        self._end([request for request in done if request.client], expects_more=True)
        if self.is_watched:
            self.check()
        if self.counts_overtakers:
            self._note_overtakers()
        return plan

    def _begin_next(self) -> list[Request]:
        began: list[Request] = begin_next(self.planner, self.now, self._max_rows - len(self.running))
        for request in began:
            self.running[request.id] = self.held.pop(request.id)
            request.began_at = self.now
        return began

    def _idle_s(self) -> float:
        """A step without a batch ends when something is reported, and polls otherwise."""
        at = self.workers.next_report_at
        return 0.001 if at is None else min(max(at - self.now, 0.001), 0.05)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def run_until_idle(self, longest_s: float = 1000.0) -> None:
        until = self.now + longest_s
        while self.is_busy or self.held:
            self.step()
            assert self.now < until, "it never ends"

    def finish(self, longest_s: float = 1000.0) -> None:
        """Run until nothing is left to do, or remembered."""
        self.run_until_idle(longest_s)
        self.check_nothing_left()

    # --- what must always hold ---

    def check_state(self) -> None:
        """Whatever refers to an adapter refers to the one that is known, and what is derived from it is up to date."""
        if not self.is_watched:
            return
        state = self.planner.state
        state.settle(self.now)
        adapters = list(state.adapters.values())
        assert all(state.adapters[key].key == key for key in state.adapters)
        some = [state.current.values(), state.of_request.values(), state.leaving, state.jobs.values()]
        some += [state.absent, state.ready, state.calling, state.in_flight, state.pinned, state.staying, state.draining]
        some += [state.copied.owners, state.pointed.owners, [state.reserved_for] if state.reserved_for else []]
        for references in some:
            for adapter in references:
                assert state.adapters.get(adapter.key) is adapter, "an adapter that was forgotten"
        for request_id, adapter in state.of_request.items():
            assert sum(request_id in some for some in (adapter.held, adapter.running, adapter.stopped)) == 1
        assert len(state.of_request) == sum(len(it.held) + len(it.running) + len(it.stopped) for it in adapters)
        assert state.stopped_count == sum(len(it.stopped) for it in adapters)
        for pool in (state.copied, state.pointed):
            assert len(pool.free) + len(pool.owners) == pool.size == len({*pool.free, *pool.owners.values()})
            assert all(adapter.slot == slot for adapter, slot in pool.owners.items())
            assert set(pool.running) == {it for it in pool.owners if it.is_in_flight and not it.is_pinned}
            assert set(pool.unused) == {it for it in pool.owners if it.can_be_displaced}
        free = [it for it in adapters if it.is_loaded and not it.is_used and it.replaces is None]
        assert set(state.cache.idle) == {it.key for it in free if not it.is_unevictable}
        assert state.cache.idle_bytes == sum(state.cache.sizes_bytes[key] for key in state.cache.idle)
        assert set(state.leaving) == {it for it in adapters if it.leaving_since is not None}
        assert set(state.newly_held) == {
            it for it in adapters if it.held and not it.is_in_flight and it.waits_since is None
        }
        active = {it for it in adapters if it.is_active}
        assert set(state.open_groups) == {it.running_on for it in active} | {
            it for it in active if it.leaving_since is None
        }
        assert all(
            it.order == min(held.order for held in it.held.values()) for it in adapters if it.held and not it.calls
        )
        assert set(state.expecting) == {it for it in adapters if it.expected}
        assert state.loads == sum(it.residency == "loading" for it in adapters)
        assert set(state.calling) == {it for it in adapters if it.calls}
        assert set(state.pinned) == {it for it in adapters if it.is_pinned}
        assert set(state.in_flight) == {it for it in adapters if it.is_in_flight}
        assert set(state.jobs.values()) == {it for it in adapters if it.job is not None}
        assert all(
            it in state.absent or it in state.ready or it.residency == "loading" or it.is_in_flight or it.calls
            for it in adapters
            if it.held
        ), "held, and nowhere in order"
        assert all(it.is_wanted and not it.is_in_flight for it in adapters if it.waits_since is not None)
        assert all(it.waits_since is not None for it in adapters if it.calls and not it.is_in_flight)
        assert set(state.draining) <= {it for it in adapters if it.leaving_since is not None}
        replaced = {it.replaces for it in adapters if it.replaces is not None}
        for adapter in adapters:
            is_current = state.current.get(adapter.spec.engine_id) is adapter
            assert is_current + (adapter.is_retired or adapter in replaced) == 1
            assert not (adapter.replaces and adapter.is_loaded and not adapter.moves)
        assert set(state.staying) == {it for it in adapters if it.is_unevictable}
        assert set(state.moving) == {it for it in adapters if it.replaces and it.is_loaded}

    def check(self) -> None:
        """The planner and the workers agree, and nothing is exceeded."""
        self.check_state()
        state, workers = self.planner.state, self.workers
        in_flight = {self.key_of(request) for request in self.running.values()}
        assert len(in_flight) <= state.slots.total, "too many adapters in flight"
        active = {key: adapter.slot for key, adapter in state.adapters.items() if adapter.is_active}
        for key in in_flight:
            assert key in active, "an adapter in flight has no slot"
        for key, slot in active.items():
            assert workers.slots.get(slot) == key, "the workers have another adapter in its slot"
            assert key in workers.host
        assert held_count(self.planner) == len(self.held) - len(state.refused)
        cache = state.cache
        resident = workers.host.keys() | workers.loading.keys()
        on_their_way_out = {command.key for command in state.commands if isinstance(command, Evict)}
        assert cache.sizes_bytes.keys() == resident - on_their_way_out
        assert cache.used_bytes == sum(cache.sizes_bytes.values())
        assert len(cache.sizes_bytes) <= cache.max_adapters, "too many adapters"
        assert cache.max_bytes is None or cache.used_bytes <= cache.max_bytes, "too many bytes"

    def key_of(self, request: Request) -> int:
        return self.planner.state.of_request[request.id].key

    def check_nothing_left(self) -> None:
        """Called once it is idle: only loaded adapters are remembered, and nothing waits."""
        state, workers = self.planner.state, self.workers
        assert not self.has_work
        assert state.adapters.keys() == workers.host.keys()
        assert not any((self.held, self.running, workers.writing, workers.loading))
        assert not any((state.draining, state.jobs, state.evicting, held_count(self.planner)))
        assert not any((state.of_request, state.ready, state.calling, state.absent))
        assert state.reserved_for is None

    def _note_overtakers(self) -> None:
        """Count who waits and came before, for each held request; see manager.md on the longest wait."""
        state = self.planner.state
        orders = [it.order for it in state.adapters.values() if it.is_wanted and not it.is_in_flight]
        for request in self.held.values():
            adapter = state.of_request.get(request.id)
            if adapter is None or adapter.is_in_flight:
                continue
            before = sum(other <= adapter.order for other in orders) - 1
            request.overtakers = max(request.overtakers, before)


def engine_with(
    is_instant: bool = True, load_s: float = 0.1, fails: Callable[[Command], bool] = lambda _: False, **options: Any
) -> SimulatedEngine:
    """An engine whose loads and slots take the same time for all adapters; `options`: of `make_planner`."""
    workers = SimulatedWorkers(load_s=lambda _: load_s, is_instant=lambda _: is_instant, fails=fails)
    return SimulatedEngine(make_planner(**options), workers)
