"""An engine in virtual time that asks the planner before each step and has workers that obey it.

The workers know nothing but what the commands say: a dict of what is loaded and a dict of slots. They check that every
command makes sense to them. Requests run for so many steps, one token each; at most `max_rows` of them in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import Activate, Activated, AdapterSpec, Command, Evict, Failed, Load, Loaded
from lora_plugins.scheduler.planner import Plan, Planner
from lora_plugins.scheduler.policies import make_policy


def spec(engine_id: int, size_bytes: int = 100) -> AdapterSpec:
    return AdapterSpec(engine_id, f"adapter-{engine_id}", f"/adapters/{engine_id}", size_bytes=size_bytes)


def make_planner(
    max_running: int = 2,
    spare: int = 0,
    max_bytes: int | None = 1000,
    max_adapters: int = 100,
    policy: str = "lru",
    **options: float,
) -> Planner:
    return Planner(max_running, max_running + spare, HostCache(max_bytes, max_adapters, make_policy(policy)), **options)


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
                case Evict(engine_id):
                    assert engine_id in self.host or engine_id in self.loading, "nothing to evict"
                    self.host.pop(engine_id, None)
                    self.loading.pop(engine_id, None)
                    self._forget_slot(engine_id)
                    self._jobs = sorted(job for job in self._jobs if _engine_id(job[3]) != engine_id)

    def _forget_slot(self, engine_id: int) -> None:
        for slots in (self.slots, self.writing):
            for slot in [slot for slot, owner in slots.items() if owner == engine_id]:
                del slots[slot]

    def _load(self, command: Load, now: float) -> None:
        key = command.spec.engine_id
        assert key not in self.host.keys() | self.loading.keys(), "loaded twice"
        self.loading[key] = command.spec
        if command.slot is not None:
            self._begin_writing(key, command.slot)
        duration = self.load_s(command.spec)
        self.longest_load_s = max(self.longest_load_s, duration)
        heappush(self._jobs, (now + duration, command.job, "load", command))

    def _activate(self, command: Activate, now: float) -> None:
        key = command.engine_id
        assert key in self.host, "activated without being loaded"
        assert key not in self.slots.values(), "activated twice"
        self.activations += 1
        self._begin_writing(key, command.slot)
        if command.job is None:
            assert self.is_instant(key)
            self.slots[command.slot] = self.writing.pop(command.slot)
            return
        self._push_activation(command, now, command.job)

    def _push_activation(self, command: Command, now: float, job: int) -> None:
        duration = self.activate_s(_engine_id(command))
        self.longest_activation_s = max(self.longest_activation_s, duration)
        heappush(self._jobs, (now + duration, job, "activate", command))

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
            at, job, kind, command = heappop(self._jobs)
            key = _engine_id(command)
            if self.fails(command):
                self._forget_slot(key)
                done.append(Failed(job, InvalidAdapter("a simulated failure", adapter=str(key))))
            elif kind == "load" and isinstance(command, Load):
                self.host[key] = self.loading.pop(key)
                is_instant = self.is_instant(key)
                done.append(Loaded(job, self.size_bytes(command.spec), is_instant, self.load_s(command.spec)))
                if command.slot is not None and is_instant:
                    del self.writing[command.slot]
                elif command.slot is not None:
                    self.activations += 1
                    self._push_activation(command, at, job)
            else:
                slot = next(slot for slot, owner in self.writing.items() if owner == key)
                self.slots[slot] = self.writing.pop(slot)
                done.append(Activated(job, self.longest_activation_s))
        return done


def _engine_id(command: Command) -> int:
    return command.spec.engine_id if isinstance(command, Load) else command.engine_id


@dataclass(eq=False)
class Request:
    id: str
    spec: AdapterSpec
    tokens: int
    priority: int = 0
    arrived_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    refusal: LoRAPluginsError | None = None
    was_cancelled: bool = False
    overtakers: int = 0  # adapters that waited and came before its own, at most

    @property
    def is_held(self) -> bool:
        return self.admitted_at is None and self.refusal is None and not self.was_cancelled

    @property
    def wait_s(self) -> float:
        assert self.admitted_at is not None
        return self.admitted_at - self.arrived_at


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
        self.is_paused = False
        self.requests: list[Request] = []
        self.waiting: dict[str, Request] = {}  # admitted by the planner, no row yet
        self.running: dict[str, Request] = {}
        self.held: dict[str, Request] = {}
        self.steps = 0
        self.longest_step_s = 0.0
        self.is_watched = True
        self._step_s = step_s
        self._max_rows = max_rows
        self._reports: list[Any] = []

    def submit(self, engine_id_or_spec: int | AdapterSpec, tokens: int = 10, priority: int = 0) -> Request:
        of = spec(engine_id_or_spec) if isinstance(engine_id_or_spec, int) else engine_id_or_spec
        request = Request(f"r{len(self.requests)}", of, tokens, priority, self.now)
        self.requests.append(request)
        self.held[request.id] = request
        self.planner.arrived(of, request.id, request, self.now, priority)
        return request

    def abort(self, request: Request) -> None:
        if request.id in self.held:
            if self.planner.cancel([request.id]):  # else it has been refused, which the next plan says
                request.was_cancelled = True
                del self.held[request.id]
        elif request.id in self.running or request.id in self.waiting:
            self._end([request])

    def _end(self, requests: list[Request]) -> None:
        for request in requests:
            self.running.pop(request.id, None)
            self.waiting.pop(request.id, None)
            request.ended_at = self.now
        self.planner.finished([request.id for request in requests], self.now)

    @property
    def is_busy(self) -> bool:
        has_resumed = self.planner._was_paused and not self.is_paused
        return bool(self.running or self.waiting or self.planner.has_work or has_resumed)

    def step(self) -> Plan:
        plan = self.planner.plan(self.now, is_paused=self.is_paused)
        for request, error in plan.refused:
            request.refusal = error
            self.held.pop(request.id, None)
        for request in plan.admitted:
            request.admitted_at = self.now
            del self.held[request.id]
            self.waiting[request.id] = request
        self.workers.carry_out(plan.commands, self.now)
        new = 0
        while self.waiting and len(self.running) < self._max_rows:
            request = self.waiting.pop(next(iter(self.waiting)))
            self.running[request.id] = request
            new += 1
        duration = self._step_s(len(self.running), new) if self.running else self._idle_s()
        self.longest_step_s = max(self.longest_step_s, duration)
        self.now += duration
        self.steps += 1
        self.planner.carried_out(plan.commands)
        self.planner.reported(self.workers.reports(self.now), self.now)
        done = []
        for request in self.running.values():
            if request.first_token_at is None:
                request.first_token_at = self.now
            request.tokens -= 1
            if request.tokens <= 0:
                done.append(request)
        self._end(done)
        if self.is_watched:
            self.check()
            self._note_overtakers()
        return plan

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

    # --- what must always hold ---

    def check(self) -> None:
        """The planner and the workers agree, and nothing is exceeded."""
        planner, placement, workers = self.planner, self.planner.placement, self.workers
        in_flight = {request.spec.engine_id for request in (*self.running.values(), *self.waiting.values())}
        assert len(in_flight) <= planner.max_running, "too many adapters in flight"
        active = {key: adapter.slot for key, adapter in planner.adapters.items() if adapter.is_active}
        for key in in_flight:
            assert key in active, "an adapter in flight has no slot"
        for key, slot in active.items():
            assert workers.slots.get(slot) == key, "the workers have another adapter in its slot"
            assert key in workers.host
        owned = [adapter.slot for adapter in planner.adapters.values() if adapter.slot is not None]
        assert len(owned) == len(set(owned)) == len(placement.in_slots)
        assert all(0 <= slot < placement.slot_count for slot in owned)
        assert planner.admission.held_count == sum(planner.admission.held_by_name.values())
        assert planner.admission.held_count == len(self.held) - len(planner._refused)
        assert all(count > 0 for count in planner.admission.held_by_name.values())
        assert placement.idle == {key for key, adapter in planner.adapters.items() if adapter.is_idle}
        cache = placement.cache
        resident = workers.host.keys() | workers.loading.keys()
        on_their_way_out = {_engine_id(command) for command in placement.commands if isinstance(command, Evict)}
        assert {key for key in planner.adapters if key in cache} == resident - on_their_way_out
        assert len(cache) <= cache.max_adapters, "too many adapters"
        assert cache.max_bytes is None or cache.used_bytes <= cache.max_bytes, "too many bytes"
        for adapter in placement.pinned.values():
            assert adapter.is_pinned

    def check_nothing_left(self) -> None:
        """Called once it is idle: only loaded adapters are remembered, and nothing waits."""
        planner, placement, workers = self.planner, self.planner.placement, self.workers
        assert not planner.has_work
        assert planner.admission.held_count == 0
        assert planner.adapters.keys() == workers.host.keys()
        assert not any((self.held, self.running, self.waiting, workers.writing, workers.loading))
        admission, loading = planner.admission, planner.loading
        assert not any((placement.draining, placement.jobs, planner._evicting, admission.held_by_name))
        assert not any((admission._of_request, admission.in_flight, admission.ready, loading.calling, loading.absent))
        assert placement.reserved_for is None

    def _note_overtakers(self) -> None:
        """Count who waits and came before, for each held request; see `planner.py` on the longest wait."""
        since = {key: it.waits_since for key, it in self.planner.adapters.items() if it.waits_since is not None}
        for request in self.held.values():
            own = since.get(request.spec.engine_id)
            if own is None:
                continue
            before = sum(other <= own for other in since.values()) - 1
            request.overtakers = max(request.overtakers, before)


def zipf_weights(count: int, exponent: float = 1.0) -> list[float]:
    return [(rank + 1) ** -exponent for rank in range(count)]
