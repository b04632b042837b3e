"""Admission over vLLM's real schedulers: what it holds, when it lets go, and that all others notice nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreEventType, FinishReason
from vllm.v1.request import RequestStatus

from lora_plugins.errors import InvalidAdapter
from lora_plugins.kernels.dispatch import CPU_WRAPPER
from lora_plugins.scheduler.messages import Activate, AdapterSpec, Evict, Load
from lora_plugins.vllm_patches.engine_core.scheduler import with_admission
from lora_plugins.vllm_patches.message_fields import error_in
from tests.scheduler.simulated import held_count
from tests.vllm_patches.engine_bed import Clock, Engine, Make, adapter, make_scheduler, request, vllm_config


def load_spec(number: int) -> AdapterSpec:
    return AdapterSpec(number, f"adapter-{number}", f"/store/{number}")


# --- held, and admitted ---


def test_held_until_its_adapter_is_in_a_slot(make_engine: Make) -> None:
    engine = make_engine(is_instant=False)
    scheduler = engine.scheduler
    scheduler.add_request(request("a", 1))
    scheduler.add_request(request("b"))
    assert scheduler.get_request_counts() == (0, 2)
    assert scheduler.get_num_unfinished_requests() == 2
    assert not scheduler.has_finished_requests()
    engine.holds_back = True
    for _ in range(5):
        assert "a" not in engine.step()
    assert [type(command) for command in engine.commands] == [Load]
    stats = scheduler.make_stats()
    assert (stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (0, 1)  # as vLLM counts who is passed over
    assert scheduler.has_requests()
    engine.holds_back = False
    engine.run()
    assert len(engine.tokens_of("a")) == len(engine.tokens_of("b")) == 3
    assert scheduler.get_request_counts() == (0, 0)
    assert not scheduler.has_requests()


def test_passed_over_requests_count_as_in_vllm(make_engine: Make) -> None:
    """VLLM cuts a long prompt where others run or wait beside it."""
    counts = []
    for is_stock in (True, False):
        engine = make_engine(is_stock=is_stock, max_loras=1)
        engine.scheduler.scheduler_config.long_prefill_token_threshold = 8
        engine.add("runs", 1, tokens=50)
        for _ in range(4):
            engine.step()
        engine.add("passed over", 2)
        engine.add("long", prompt=40)
        counts.append((engine.step(), engine.scheduler.get_request_counts()))
    assert counts[0] == counts[1] == ({"runs": 1, "long": 8}, (2, 1))


def test_free_slot_is_reused_in_the_next_step(make_engine: Make) -> None:
    engine = make_engine()
    for number in (1, 2):
        engine.add(f"warm-{number}", number, tokens=1)
    engine.run()
    engine.add("a", 1)
    engine.add("b", 2)
    while not [one for one in engine.outputs if one.request_id == "a" and one.finish_reason is not None]:
        assert "b" not in engine.step()
    assert "b" in engine.step()


def test_queued_is_recorded_once_when_it_came(make_engine: Make) -> None:
    engine = make_engine()
    held = request("a", 1)
    engine.add(held)
    came = held.events[0].timestamp
    engine.run()
    events = [event for one in engine.outputs if one.events for event in one.events]
    assert [event.type for event in events].count(EngineCoreEventType.QUEUED) == 1
    assert next(event.timestamp for event in events if event.type is EngineCoreEventType.QUEUED) == came


@pytest.mark.deployment(
    "preemption, tiny KV cache", "tested", "an adapter keeps its slot until the last preempted request has finished"
)
def test_preempted_it_keeps_its_adapter_in_flight(make_engine: Make) -> None:
    engine = make_engine(blocks=5)
    for name in ("a", "b", "c"):
        engine.add(name, 1, prompt=12, tokens=30)
    engine.add("other", 2)
    preempted = False
    while not engine.tokens_of("other"):
        engine.step()
        waiting = [one for one in engine.scheduler.requests.values() if one.num_preemptions]
        preempted = preempted or bool(waiting)
        in_flight = [name for one in engine.scheduler.planner.state.in_flight for name in one.running]
        if set(in_flight) & {"a", "b", "c"}:
            assert not engine.tokens_of("other")
    assert preempted
    engine.run()
    assert {len(engine.tokens_of(name)) for name in ("a", "b", "c")} == {30}


# --- finished from outside ---


@pytest.mark.parametrize("how", ["by id", "by ids", "all"])
def test_held_requests_are_aborted(make_engine: Make, how: str) -> None:
    engine = make_engine(finished_set=True)
    engine.holds_back = True
    for name, lora in (("a", 1), ("b", 1), ("c", None)):
        engine.add(name, lora)
    engine.step()
    chosen = {"by id": "a", "by ids": ["a", "c", "unknown"], "all": None}[how]
    gone = engine.scheduler.finish_requests(chosen, RequestStatus.FINISHED_ABORTED)
    names = {"by id": {"a"}, "by ids": {"a", "c"}, "all": {"a", "b", "c"}}[how]
    assert {one.request_id for one in gone} == names
    assert all(one.status is RequestStatus.FINISHED_ABORTED for one in gone)
    assert engine.scheduler.finish_requests(chosen, RequestStatus.FINISHED_ABORTED) == []
    assert held_count(engine.scheduler.planner) == len({"a", "b"} - names)
    engine.holds_back = False
    engine.run()
    assert set.union(*engine.finished) == {"a", "b", "c"}
    assert sum(len(finished) for finished in engine.finished) == 3, "each is said once"
    assert [name for name in ("a", "b") if engine.tokens_of(name)] == sorted({"a", "b"} - names)


# --- refused ---


def test_a_refused_request_gets_the_error(make_engine: Make) -> None:
    engine = make_engine(finished_set=True)
    engine.fails[1] = InvalidAdapter("nothing that can be read", adapter="adapter-1")
    engine.add("a", 1)
    engine.add("b", 1, client_index=0)
    engine.answer("c")
    for name in ("a", "b"):
        end = engine.end_of(name)
        assert (end.finish_reason, end.new_token_ids) == (FinishReason.ERROR, [])
        error = error_in(end.stop_reason)
        assert isinstance(error, InvalidAdapter)
        assert (error.found, error.adapter) == ("nothing that can be read", "adapter-1")
        assert [event.type for event in end.events] == [EngineCoreEventType.QUEUED]
    assert len(engine.tokens_of("c")) == 3
    assert {name for finished in engine.finished for name in finished} == {"a", "b", "c"}
    assert not engine.scheduler.has_requests()


# --- paused ---


@pytest.mark.deployment("pause and resume", "tested", "nothing is admitted; loads and pins are done")
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_while_paused_nothing_is_admitted_and_calls_go_on(make_engine: Make, state: PauseState) -> None:
    engine = make_engine()
    scheduler = engine.scheduler
    scheduler.add_request(request("first", 1, tokens=1))
    engine.run()
    scheduler.set_pause_state(state)
    scheduler.add_request(request("a", 1))
    scheduler.add_request(request("b", 2))
    for _ in range(3):
        engine.step()
    engine.drain()
    assert not engine.tokens_of("a")
    assert not scheduler.has_requests(), "nothing is to be done"
    future = scheduler.planner.load(load_spec(2), 0.0)
    assert scheduler.has_requests()
    engine.run()
    assert future.done()
    assert held_count(scheduler.planner) == 2
    assert not scheduler.has_requests()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert len(engine.tokens_of("a")) == len(engine.tokens_of("b")) == 3


# --- sessions ---


@pytest.mark.deployment("priority scheduling", "tested", "held requests of the first priority run first")
def test_priorities_count_where_the_policy_says_so(make_engine: Make) -> None:
    for policy, first in (("fcfs", "a"), ("priority", "b")):
        engine = make_engine(policy=policy)
        engine.holds_back = True
        engine.add("a", 1, priority=2)
        engine.add("b", 2, priority=1)
        engine.step()
        engine.holds_back = False
        while not (scheduled := engine.step()):
            pass
        assert set(scheduled) == {first}


# --- the class ---


def test_a_users_own_scheduler_gets_admission_too(make_engine: Make, base: Path) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    class Own(Scheduler):  # type: ignore[misc]
        steps = 0

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return super().schedule(*args, **kwargs)

    kind = with_admission(Own)
    assert with_admission(Own) is kind
    assert issubclass(kind, Own)
    assert kind.__name__ == "OwnWithAdmission"
    engine = Engine(make_scheduler(vllm_config(base), kind))
    engine.answer("a", 1)
    assert len(engine.tokens_of("a")) == 3
    assert engine.scheduler.steps > 3


def test_a_new_path_of_an_id_is_another_spec(make_engine: Make) -> None:
    scheduler = make_engine().scheduler
    scheduler.specs.uris[1] = "s3://bucket/a"
    assert scheduler.specs.of(adapter(1)) == AdapterSpec(1, "adapter-1", "/store/1", "s3://bucket/a")


def test_another_adapter_with_an_id_in_use_runs_beside_it(make_engine: Make, tmp_path: Path) -> None:
    """Whoever makes `LoRARequest`s himself may give an id twice; the first one's weights must not answer for both."""
    engine = make_engine(max_loras=2)
    engine.begin("first", 1, tokens=40)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"some")
    second = request("second", 1)
    second.lora_request = LoRARequest(lora_name="other", lora_int_id=1, lora_path=str(tmp_path))
    engine.add(second)
    while not engine.tokens_of("second"):
        engine.step()
    assert len(engine.tokens_of("first")) < 40
    first, other = (command for command in engine.commands if isinstance(command, Load))
    assert (first.spec.path, other.spec.path) == ("/store/1", str(tmp_path))
    assert first.key != other.key == engine.scheduler.requests["second"].lora_request.lora_int_id
    engine.run()
    third = request("third", 1)
    third.lora_request = LoRARequest(lora_name="other", lora_int_id=1, lora_path="/dummy_lora_path")
    engine.answer(third)
    assert engine.tokens_of("third")
    assert [command for command in engine.commands if not isinstance(command, Activate)][2:] == [Evict(first.key)]


def test_slots_that_only_point_raise_vllms_limit(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start: no step has to be made before the slots are known."""
    monkeypatch.setattr(type(current_platform), "get_punica_wrapper", classmethod(lambda _: CPU_WRAPPER))
    engine = make_engine(max_loras=1, max_cpu_loras=4)
    assert engine.scheduler.lora_config.max_loras == 5
    assert engine.scheduler.vllm_config.lora_config.max_loras == 1
    for number in (1, 2, 3, 4):
        engine.add(f"r{number}", number, tokens=20)
    together = set()
    while engine.scheduler.has_requests():
        together.add(len(engine.step()))
    engine.drain()
    assert max(together) == 4


# --- requests that wait while memory is left ---


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The flags that the log has told an operator to raise."""
    return lambda: [it.getMessage().rpartition("raise ")[2] for it in caplog.records if "raise --" in it.getMessage()]


@pytest.mark.parametrize(
    ("slots", "places", "blocks", "flag"),
    [(1, 4, 64, "--max-loras"), (4, 4, 64, ""), (2, 2, 64, "--max-cpu-loras"), (1, 4, 5, "")],
)
def test_the_flag_that_makes_requests_wait_is_said_once(
    make_engine: Make, clock: Clock, said: Callable[[], list[str]], slots: int, places: int, blocks: int, flag: str
) -> None:
    """Three adapters, twice, each of them with requests of several seconds; a full KV cache leaves them no memory."""
    engine = make_engine(max_loras=slots, max_cpu_loras=places, blocks=blocks)
    for number in range(6):
        engine.add(f"r{number}", 1 + number % 3, tokens=20, prompt=30 if blocks < 64 else 4)
    while engine.scheduler.has_requests():
        clock.step(engine, 0.3)
    engine.drain()
    assert said() == [flag] * bool(flag)
    assert engine.scheduler.planner.stats.short_of == flag
