"""Anything may happen in any order: the planner keeps its promises after each step, and everything ends."""

from __future__ import annotations

from concurrent.futures import Future

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.scheduler.messages import Activate, AdapterSpec, Load
from tests.repetitions import times
from tests.scheduler.simulated import SimulatedEngine, SimulatedWorkers, make_planner, spec

KEYS = st.integers(1, 8)
DURATIONS = st.sampled_from([0.0, 0.01, 0.2, 1.5])


class PlannerMachine(RuleBasedStateMachine):
    @initialize(
        max_running=st.integers(1, 3),
        spare=st.integers(0, 2),
        max_bytes=st.sampled_from([None, 100, 250, 400]),
        max_adapters=st.integers(1, 6),
        instant=st.sampled_from(["all", "none", "odd"]),
        load_s=st.lists(DURATIONS, min_size=9, max_size=9),
        activate_s=DURATIONS,
        sizes=st.lists(st.sampled_from([20, 60, 100, 180, 300]), min_size=9, max_size=9),
        growth=st.lists(st.sampled_from([1.0, 1.0, 1.0, 1.5, 0.5]), min_size=9, max_size=9),
        failing=st.sets(KEYS, max_size=2),
    )
    def begin(
        self, max_running, spare, max_bytes, max_adapters, instant, load_s, activate_s, sizes, growth, failing
    ) -> None:
        self.sizes, self.failing = sizes, failing
        planner = make_planner(max_running, spare, max_bytes, max_adapters)
        workers = SimulatedWorkers(
            load_s=lambda it: load_s[it.engine_id],
            activate_s=lambda _: activate_s,
            size_bytes=lambda it: int(it.size_bytes * growth[it.engine_id]),
            is_instant=lambda key: instant == "all" or (instant == "odd" and key % 2 == 1),
            fails=self.fails,
        )
        self.engine = SimulatedEngine(planner, workers)
        self.calls: list[Future[None]] = []
        self.retirements: list[tuple[int, Future[None]]] = []
        self.retired: set[int] = set()

    def fails(self, command) -> bool:
        key = command.spec.engine_id if isinstance(command, Load) else command.engine_id
        return key in self.failing and (key % 2 == 0 or isinstance(command, Activate))

    def spec(self, key: int) -> AdapterSpec:
        return spec(key, self.sizes[key])

    @rule(key=KEYS, tokens=st.integers(1, 30), priority=st.sampled_from([0, 0, 0, 1]))
    def request_comes(self, key: int, tokens: int, priority: int) -> None:
        self.engine.submit(self.spec(key), tokens, priority)

    @rule(at=st.integers(0, 50))
    def request_is_aborted(self, at: int) -> None:
        if self.engine.requests:
            self.engine.abort(self.engine.requests[at % len(self.engine.requests)])

    @rule()
    def all_held_are_cancelled(self) -> None:
        for request in self.engine.planner.cancel(None):
            request.was_cancelled = True
            del self.engine.held[request.id]

    @rule(key=KEYS, wants_slot=st.booleans(), needs_slot=st.booleans())
    def adapter_is_called_for(self, key: int, wants_slot: bool, needs_slot: bool) -> None:
        engine = self.engine
        self.calls.append(engine.planner.load(self.spec(key), engine.now, wants_slot=wants_slot, needs_slot=needs_slot))

    @rule(key=KEYS)
    def adapter_is_pinned(self, key: int) -> None:
        self.calls.append(self.engine.planner.pin(self.spec(key), self.engine.now))

    @rule(key=KEYS)
    def adapter_is_unpinned(self, key: int) -> None:
        self.engine.planner.unpin(key)

    @rule(at=st.integers(0, 20))
    def a_caller_goes_away(self, at: int) -> None:
        if self.calls:
            self.calls[at % len(self.calls)].cancel()

    @rule(key=KEYS, is_refused=st.booleans())
    def adapter_is_retired(self, key: int, is_refused: bool) -> None:
        error = AdapterNotFound("a retired adapter") if is_refused else None
        self.retirements.append((key, self.engine.planner.retire(key, error)))
        self.retired.add(key)

    @rule()
    def pause_or_resume(self) -> None:
        self.engine.is_paused = not self.engine.is_paused

    @rule(steps=st.integers(1, 40))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        engine = self.engine
        in_flight = {request.spec.engine_id for request in (*engine.running.values(), *engine.waiting.values())}
        places = {key: engine.planner.adapters[key].slot for key in in_flight}
        pinned = {key: adapter.slot for key, adapter in engine.planner.placement.pinned.items() if adapter.is_active}
        plan = engine.step()
        commanded = {command.engine_id for command in plan.commands if not isinstance(command, Load)}
        assert not commanded & in_flight, "an adapter in flight is moved"
        assert not commanded & pinned.keys(), "a pinned adapter is moved"
        written = {
            command.slot for command in plan.commands if not hasattr(command, "spec") and hasattr(command, "slot")
        }
        assert not written & (set(places.values()) | set(pinned.values())), "a slot in use is written"
        if engine.is_paused:
            assert not plan.admitted
            assert not written
            assert not any(isinstance(command, Load) and command.slot is not None for command in plan.commands)
        for error in (error for _, error in plan.refused):
            assert isinstance(error, LoRAPluginsError)

    @precondition(lambda self: hasattr(self, "engine"))
    @invariant()
    def adds_up(self) -> None:
        admission = self.engine.planner.admission
        assert admission.held_count == sum(admission.held_by_name.values())

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.is_paused = False
        for key in range(1, 9):
            engine.planner.unpin(key)
        until = engine.now + 300
        while engine.is_busy or engine.held:
            self.step()
            assert engine.now < until, "it never ends"
        for request in engine.requests:
            assert request.ended_at is not None or request.refusal is not None or request.was_cancelled
        assert all(call.done() for call in self.calls)
        for _, future in self.retirements:
            assert future.done()
        assert not self.retired & engine.workers.host.keys(), "a retired adapter stays"
        engine.check_nothing_left()


TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(
    max_examples=times(150, short=60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
