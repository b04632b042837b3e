"""Anything may happen in any order: the planner keeps its promises after each step, and everything ends."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot
from lora_plugins.scheduler.messages import Activate, AdapterSpec, Change, Evict, Load, Move
from tests.repetitions import times
from tests.scheduler.simulated import Pause, SimulatedEngine, SimulatedWorkers, make_planner, spec

KEYS = st.integers(1, 8)
CLIENTS = st.sampled_from(["", "", "", "a", "b"])
DURATIONS = st.sampled_from([0.0, 0.01, 0.2, 1.5])


class PlannerMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 3),
        pointed=st.sampled_from([0, 0, 2, 5]),
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
        self, slots, pointed, max_bytes, max_adapters, instant, load_s, activate_s, sizes, growth, failing
    ) -> None:
        self.sizes, self.failing = sizes, failing
        planner = make_planner(slots, pointed, max_bytes, max_adapters)
        workers = SimulatedWorkers(
            load_s=lambda it: load_s[it.engine_id],
            activate_s=lambda _: activate_s,
            # Of the files: specs of later loads may have the size that workers reported before.
            size_bytes=lambda it: int(sizes[it.engine_id] * growth[it.engine_id]),
            is_instant=lambda key: instant == "all" or (instant == "odd" and key % 2 == 1),
            fails=self.fails,
        )
        self.engine = SimulatedEngine(planner, workers)
        self.calls: list[Future[None]] = []
        self.retirements: list[tuple[int, Future[None]]] = []
        self.paths = dict.fromkeys(range(1, 9), 0)
        self.retired: set[int] = set()

    def fails(self, command) -> bool:
        key = command.spec.engine_id if isinstance(command, Load) else self.engine.workers.host[command.key].engine_id
        return key in self.failing and (key % 2 == 0 or isinstance(command, Activate))

    def spec(self, key: int) -> AdapterSpec:
        return replace(spec(key, self.sizes[key]), path=f"/adapters/{key}/{self.paths[key]}")

    @rule(
        key=KEYS,
        tokens=st.integers(1, 30),
        priority=st.sampled_from([0, 0, 0, 1]),
        client=CLIENTS,
        is_other=st.sampled_from([False, False, False, True]),
    )
    def request_comes(self, key: int, tokens: int, priority: int, client: str, is_other: bool) -> None:
        self.engine.submit(self.spec(key), tokens, priority, client, is_other=is_other)

    @rule(at=st.integers(0, 50))
    def request_is_aborted(self, at: int) -> None:
        if self.engine.requests:
            self.engine.abort(self.engine.requests[at % len(self.engine.requests)])

    @rule(at=st.integers(0, 50), tokens=st.integers(1, 30))
    def a_client_gives_up_and_retries(self, at: int, tokens: int) -> None:
        if self.engine.held:
            request = list(self.engine.held.values())[at % len(self.engine.held)]
            self.engine.abort(request)
            self.engine.submit(request.spec, tokens)

    @rule()
    def all_held_are_aborted(self) -> None:
        for request in list(self.engine.held.values()):
            self.engine.abort(request)

    @rule(at=st.integers(0, 50), tokens=st.integers(1, 30))
    def a_session_waits_for_input_and_goes_on(self, at: int, tokens: int) -> None:
        """Its place is free then; its next part has the same id, and is held again."""
        if self.engine.running:
            self.engine.continue_session(list(self.engine.running.values())[at % len(self.engine.running)], tokens)

    @rule(at=st.integers(0, 50))
    def a_request_is_preempted(self, at: int) -> None:
        if self.engine.running:
            self.engine.preempt(list(self.engine.running.values())[at % len(self.engine.running)])

    @rule(key=KEYS)
    def other_bytes_come_under_an_id(self, key: int) -> None:
        self.paths[key] += 1

    @rule(key=KEYS, options=st.sets(st.sampled_from(["is_other", "moves", "wants_slot", "needs_slot"])))
    def adapter_is_called_for(self, key: int, options: set[str]) -> None:
        self.calls.append(self.engine.planner.load(self.spec(key), self.engine.now, **dict.fromkeys(options, True)))

    @rule(key=KEYS, is_removed=st.booleans())
    def workers_are_given_an_adapter(self, key: int, is_removed: bool) -> None:
        removal, given = Change(key), Change(key, replace(self.spec(key), given=1))
        self.calls.append(self.engine.planner.given([removal, given] if is_removed else [given], self.engine.now))

    @rule(key=KEYS)
    def adapter_is_pinned(self, key: int) -> None:
        self.calls.append(self.engine.planner.pin(self.spec(key), self.engine.now))

    @rule(key=KEYS)
    def adapter_is_unpinned(self, key: int) -> None:
        self.engine.planner.unpin(key, self.engine.now)

    @rule(at=st.integers(0, 20))
    def a_caller_goes_away(self, at: int) -> None:
        if self.calls:
            self.calls[at % len(self.calls)].cancel()

    @rule(at=st.integers(0, 20))
    def a_call_is_withdrawn(self, at: int) -> None:
        if self.calls and not (call := self.calls[at % len(self.calls)]).done():
            self.engine.planner.withdraw(call, NoFreeSlot("no step that could advance it"), self.engine.now)
            assert call.done()

    @rule(key=KEYS, is_refused=st.booleans(), is_last=st.booleans())
    def adapter_is_retired(self, key: int, is_refused: bool, is_last: bool) -> None:
        error = AdapterNotFound("a retired adapter") if is_refused else None
        self.retirements.append((key, self.engine.planner.retire(key, self.engine.now, error, is_last=is_last)))
        if is_last:
            self.retired.add(key)

    @rule(key=KEYS, goes_on=st.booleans())
    def one_adapter_is_paused_or_resumed(self, key: int, goes_on: bool) -> None:
        (self.engine.go_on if goes_on else self.engine.stop)(self.spec(key).name)

    @rule(mode=st.sampled_from(["abort", "wait", "keep", "resume"]))
    def pause_or_resume(self, mode: str) -> None:
        """`pause_generation` of every mode, also within a pause of another."""
        if mode == "abort":
            for request in self.engine.requests:
                self.engine.abort(request)
        self.engine.pause = {"keep": Pause.ALL, "resume": Pause.NONE}.get(mode, Pause.NEW)

    @precondition(lambda self: self.engine.is_paused)
    @rule(
        key=KEYS,
        call=st.sampled_from([None, "load", "replace", "move", "activate", "pin", "unpin", "retire", "refuse", "give"]),
    )
    def an_operator_calls_in_a_pause(self, key: int, call: str | None) -> None:
        """A trainer resumes only after its calls."""
        match call:
            case "load" | "replace" | "move" | "activate":
                options = {"replace": {"is_other"}, "move": {"is_other", "moves"}, "activate": {"wants_slot"}}
                self.adapter_is_called_for(key, options.get(call, set()))
            case "pin":
                self.adapter_is_pinned(key)
            case "unpin":
                self.adapter_is_unpinned(key)
            case "retire" | "refuse":
                self.adapter_is_retired(key, call == "refuse", False)
            case "give":
                self.workers_are_given_an_adapter(key, False)
        self.a_pause_has_drained()

    @precondition(lambda self: self.engine.is_paused)
    @rule()
    def a_pause_has_drained(self) -> None:
        """Every call is answered while nothing runs.

        Pins wait for slots, which nobody writes in a pause; an eviction waits for all that the pause holds.
        """
        until = self.engine.now + 300
        while self.engine.is_busy:
            self.step()
            assert self.engine.now < until, "it never comes to rest"
        assert self.engine.is_stopped
        state = self.engine.planner.state
        in_use = {it.spec.engine_id for it in state.adapters.values() if it.is_used or it.stopped}
        assert all(future.done() or key in in_use for key, future in self.retirements)
        calling = [call for adapter in state.calling for call in adapter.calls]
        assert all(call.needs_slot for call in calling)

    @rule(steps=st.integers(1, 40))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        engine, state = self.engine, self.engine.planner.state
        in_flight = {engine.key_of(request) for request in engine.running.values()}
        replaced = {adapter.replaces for adapter in state.adapters.values()}  # its place may be all that the next has
        pinned = {adapter for adapter in state.pinned if adapter.is_active and adapter not in replaced}
        in_use = {state.adapters[key].slot for key in in_flight} | {adapter.slot for adapter in pinned}
        staying = {it.key for it in state.staying if it.is_loaded and it not in replaced}
        plan = engine.step()
        moved = {command.key for command in plan.commands if isinstance(command, Move)}
        assert moved == {adapter.key for adapter in plan.moved}
        stopped = {adapter.key for adapter in state.adapters.values() if adapter.stopped or adapter.goes_on}
        assert moved <= in_flight | stopped
        assert not (moved and engine.is_paused)
        commanded = {command.key for command in plan.commands if not isinstance(command, Load | Move)}
        assert not commanded & in_flight, "an adapter in flight is moved"
        assert not commanded & {adapter.key for adapter in pinned}, "a pinned adapter is moved"
        evicted = {command.key for command in plan.commands if isinstance(command, Evict)}
        assert not evicted & staying, "an adapter that nobody could load again is evicted"
        written = {command.slot for command in plan.commands if isinstance(command, Activate)}
        assert not written & in_use, "a slot in use is written"
        if engine.is_paused:
            assert not engine.began
            assert not written
        for error in (error for _, error in engine.refused):
            assert isinstance(error, LoRAPluginsError)

    @precondition(lambda self: hasattr(self, "engine"))
    @invariant()
    def adds_up(self) -> None:
        self.engine.check_state()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.pause = Pause.NONE
        for key in range(1, 9):
            engine.go_on(self.spec(key).name)
            engine.planner.unpin(key, engine.now)
        for adapter in list(engine.planner.state.staying):
            engine.planner.retire(adapter.spec.engine_id, engine.now)  # else what waits for its room is refused
        until = engine.now + 300
        while engine.is_busy or engine.held:
            self.step()
            assert engine.now < until, "it never ends"
        for request in engine.requests:
            assert request.ended_at is not None or request.refusal is not None or request.was_cancelled
        assert all(call.done() for call in self.calls)
        assert all(future.done() for _, future in self.retirements)
        resident = {it.engine_id for it in engine.workers.host.values()}
        assert not self.retired & resident, "a retired adapter stays"
        assert len(resident) == len(engine.workers.host), "an old generation stays"
        engine.check_nothing_left()


TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(
    max_examples=times(300, short=100),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_slot_left_by_an_answered_call_goes_to_another() -> None:
    """Found by the machine: the second generation goes with the answer to its call, and no plan looked again."""
    none, sizes, growth = [0.0] * 9, [20] * 9, [1.0] * 9
    state = PlannerMachine()
    state.begin(
        slots=1, pointed=0, max_bytes=None, max_adapters=2, instant="all",
        load_s=none, activate_s=0.0, sizes=sizes, growth=growth, failing=set(),
    )  # fmt: skip
    state.workers_are_given_an_adapter(key=1, is_removed=False)
    state.adapter_is_called_for(key=1, options={"needs_slot"})
    state.adapter_is_called_for(key=1, options={"wants_slot", "needs_slot", "is_other", "moves"})
    state.adapter_is_retired(key=1, is_last=False, is_refused=False)
    state.teardown()
