"""Calls in vLLM's pauses and in an adapter's own: a trainer resumes only when its calls have been answered."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from lora_plugins.errors import AdapterNotFound
from lora_plugins.scheduler.messages import Activate
from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.vllm_patches.engine_core.pausing import pause
from tests.vllm_patches.engine_bed import Engine, Make, adapter
from tests.vllm_patches.engine_core.cores import core_of

pytestmark = pytest.mark.usefixtures("patched_core")

KEPT, NEW, RUNS = PauseState.PAUSED_ALL, PauseState.PAUSED_NEW, PauseState.UNPAUSED
MODES = {"abort": NEW, "wait": NEW, "keep": KEPT}


def pause_generation(engine: Engine, mode: str) -> None:
    if mode == "abort":
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.scheduler.set_pause_state(MODES[mode])


def is_answered(answer: Any) -> bool:
    return not isinstance(answer, Future) or answer.done()


# --- vLLM's own pauses ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_drained", [False, True])
def test_two_removals_in_one_turn_of_the_loop_are_answered(make_engine: Make, mode: str, is_drained: bool) -> None:
    """One of an adapter with a held request: no plan follows the last step's `Evict`."""
    engine = make_engine(max_cpu_loras=4)
    core = core_of(engine.scheduler)
    for number in (8, 9):
        core.add_lora(adapter(number))
        engine.run()
    engine.begin("runs", 1, tokens=40)
    pause_generation(engine, mode)
    if is_drained:
        engine.run()
    engine.add("held", 8)
    answers = [core.remove_lora(number) for number in (8, 9)]
    engine.run()
    assert all(is_answered(answer) for answer in answers)
    assert core.list_loras() <= {1}
    engine.scheduler.set_pause_state(RUNS)
    engine.run()
    assert len(engine.tokens_of("held")) == 3
    assert mode == "abort" or len(engine.tokens_of("runs")) == 40
    assert not {8, 9} & engine.in_memory


@pytest.mark.parametrize("where", ["running", "kept", "arriving", "preempted"])
@pytest.mark.parametrize("ask", ["remove_lora", "lora_plugins_retire"])
def test_requests_of_before_a_removal_end_whole(make_engine: Make, where: str, ask: str) -> None:
    engine = make_engine(blocks=8 if where == "preempted" else 64)
    core, names = core_of(engine.scheduler), ["a", "b", "c"]
    for name in names if where != "arriving" else []:
        engine.add(name, 1, tokens=40)
    for _ in range(36 if where == "preempted" else 4):
        engine.step()
    assert where != "preempted" or engine.scheduler.requests["c"].num_preemptions
    if where in ("kept", "arriving"):
        engine.scheduler.set_pause_state(KEPT)
    for name in names if where == "arriving" else []:
        engine.add(name, 1, tokens=40)
    answer = core.remove_lora(1) if ask == "remove_lora" else core.lora_plugins_retire(1, None)
    assert is_answered(answer) == (ask == "remove_lora"), "vLLM's own call waits for no request"
    engine.scheduler.set_pause_state(RUNS)
    engine.run()
    assert [len(engine.tokens_of(name)) for name in names] == [40, 40, 40]
    assert is_answered(answer)
    assert 1 not in engine.in_memory


def test_a_takedown_refuses_what_has_not_run(make_engine: Make) -> None:
    engine = make_engine(blocks=8)
    core, names = core_of(engine.scheduler), ["a", "b", "c"]
    for name in names:
        engine.add(name, 1, tokens=40)
    for _ in range(36):
        engine.step()
    assert engine.scheduler.requests["c"].num_preemptions
    engine.add("late", 1)
    core.lora_plugins_retire(1, AdapterNotFound("an adapter that was blocked").plain())
    engine.run()
    assert [len(engine.tokens_of(name)) for name in (*names, "late")] == [40, 40, 40, 0]
    assert engine.end_of("late").finish_reason.name == "ERROR"


def test_a_removal_that_refuses_requests_waits_for_running_ones(make_engine: Make) -> None:
    """Who unloads an adapter aborts them after a time."""
    engine = make_engine()
    core = core_of(engine.scheduler)
    engine.begin("a", 1, tokens=20)
    engine.scheduler.set_pause_state(KEPT)
    answer = core.lora_plugins_retire(1, AdapterNotFound("an adapter that was unloaded").plain())
    engine.run()
    assert not is_answered(answer)
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert is_answered(answer)
    assert 1 not in engine.in_memory


# --- the pause of one adapter ---


def test_a_removal_does_not_wait_for_the_resume(make_engine: Make) -> None:
    engine = make_engine()
    core = core_of(engine.scheduler)
    for name in ("a", "b"):
        engine.begin(name, 1, tokens=30)
    core.lora_plugins_pause("adapter-1", "keep")
    engine.run()
    assert core.remove_lora(1) is True
    assert 1 not in core.list_loras()
    engine.fails[1] = AdapterNotFound("files that the caller has deleted")
    engine.run()
    core.lora_plugins_resume("adapter-1")
    engine.run()
    assert [len(engine.tokens_of(name)) for name in ("a", "b")] == [30, 30]
    assert 1 not in engine.in_memory


# --- vLLM's pause beside workers' jobs ---


def answer_calls(core: Any, engine: Engine, steps: int) -> None:
    """Turns of the engine's loop."""
    for _ in range(steps):
        core._process_input_queue()
        if core.has_work():
            engine.step()


def loading(make_engine: Make) -> tuple[Any, Engine, Any]:
    """An engine without requests, whose workers load an adapter for long."""
    engine = make_engine(max_cpu_loras=4)
    core = core_of(engine.scheduler)
    engine.holds_back = True
    call = core.add_lora(adapter(5))
    answer_calls(core, engine, 3)
    return core, engine, call


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_does_not_wait_for_a_load(make_engine: Make, mode: str) -> None:
    core, engine, call = loading(make_engine)
    engine.drain()
    assert core.pause_scheduler(mode, False) is None
    assert core.has_work(), "the load goes on"
    engine.holds_back = False
    answer_calls(core, engine, 8)
    assert call.result(timeout=0) is True
    assert not core.has_work()


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_pause_waits_for_requests_and_not_for_a_load(make_engine: Make, mode: str) -> None:
    core, engine, call = loading(make_engine)
    engine.add("base", tokens=10)
    answer_calls(core, engine, 3)
    paused = core.pause_scheduler(mode, False)
    assert not is_answered(paused)
    answer_calls(core, engine, 16)
    assert is_answered(paused)
    assert not call.done()
    assert core.has_work(), "the load goes on"
    assert len(engine.tokens_of("base")) == 10 or mode == "abort"


def test_an_engine_sleeps_beside_a_load(make_engine: Make) -> None:
    core, engine, call = loading(make_engine)
    engine.drain()
    assert core.sleep(1) is None
    assert core.model_executor.is_sleeping
    engine.holds_back = False
    answer_calls(core, engine, 8)
    assert call.result(timeout=0) is True
    assert not any(isinstance(command, Activate) for command in engine.commands), "no slot is written meanwhile"


def test_an_engine_does_not_sleep_while_a_slot_is_written(make_engine: Make) -> None:
    engine = make_engine(is_instant=False)
    core = core_of(engine.scheduler)
    core.add_lora(adapter(1))
    while not any(isinstance(command, Activate) for command in engine.commands):
        engine.step()
        engine.holds_back = core.scheduler.planner.state.current[1].is_loaded
    assert engine.commands[-1].job is not None, "in the background"
    slept = core.sleep(1)
    answer_calls(core, engine, 5)
    assert not is_answered(slept)
    assert not core.model_executor.is_sleeping
    engine.holds_back = False
    answer_calls(core, engine, 5)
    assert is_answered(slept)
    assert core.model_executor.is_sleeping


@pytest.mark.skipif(not hasattr(EngineCore, "release_kv_cache_memory"), reason="since vLLM 0.31")
def test_the_kv_cache_is_released_beside_a_load(make_engine: Make) -> None:
    core, engine, _ = loading(make_engine)
    engine.drain()
    discarded: list[Any] = []
    core._reset_caches, core.model_executor.discard = lambda: None, discarded.append
    with pytest.raises(RuntimeError, match="pause"):
        core.release_kv_cache_memory()
    assert core.pause_scheduler("keep", False) is None
    core.release_kv_cache_memory()
    assert discarded == [("kv_cache",)]


# --- what many pauses cost ---


@pytest.mark.parametrize("what", ["paused", "paused, each with a held request"])
def test_a_thousand_paused_names_cost_a_step_little(make_engine: Make, what: str) -> None:
    """Counted in Python's calls and lines, as a clock of a busy machine says little."""
    few, many = (lines_of_a_step(make_engine, names, holds="held" in what) for names in (1, 1000))
    assert many <= few + 20, (few, many)


def lines_of_a_step(make_engine: Make, names: int, *, holds: bool) -> int:
    """Lines of Python that our part of a step takes, with requests in flight and so many paused names."""
    engine = make_engine(max_loras=2, max_cpu_loras=4)
    for number in (1, 2):
        engine.begin(f"r{number}", number, tokens=50)
    for number in range(100, 100 + names):
        pause(engine.scheduler, f"adapter-{number}", PauseMode.KEEP)
        if holds:
            engine.add(f"held-{number}", number)
    scheduler, lines = engine.scheduler, 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line" and "lora_plugins" in frame.f_code.co_filename
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        scheduler.has_requests()
        scheduler.plan()
        scheduler.get_request_counts()
        scheduler.make_stats()
    finally:
        sys.settrace(before)
    return lines
