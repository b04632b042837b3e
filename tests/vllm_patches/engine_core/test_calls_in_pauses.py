"""Calls in vLLM's pauses and in an adapter's own: a trainer resumes only when its calls have been answered."""

from __future__ import annotations

import queue
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import RequestStatus

from lora_plugins.errors import AdapterNotFound, NoFreeSlot
from lora_plugins.scheduler.messages import Activate
from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.vllm_patches.engine_core import engine_core, pausing
from lora_plugins.vllm_patches.engine_core.pausing import pause
from tests.vllm_patches.engine_bed import Engine, Make, adapter, request
from tests.vllm_patches.put_back import put_back

KEPT, NEW, RUNS = PauseState.PAUSED_ALL, PauseState.PAUSED_NEW, PauseState.UNPAUSED
MODES = {"abort": NEW, "wait": NEW, "keep": KEPT}


class Executor:
    """Workers that are asked for nothing but what they were given past the plan."""

    is_sleeping = False

    def collective_rpc(self, method: str, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return [[]]

    def sleep(self, level: int) -> None:
        self.is_sleeping = True


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with put_back(EngineCore, EngineCoreProc):
        engine_core.patch()
        pausing.patch()
        yield


def core_of(engine: Engine) -> Any:
    """An engine core in a process of its own."""
    core = object.__new__(EngineCoreProc)
    core.scheduler, core.model_executor = engine.scheduler, Executor()
    core.engines_running, core.batch_queue, core._idle_state_callbacks = False, None, []
    core.output_queue, core.input_queue = queue.Queue(), queue.Queue()
    core._finish_pause = lambda clear_cache: None
    core._send_abort_outputs = lambda requests: None
    core.process_input_queue_block, core.is_running = False, lambda: True
    core.aborts_queue = queue.Queue()
    return core


def run(engine: Engine, steps: int = 300) -> None:
    """As long as the engine's loop would make steps."""
    for _ in range(steps):
        if not engine.scheduler.has_requests():
            engine.drain()
            if not engine.scheduler.has_requests():
                return
        engine.step()
    raise AssertionError("it does not come to rest")


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
    core = core_of(engine)
    for number in (8, 9):
        core.add_lora(adapter(number))
        run(engine)
    engine.scheduler.add_request(request("runs", 1, tokens=40))
    while not engine.tokens_of("runs"):
        engine.step()
    pause_generation(engine, mode)
    if is_drained:
        run(engine)
    engine.scheduler.add_request(request("held", 8))
    answers = [core.remove_lora(number) for number in (8, 9)]
    run(engine)
    assert all(is_answered(answer) for answer in answers)
    assert core.list_loras() <= {1}
    engine.scheduler.set_pause_state(RUNS)
    run(engine)
    assert len(engine.tokens_of("held")) == 3
    assert mode == "abort" or len(engine.tokens_of("runs")) == 40
    assert not {8, 9} & engine.in_memory


@pytest.mark.parametrize("where", ["running", "kept", "arriving", "preempted"])
@pytest.mark.parametrize("ask", ["remove_lora", "lora_plugins_retire"])
def test_requests_of_before_a_removal_end_whole(make_engine: Make, where: str, ask: str) -> None:
    engine = make_engine(blocks=8 if where == "preempted" else 64)
    core, names = core_of(engine), ["a", "b", "c"]
    for name in names if where != "arriving" else []:
        engine.scheduler.add_request(request(name, 1, tokens=40))
    for _ in range(36 if where == "preempted" else 4):
        engine.step()
    assert where != "preempted" or engine.scheduler.requests["c"].num_preemptions
    if where in ("kept", "arriving"):
        engine.scheduler.set_pause_state(KEPT)
    for name in names if where == "arriving" else []:
        engine.scheduler.add_request(request(name, 1, tokens=40))
    answer = core.remove_lora(1) if ask == "remove_lora" else core.lora_plugins_retire(1, None)
    assert is_answered(answer) == (ask == "remove_lora"), "vLLM's own call waits for no request"
    engine.scheduler.set_pause_state(RUNS)
    run(engine)
    assert [len(engine.tokens_of(name)) for name in names] == [40, 40, 40]
    assert is_answered(answer)
    assert 1 not in engine.in_memory


def test_a_takedown_refuses_what_has_not_run(make_engine: Make) -> None:
    engine = make_engine(blocks=8)
    core, names = core_of(engine), ["a", "b", "c"]
    for name in names:
        engine.scheduler.add_request(request(name, 1, tokens=40))
    for _ in range(36):
        engine.step()
    assert engine.scheduler.requests["c"].num_preemptions
    engine.scheduler.add_request(request("late", 1))
    core.lora_plugins_retire(1, AdapterNotFound("an adapter that was blocked").plain())
    run(engine)
    assert [len(engine.tokens_of(name)) for name in (*names, "late")] == [40, 40, 40, 0]
    assert engine.end_of("late").finish_reason.name == "ERROR"


def test_a_removal_that_refuses_requests_waits_for_running_ones(make_engine: Make) -> None:
    """Who unloads an adapter aborts them after a time."""
    engine = make_engine()
    core = core_of(engine)
    engine.scheduler.add_request(request("a", 1, tokens=20))
    while not engine.tokens_of("a"):
        engine.step()
    engine.scheduler.set_pause_state(KEPT)
    answer = core.lora_plugins_retire(1, AdapterNotFound("an adapter that was unloaded").plain())
    run(engine)
    assert not is_answered(answer)
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    run(engine)
    assert is_answered(answer)
    assert 1 not in engine.in_memory


@pytest.mark.parametrize("seed", range(60))
def test_removals_and_loads_are_answered_in_each_pause(make_engine: Make, seed: int) -> None:
    """Requests are held, run, wait in vLLM's queue, or were preempted; calls come alone, or several in a turn."""
    choose = random.Random(seed)
    places = choose.choice([2, 4])
    engine = make_engine(max_loras=choose.choice([1, 2]), max_cpu_loras=places, blocks=choose.choice([8, 64]))
    core, mode, answers, number = core_of(engine), choose.choice(list(MODES)), list[Any](), 0
    for _ in range(choose.randint(1, 14)):
        number += 1
        engine.scheduler.add_request(request(f"r{number}", choose.randint(1, 4), tokens=choose.randint(2, 50)))
        for _ in range(choose.randint(0, 3)):
            engine.step()
    pause_generation(engine, mode)
    if choose.random() < 0.5:
        run(engine)
    for _ in range(choose.randint(1, 4)):
        for _ in range(choose.randint(0, 2)):
            number += 1
            engine.scheduler.add_request(request(f"r{number}", choose.randint(1, 4)))
        removals = [core.remove_lora(choose.randint(1, 4)) for _ in range(choose.randint(0, 3))]
        answers += removals
        if choose.random() < 0.5:
            answers.append(core.add_lora(adapter(choose.randint(1, 6))))
        for _ in range(choose.randint(0, 2)):
            engine.step()
    run(engine)
    assert all(is_answered(answer) for answer in answers)
    errors = [answer.exception() for answer in answers if isinstance(answer, Future)]
    assert all(error is None or isinstance(error, NoFreeSlot) for error in errors)
    live = set(engine.scheduler.requests)
    engine.scheduler.set_pause_state(RUNS)
    for _ in range(2000):  # the clock does not stand still: slots pass on
        if not engine.scheduler.requests:
            break
        engine.step()
        time.sleep(0.0005)
    assert {engine.end_of(name).finish_reason.name for name in live} <= {"LENGTH"}


# --- the pause of one adapter ---


def test_a_removal_does_not_wait_for_the_resume(make_engine: Make) -> None:
    engine = make_engine()
    core = core_of(engine)
    for name in ("a", "b"):
        engine.scheduler.add_request(request(name, 1, tokens=30))
    while not engine.tokens_of("b"):
        engine.step()
    core.lora_plugins_pause("adapter-1", "keep")
    run(engine)
    assert core.remove_lora(1) is True
    assert 1 not in core.list_loras()
    engine.fails[1] = AdapterNotFound("files that the caller has deleted")
    run(engine)
    core.lora_plugins_resume("adapter-1")
    run(engine)
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
    core = core_of(engine)
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
    engine.scheduler.add_request(request("base", tokens=10))
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
    core = core_of(engine)
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
        engine.scheduler.add_request(request(f"r{number}", number, tokens=50))
    while not (engine.tokens_of("r1") and engine.tokens_of("r2")):
        engine.step()
    for number in range(100, 100 + names):
        pause(engine.scheduler, f"adapter-{number}", PauseMode.KEEP)
        if holds:
            engine.scheduler.add_request(request(f"held-{number}", number))
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
