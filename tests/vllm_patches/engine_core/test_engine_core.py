"""What clients ask of the engine core: futures end, messages arrive as they were sent, in-process it steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from lora_plugins.errors import InvalidAdapter, NoFreeSlot
from lora_plugins.scheduler.messages import (
    Activate,
    AdapterSpec,
    AdapterState,
    Change,
    Evict,
    Failed,
    Load,
    Loaded,
    Outcome,
    PlannerFigures,
    from_plain,
    to_plain,
)
from lora_plugins.vllm_patches.engine_core import engine_core
from tests.vllm_patches.engine_bed import Engine, adapter, make_scheduler, vllm_config
from tests.vllm_patches.put_back import put_back

BROKEN = InvalidAdapter("nothing that can be read", adapter="adapter-1")


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with put_back(EngineCore):
        engine_core.patch()
        yield


class Executor:
    """Workers that carry commands out at once, by the RPC of an in-process engine."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.fails: dict[int, InvalidAdapter] = {}
        self.in_memory: set[int] = set()
        self.changes: list[list[Change]] = [[]]
        self.forgotten: list[set[int]] = []
        self.is_sleeping, self.rewrites, self.finished, self.asked_for_nothing = True, 0, 0, 0

    def sleep(self, level: int) -> None:
        self.is_sleeping = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.is_sleeping = tags is not None

    def collective_rpc(self, method: str, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if method == "callers_own":
            self.changes = args[0]
            if isinstance(args[-1], Exception):
                raise args[-1]
            return ["done" for _ in self.changes]
        if method == "take_notifications":
            return [["a was loaded"] for _ in self.changes]
        if method == "lora_plugins_changes":
            changes, self.changes = self.changes, [[]]
            return changes
        if method == "lora_plugins_forget_given":
            self.forgotten.append(args[0])
            return [None]
        if method == "lora_plugins_finish_jobs":
            assert not self.is_sleeping, "what is asleep is not waited for"
            self.finished += 1
            return [[]]
        if method == "lora_plugins_rewrite_slots":
            self.rewrites += 1
            return [[]]
        assert method == "lora_plugins_step"
        commands, wait_s = args
        assert wait_s > 0
        self.commands += commands
        self.asked_for_nothing += not commands
        assert self.asked_for_nothing < 50, "it waits for what only its caller can advance"
        reports: list[Any] = []
        for command in commands:
            if isinstance(command, Evict):
                self.in_memory.discard(command.key)
            if isinstance(command, Load):
                self.in_memory.add(command.key)
                error = self.fails.get(command.spec.engine_id)
                reports.append(Failed(command.job, error) if error else Loaded(command.job, 100, True, 0.25))
        return [reports]

    def add_lora(self, lora_request: LoRARequest) -> str:
        return f"vLLM's, of {lora_request.lora_name}"

    def remove_lora(self, lora_id: int) -> str:
        return f"vLLM's, of {lora_id}"

    pin_lora = remove_lora


def core_of(base: Path, kind: type, **config: Any) -> Any:
    core = object.__new__(kind)
    core.scheduler, core.model_executor = make_scheduler(vllm_config(base, **config)), Executor()
    return core


@pytest.fixture
def core(base: Path) -> Any:
    """In the caller's process."""
    return core_of(base, EngineCore, max_loras=2)


def engine_of(core: Any) -> Engine:
    """The caller's own steps of an engine in its process."""
    engine = Engine(core.scheduler)
    engine.in_memory = core.model_executor.in_memory
    return engine


def proc_of(base: Path, **config: Any) -> tuple[Any, Engine]:
    """In a process of its own, and its steps."""
    core = core_of(base, EngineCoreProc, **config)
    return core, Engine(core.scheduler)


@pytest.fixture
def proc(base: Path) -> tuple[Any, Engine]:
    return proc_of(base, max_loras=2)


def spec(number: int, uri: str | None = None) -> dict[str, Any]:
    """As a client sends it."""
    plain: dict[str, Any] = over_the_wire(to_plain(AdapterSpec(number, f"adapter-{number}", f"/store/{number}", uri)))
    return plain


def over_the_wire(plain: Any) -> Any:
    """What arrives in another process."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

    result = MsgpackDecoder(UtilityResult).decode(MsgpackEncoder().encode(UtilityResult(plain)))
    return result.result


def message(answer: Any, kind: Any = Outcome) -> Any:
    """What a client makes of it."""
    return from_plain(kind, over_the_wire(answer))


def error_in(answer: Any) -> Any:
    return message(answer).error


def answer_of(engine: Engine, answer: Any) -> Any:
    assert isinstance(answer, Future)
    engine.run()
    return answer.result(timeout=0)


# --- in a process of its own: futures ---


def test_load_ends_when_the_workers_have_it(proc: tuple[Any, Engine]) -> None:
    core, engine = proc
    engine.holds_back = True
    future = core.lora_plugins_load(spec(1, "s3://bucket/a"), False)
    for _ in range(3):
        engine.step()
    assert not future.done()
    (command,) = engine.commands
    assert isinstance(command, Load)
    assert command.spec.uri == "s3://bucket/a"
    engine.holds_back = False
    assert message(answer_of(engine, future)) == Outcome(100, 0.01)
    again = core.lora_plugins_load(spec(1), False)
    assert message(answer_of(engine, again)) == Outcome(100, None), "it was here"


@pytest.mark.parametrize("utility", ["load", "pin"])
def test_errors_arrive_whole(proc: tuple[Any, Engine], utility: str) -> None:
    core, engine = proc
    engine.fails[1] = BROKEN
    future = core.lora_plugins_load(spec(1), True) if utility == "load" else core.lora_plugins_pin(spec(1))
    error = error_in(answer_of(engine, future))
    assert isinstance(error, InvalidAdapter)
    assert (error.found, error.adapter) == (BROKEN.found, BROKEN.adapter)


def test_pinned_and_unpinned(proc: tuple[Any, Engine]) -> None:
    core, engine = proc
    assert message(answer_of(engine, core.lora_plugins_pin(spec(1)))) == Outcome()
    states = message(core.lora_plugins_residency(), list[AdapterState])
    assert states == [AdapterState(1, "adapter-1", 100, is_loaded=True, is_active=True, is_pinned=True, rank=8)]
    refused = core.lora_plugins_pin(spec(2))
    assert isinstance(error_in(refused.result(timeout=0)), NoFreeSlot)
    assert core.lora_plugins_unpin(1) is True
    assert core.lora_plugins_unpin(1) is False


def test_an_adapter_is_retired_once_unused(proc: tuple[Any, Engine]) -> None:
    core, engine = proc
    engine.begin("a", 1, tokens=4)
    future = core.lora_plugins_retire(1, None)
    engine.step()
    assert not future.done()
    assert message(answer_of(engine, future)) == Outcome()
    assert len(engine.tokens_of("a")) == 4
    assert core.lora_plugins_residency() == []
    late = core.lora_plugins_retire(1, BROKEN.plain())
    assert message(late.result(timeout=0)) == Outcome(), "it had been evicted"
    engine.answer("b", 1)
    assert "nothing that can be read" in engine.end_of("b").stop_reason


def test_states_and_figures_arrive_as_they_are(proc: tuple[Any, Engine]) -> None:
    core, engine = proc
    engine.begin("a", 1, tokens=10)
    engine.holds_back = True
    engine.add("b", 2)
    engine.step()
    states = {state.engine_id: state for state in message(core.lora_plugins_residency(), list[AdapterState])}
    assert (states[1].held, states[1].running, states[1].size_bytes) == ((), ("a",), 100)
    assert (states[2].held, states[2].running, states[2].is_loaded) == (("b",), (), False)
    figures = message(core.lora_plugins_figures(), PlannerFigures)
    assert figures.loaded == (replace(states[1], running=()),)
    assert (figures.held, figures.slots) == (1, 2)
    assert figures.stats == core.scheduler.planner.stats


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pin_in_a_pause_is_answered_after_it(proc: tuple[Any, Engine], state: PauseState) -> None:
    """An engine steps as long as something is to be done: no request needs to come."""
    core, engine = proc
    core.scheduler.set_pause_state(state)
    future = core.lora_plugins_pin(spec(1))
    engine.run()
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert message(answer_of(engine, future)) == Outcome()
    engine.answer("a", 1)
    assert len(engine.tokens_of("a")) == 3


# --- vLLM's own utilities ---


def test_add_lora_loads_by_the_plan_and_raises_our_error(proc: tuple[Any, Engine]) -> None:
    core, engine = proc
    assert answer_of(engine, core.add_lora(adapter(1))) is True
    engine.fails[2] = BROKEN
    future = core.add_lora(adapter(2))
    engine.run()
    assert isinstance(future.exception(timeout=0), InvalidAdapter)
    assert {type(command) for command in engine.commands} >= {Load}


def test_remove_lora_and_pin_lora_go_by_the_plan(proc: tuple[Any, Engine]) -> None:
    core, engine = proc
    answer_of(engine, core.add_lora(adapter(1)))
    assert answer_of(engine, core.pin_lora(1)) is True
    assert core.remove_lora(1) is True
    assert core.remove_lora(1) is False
    assert core.pin_lora(9) == "vLLM's, of 9", "which says what is wrong"


def test_loaded_in_place_it_is_loaded_beside_what_runs(proc: tuple[Any, Engine]) -> None:
    core, engine = proc
    engine.begin("old", 1, tokens=40)
    again = adapter(1)
    again.load_inplace = True
    loaded = core.add_lora(again)
    while not loaded.done():
        engine.step()
    assert loaded.result() is True
    engine.begin("new", 1)
    assert len(engine.tokens_of("old")) < 40
    engine.run()
    assert sum(isinstance(command, Load) for command in engine.commands) == 2
    assert [command.key for command in engine.commands if isinstance(command, Evict)] == [1]


@pytest.mark.timeout(60)
def test_nothing_waits_for_requests_that_a_pause_stops(base: Path) -> None:
    """A trainer pauses, exchanges weights, and resumes only when its calls have been answered."""
    core, engine = proc_of(base, max_loras=1, max_cpu_loras=1)
    engine.begin("a", 1, tokens=10)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    with pytest.raises(NoFreeSlot, match="this pause"):
        answer_of(engine, core.add_lora(adapter(2)))
    assert core.remove_lora(1) is True
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert len(engine.tokens_of("a")) == 10


def in_place(number: int) -> LoRARequest:
    again = adapter(number)
    again.load_inplace = True
    return again


@pytest.mark.timeout(60)
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
@pytest.mark.parametrize("waits", ["alone", "beside others"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda core: core.add_lora(adapter(3)),
        lambda core: core.add_lora(in_place(1)),
        lambda core: (core.remove_lora(1), core.add_lora(adapter(1)))[1],
    ],
    ids=["add_lora", "load_inplace", "remove_lora, then add_lora"],
)
def test_a_pause_answers_calls_though_requests_wait(
    base: Path, ask: Callable[[Any], Any], waits: str, state: PauseState
) -> None:
    """A trainer resumes only when its calls have been answered; what waited is answered then."""
    core, engine = proc_of(base, max_loras=1, max_cpu_loras=1)
    answer_of(engine, core.add_lora(adapter(1)))
    core.scheduler.set_pause_state(state)
    for name in ("a",) if waits == "alone" else ("a", "b"):
        engine.add(name, 1)
    if waits == "beside others":
        engine.add("base")
    engine.run()
    assert answer_of(engine, ask(core)) is True
    assert core.list_loras()
    assert not engine.outputs, "nothing runs before the pause ends"
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert len(engine.tokens_of("a")) == 3
    assert not core.scheduler.requests


@pytest.mark.timeout(60)
@pytest.mark.parametrize("runs", [1, None], ids=["an adapter", "the base model"])
def test_a_load_while_a_pause_drains_is_answered(base: Path, runs: int | None) -> None:
    """`pause_generation(mode="wait")`: what runs goes on to its end, and is not displaced."""
    core, engine = proc_of(base, max_loras=2, max_cpu_loras=2)
    for number in (1, 2):
        answer_of(engine, core.add_lora(adapter(number)))
    engine.begin("runs", runs, tokens=10)
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for number in (1, 2):
        engine.add(f"held-{number}", number)
    assert answer_of(engine, core.add_lora(adapter(3))) is True
    assert len(engine.tokens_of("runs")) == 10
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert [len(engine.tokens_of(f"held-{number}")) for number in (1, 2)] == [3, 3]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_removed", [False, True])
def test_weights_given_in_a_pause_replace_what_waits(base: Path, is_removed: bool) -> None:
    """What workers were given nobody can load again: who waits for these weights gets the next ones, as by vLLM."""
    core, engine = proc_of(base, max_loras=1, max_cpu_loras=1)
    answer_of(engine, core.collective_rpc("callers_own", args=([[added(1)]],)))
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.answer("a", 1)
    changes = [Change(1), added(1)] if is_removed else [added(1)]
    assert answer_of(engine, core.collective_rpc("callers_own", args=([changes],))) == ["done"]
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert len(engine.tokens_of("a")) == 3
    assert sum(isinstance(command, Load) for command in engine.commands) == 2


def test_where_lora_is_off_all_is_vllms(base: Path) -> None:
    core = core_of(base, EngineCoreProc, lora=False)
    assert core.add_lora(adapter(1)) == "vLLM's, of adapter-1"
    assert core.remove_lora(1) == core.pin_lora(1) == "vLLM's, of 1"
    for ask in (core.lora_plugins_residency, core.lora_plugins_figures):
        with pytest.raises(RuntimeError, match="no planner"):
            ask()


def test_vllm_still_converts_what_its_clients_send(proc: tuple[Any, Engine]) -> None:
    """A LoRARequest comes as a list of its fields."""
    core, _ = proc
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(adapter(1)))
    (converted,) = EngineCoreProc._convert_msgspec_args(core.add_lora, (plain,))
    assert converted == adapter(1)
    assert list(inspect.signature(core.add_lora).parameters) == ["lora_request"]
    sent = (spec(1), True)
    assert EngineCoreProc._convert_msgspec_args(core.lora_plugins_load, sent) == sent
    assert EngineCoreProc._convert_msgspec_args(core.remove_lora, (1,)) == (1,)


# --- in the caller's process, where nobody steps meanwhile ---


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda core: message(core.lora_plugins_load(spec(1), False)), Outcome(100, 0.25)),
        (lambda core: message(core.lora_plugins_pin(spec(1))), Outcome()),
        (lambda core: message(core.lora_plugins_retire(1, None)), Outcome()),
        (lambda core: core.add_lora(adapter(1)), True),
        (lambda core: core.remove_lora(1), False),
    ],
    ids=["load", "pin", "retire", "add_lora", "remove_lora"],
)
def test_in_process_the_answer_is_waited_for(core: Any, ask: Callable[[Any], Any], said: Any) -> None:
    assert ask(core) == said


def test_in_process_errors_are_answered_or_raised(core: Any) -> None:
    core.model_executor.fails[1] = BROKEN
    assert error_in(core.lora_plugins_load(spec(1), False)).found == BROKEN.found
    with pytest.raises(InvalidAdapter, match="nothing that can be read"):
        core.add_lora(adapter(1))


def test_in_process_a_pin_writes_the_slot_at_once(core: Any) -> None:
    assert message(core.lora_plugins_pin(spec(1))) == Outcome()
    assert [type(command) for command in core.model_executor.commands] == [Load, Activate]
    assert message(core.lora_plugins_retire(1, None)) == Outcome()
    assert core.lora_plugins_residency() == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("runs", [True, False], ids=["running", "held"])
def test_in_process_an_adapter_in_use_is_removed_at_once(core: Any, runs: bool) -> None:
    """Only its caller could end the request; that goes on, and others may come."""
    engine = engine_of(core)
    engine.add("a", 1, tokens=10)
    while runs and not engine.tokens_of("a"):
        engine.step()
    assert core.remove_lora(1) is True
    engine.run()
    assert len(engine.tokens_of("a")) == 10
    engine.answer("b", 1)
    assert len(engine.tokens_of("b")) == 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("runs", [True, False], ids=["running", "held"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda core: core.add_lora(adapter(3)),
        lambda core: error_in(core.lora_plugins_load(spec(3), True)) or True,
        lambda core: error_in(core.lora_plugins_pin(spec(3))) or True,
    ],
    ids=["add_lora", "load", "pin"],
)
def test_in_process_nothing_waits_for_what_is_in_use(core: Any, ask: Callable[[Any], Any], runs: bool) -> None:
    """All slots and places in host memory have adapters of unfinished requests: it is answered, or refused."""
    engine = engine_of(core)
    for name, number in (("a", 1), ("b", 2)):
        engine.add(name, number, tokens=10)
    while runs and not (engine.tokens_of("a") and engine.tokens_of("b")):
        engine.step()
    try:
        said = ask(core)
    except NoFreeSlot as error:
        said = error
    assert said is True or isinstance(said, NoFreeSlot)
    engine.run()
    assert len(engine.tokens_of("a")) == len(engine.tokens_of("b")) == 10
    assert core.add_lora(adapter(3)) is True, "when they have ended"


@pytest.mark.parametrize(("kind", "finished"), [(EngineCore, 1), (EngineCoreProc, 0)])
def test_in_process_sleep_waits_for_slot_writes(
    base: Path, kind: type, finished: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in a process of its own goes on with steps until they are done, before it sleeps."""
    core = core_of(base, kind, max_loras=2)
    monkeypatch.setattr(core, "pause_scheduler", lambda **_: None)
    core.model_executor.is_sleeping = False
    core.sleep(1)
    assert core.model_executor.is_sleeping
    assert core.model_executor.finished == finished


def test_slots_are_written_again_once_nothing_sleeps(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "resume_scheduler", lambda: None)
    core.wake_up(["weights"])
    assert core.model_executor.rewrites == 0, "what slots lie in may still be unmapped"
    core.wake_up()
    assert core.model_executor.rewrites == 1


# --- what callers do in workers ---


def added(number: int, size_bytes: int = 100) -> Change:
    return Change(number, AdapterSpec(number, f"adapter-{number}", "/stub", size_bytes=size_bytes, given=number))


def test_what_callers_add_in_workers_is_planned_when_they_return(proc: tuple[Any, Engine]) -> None:
    core, engine = proc
    future = core.collective_rpc("callers_own", args=([[added(1, 100)], [added(1, 140)]],))
    assert not future.done()
    assert answer_of(engine, future) == ["done", "done"]
    (load,) = engine.commands
    assert (bool(load.spec.given), load.spec.size_bytes) == (True, 140)
    engine.answer("a", 1)
    assert len(engine.tokens_of("a")) == 3
    assert answer_of(engine, core.collective_rpc("callers_own", args=([[Change(1)], [Change(1)]],))) == ["done"] * 2
    engine.run()
    assert 1 not in engine.in_memory


def test_vllms_gathering_of_events_is_no_callers_code(proc: tuple[Any, Engine]) -> None:
    """vllm-project/vllm#51433: the engine's loop asks workers for what happened, and has to have it at once."""
    core, engine = proc
    core.model_executor.changes = [[added(1)]]  # what somebody's thread in a worker has added meanwhile
    assert core.collective_rpc("take_notifications") == [["a was loaded"]]
    assert core.model_executor.changes == [[added(1)]], "the next call of a caller's finds them"
    assert answer_of(engine, core.collective_rpc("callers_own", args=([[added(1)]],))) == ["done"]


def test_calls_that_touch_no_adapter_return_at_once(proc: tuple[Any, Engine], core: Any) -> None:
    for of in (proc[0], core):
        assert of.collective_rpc("callers_own", args=([[], []],)) == ["done", "done"]


@pytest.mark.parametrize("of_workers", [[[added(1)], []], [[added(1)], [added(2)]], [[added(1)], [Change(1)]]])
def test_workers_that_were_given_different_adapters_keep_none(core: Any, of_workers: list[list[Change]]) -> None:
    with pytest.raises(InvalidAdapter, match="different adapters"):
        core.collective_rpc("callers_own", args=(of_workers,))
    assert core.model_executor.forgotten == [{change.engine_id for one in of_workers for change in one if change.spec}]
    assert not core.scheduler.planner.state.adapters


def test_a_call_that_fails_in_one_worker_leaves_nothing(core: Any) -> None:
    core.add_lora(adapter(1))
    with pytest.raises(ValueError, match="in one"):
        core.collective_rpc("callers_own", args=([[Change(1), added(1)], [Change(1)]], ValueError("in one")))
    assert core.model_executor.forgotten == [{1}]
    assert 1 not in core.scheduler.planner.state.current


def test_what_finds_no_room_is_not_kept_by_workers(base: Path) -> None:
    core = core_of(base, EngineCore, max_loras=1, max_cpu_loras=1)
    assert core.collective_rpc("callers_own", args=([[added(1)]],)) == ["done"]
    assert [type(command) for command in core.model_executor.commands] == [Load]
    with pytest.raises(NoFreeSlot, match="workers were given"):
        core.collective_rpc("callers_own", args=([[added(2)]],))
    assert core.model_executor.forgotten == [{2}]
