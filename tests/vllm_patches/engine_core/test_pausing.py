"""One adapter is paused in vLLM's real schedulers: its requests stop, all others run, and nothing is lost."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from lora_plugins.errors import NoFreeSlot
from lora_plugins.scheduler.messages import RequestsOfName, from_plain
from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.vllm_patches.engine_core import engine_core
from lora_plugins.vllm_patches.engine_core.pausing import pause
from lora_plugins.vllm_patches.engine_core.request import CLIENT
from lora_plugins.vllm_patches.message_fields import error_in
from tests.vllm_patches.engine_bed import Engine, Make, request

NAME = "adapter-1"
PAUSES = list(PauseMode)


def running(make_engine: Make, **config: Any) -> Engine:
    """An engine in which `runs` has answered three of twenty tokens with adapter 1."""
    engine = make_engine(**config)
    engine.add("runs", 1, tokens=20)
    while len(engine.tokens_of("runs")) < 3:
        engine.step()
    return engine


def unpaused(make_engine: Make, name: str, tokens: int) -> list[int]:
    engine = make_engine()
    engine.answer(name, 1, tokens=tokens)
    return engine.tokens_of(name)


@pytest.mark.parametrize("mode", PAUSES)
def test_new_requests_wait_for_the_resume_while_others_run(make_engine: Make, mode: PauseMode) -> None:
    engine = make_engine(max_loras=1)
    scheduler = engine.scheduler
    assert pause(scheduler, NAME, mode) == []
    assert scheduler.pauses.paused(NAME).done(), "nothing runs"
    for name, lora in (("held", 1), ("other", 2), ("base", None)):
        scheduler.add_request(request(name, lora))
    engine.run()
    assert [len(engine.tokens_of(name)) for name in ("held", "other", "base")] == [0, 3, 3]
    assert (scheduler.has_requests(), scheduler.get_request_counts()) == (False, (0, 1)), "it waits, and spins nothing"
    assert scheduler.get_num_unfinished_requests() == 1
    stats = scheduler.make_stats()
    assert (stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (0, 1)
    scheduler.resume(NAME)
    engine.run()
    assert engine.tokens_of("held") == unpaused(make_engine, "held", 3)
    assert scheduler.get_num_unfinished_requests() == 0


def test_a_pause_that_waits_is_answered_when_none_runs(make_engine: Make) -> None:
    engine = running(make_engine)
    assert pause(engine.scheduler, NAME, PauseMode.WAIT) == ["runs"]
    paused = engine.scheduler.pauses.paused(NAME)
    engine.add("held", 1)
    engine.step()
    assert not paused.done()
    engine.run()
    assert paused.done()
    assert (len(engine.tokens_of("runs")), engine.tokens_of("held")) == (20, [])


def test_what_waits_for_a_slot_waits_for_the_resume(make_engine: Make) -> None:
    engine = running(make_engine, max_loras=1)
    engine.add("waits", 2)
    engine.step()
    assert pause(engine.scheduler, "adapter-2", PauseMode.WAIT) == ["waits"]
    assert engine.scheduler.pauses.paused("adapter-2").done()
    engine.run()
    assert (len(engine.tokens_of("runs")), engine.tokens_of("waits")) == (20, [])
    engine.scheduler.resume("adapter-2")
    engine.run()
    assert len(engine.tokens_of("waits")) == 3


def test_an_abort_names_what_runs_and_what_waits(make_engine: Make) -> None:
    engine = running(make_engine)
    pause(engine.scheduler, NAME, PauseMode.KEEP)
    engine.add("held", 1)
    engine.step()
    names = pause(engine.scheduler, NAME, PauseMode.ABORT)
    assert sorted(names) == ["held", "runs"]
    paused = engine.scheduler.pauses.paused(NAME)
    engine.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert (paused.done(), engine.scheduler.requests, engine.scheduler.pauses.held_count) == (True, {}, 0)


def test_kept_requests_give_up_slot_and_blocks_and_go_on(make_engine: Make) -> None:
    engine = running(make_engine, max_loras=1)
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    pause(engine.scheduler, NAME, PauseMode.KEEP)
    paused = engine.scheduler.pauses.paused(NAME)
    engine.step()
    engine.drain()
    had, begun = len(engine.tokens_of("runs")), free()
    assert (paused.done(), had < 6) == (True, True)
    assert begun == engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1, "all but vLLM's own null block"
    engine.answer("other", 2, tokens=30)
    assert (len(engine.tokens_of("other")), len(engine.tokens_of("runs"))) == (30, had)
    assert "runs" not in engine.known, "workers keep no place for it"
    engine.scheduler.resume(NAME)
    engine.run()
    assert engine.tokens_of("runs") == unpaused(make_engine, "runs", 20)


def test_kept_requests_in_vllms_queue_are_kept_too(make_engine: Make) -> None:
    engine = make_engine()
    for number in range(12):  # eight run at once
        engine.add(f"r{number:02}", 1, tokens=10)
    for _ in range(4):
        engine.step()
    pause(engine.scheduler, NAME, PauseMode.KEEP)
    engine.run()
    assert (len(engine.scheduler.requests), engine.scheduler.get_request_counts()) == (12, (0, 12))
    engine.scheduler.resume(NAME)
    engine.run()
    for number in range(12):
        assert engine.tokens_of(f"r{number:02}") == unpaused(make_engine, f"r{number:02}", 10)
    firsts = [next(i for i, it in enumerate(engine.outputs) if it.request_id == f"r{n:02}") for n in range(12)]
    assert firsts == sorted(firsts), "in the order in which they came"


def test_an_unload_answers_what_is_held_and_what_is_kept(make_engine: Make) -> None:
    engine = running(make_engine)
    pause(engine.scheduler, NAME, PauseMode.KEEP)
    engine.answer("held", 1)
    refusal = NoFreeSlot("unloaded")
    retired = engine.scheduler.planner.retire(1, time.monotonic(), refusal, is_last=True)
    engine.scheduler.resume(NAME)
    engine.run()
    assert retired.done()
    assert isinstance(error_in(engine.end_of("held").stop_reason), NoFreeSlot)
    assert engine.tokens_of("runs") == unpaused(make_engine, "runs", 20)
    assert not engine.scheduler.requests


def test_parts_of_running_requests_do_not_wait(make_engine: Make) -> None:
    """Beams: the client's request ends only if the next tokens of its beams are computed."""
    engine = make_engine()
    first, second = part_of("c", 1), part_of("c", 2)
    engine.begin(first, 1, tokens=1)
    pause(engine.scheduler, NAME, PauseMode.WAIT)
    paused = engine.scheduler.pauses.paused(NAME)
    engine.add(second, 1, tokens=1)
    assert not paused.done()
    engine.run(steps=10**6)
    assert (paused.done(), len(engine.tokens_of(second))) == (True, 1)


def part_of(client: str, number: int) -> str:
    return f"{client}-{'0' * 16}-beam-{number}-{'a' * 8}"


def of_client(name: str, client: str, **options: Any) -> Any:
    part = request(name, 1, **options)
    part.trace_headers = {CLIENT: client, "traceparent": "00-1"}
    return part


def test_ids_that_clients_choose_join_no_pause(make_engine: Make) -> None:
    """An API server names the client's request; the ids look like prompts of one request."""
    engine = make_engine()
    scheduler = engine.scheduler
    scheduler.add_request(of_client("cmpl-same-0-00000000", "first", tokens=20))
    while not engine.tokens_of("cmpl-same-0-00000000"):
        engine.step()
    pause(scheduler, NAME, PauseMode.WAIT)
    paused = scheduler.pauses.paused(NAME)
    scheduler.add_request(of_client("cmpl-same-1-00000001", "first"))
    for number in range(40):
        scheduler.add_request(of_client(f"cmpl-same-0-000001{number:02}", f"later-{number}"))
        engine.step()
    assert paused.done()
    assert len(engine.tokens_of("cmpl-same-1-00000001")) == 3, "a part of the client's own request"
    assert {output.request_id for output in engine.outputs} == {"cmpl-same-0-00000000", "cmpl-same-1-00000001"}
    assert {header for output in engine.outputs for header in output.trace_headers or {}} == {"traceparent"}


def test_parts_of_requests_that_another_engine_runs_join(make_engine: Make) -> None:
    engine, parts = make_engine(max_loras=1), [part_of("c", number) for number in range(5)]
    scheduler = engine.scheduler
    scheduler.add_request(request("other", 2, tokens=5))
    engine.step()
    scheduler.add_request(request(parts[0], 1, tokens=1))  # waits for the slot: stopped
    pause(scheduler, NAME, PauseMode.WAIT)
    scheduler.add_request(request(parts[1], 1, tokens=1))  # comes after the pause: held
    scheduler.add_request(request(part_of("d", 1), 1, tokens=1))
    engine.run()
    assert engine.tokens_of(parts[0]) == engine.tokens_of(parts[1]) == []
    scheduler.join(NAME, ["c"])
    scheduler.add_request(request(parts[2], 1, tokens=1))
    paused = scheduler.pauses.paused(NAME)
    engine.run()
    assert [len(engine.tokens_of(part)) for part in parts[:3]] == [1, 1, 1]
    assert engine.tokens_of(part_of("d", 1)) == []
    again = scheduler.pauses.paused(NAME)
    engine.run(steps=10**6)
    assert (paused.result(0), again.result(0)) == (True, False), "the next part was expected for a while"
    scheduler.join(NAME, [])
    scheduler.add_request(request(parts[3], 1, tokens=1))
    engine.run()
    assert engine.tokens_of(parts[3]) == []
    scheduler.resume(NAME)
    engine.run()
    assert len(engine.tokens_of(parts[3])) == len(engine.tokens_of(part_of("d", 1))) == 1


def test_parts_of_aborted_requests_end_in_whichever_engine(make_engine: Make) -> None:
    engine, parts, other = make_engine(), [part_of("c", number) for number in range(3)], part_of("d", 1)
    scheduler = engine.scheduler
    assert pause(scheduler, NAME, PauseMode.ABORT) == [], "another engine has had all parts so far"
    scheduler.add_request(request(parts[0], 1, tokens=1))
    engine.run()
    scheduler.join(NAME, ["c"])
    for name in (parts[1], other):
        scheduler.add_request(request(name, 1, tokens=1))
    engine.run()
    assert [engine.end_of(part).finish_reason for part in parts[:2]] == [FinishReason.ABORT] * 2
    assert (list(scheduler.requests), scheduler.pauses.held_count) == ([other], 1)
    scheduler.join(NAME, [])
    scheduler.add_request(request(parts[2], 1, tokens=1))  # the client uses its request's id again
    engine.run()
    assert list(scheduler.requests) == [other, parts[2]]
    scheduler.resume(NAME)
    engine.run()
    assert [len(engine.tokens_of(name)) for name in (*parts, other)] == [0, 0, 1, 1]


def test_a_client_that_leaves_before_its_part_ends_gets_nothing(make_engine: Make) -> None:
    engine = make_engine()
    pause(engine.scheduler, NAME, PauseMode.ABORT)
    engine.scheduler.join(NAME, ["c"])
    engine.add(part_of("c", 1), 1, tokens=1)
    engine.scheduler.finish_requests([part_of("c", 1)], RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert (engine.outputs, engine.scheduler.requests) == ([], {})


def test_an_abort_names_clients_whose_parts_wait_or_are_expected(make_engine: Make) -> None:
    engine = make_engine(max_loras=1)
    core: Any = EngineCore.__new__(EngineCore)
    core.scheduler = engine.scheduler
    engine.add("other", 2, tokens=5)
    engine.step()
    engine.add("0_waits", 1, tokens=1)
    assert from_plain(RequestsOfName, engine_core._pause(core, NAME, "abort")) == RequestsOfName(
        ("0_waits",), ("waits",)
    )
    engine.run()
    engine.answer(part_of("c", 1), 2, tokens=1)
    found = from_plain(RequestsOfName, engine_core._pause(core, "adapter-2", "abort"))
    assert found == RequestsOfName((), ("c",)), "its next part is expected"


def test_what_a_dead_api_server_has_asked_for_ends(make_engine: Make) -> None:
    engine = make_engine()
    core: Any = EngineCore.__new__(EngineCore)
    core.scheduler = engine.scheduler
    pause(engine.scheduler, "adapter-2", PauseMode.WAIT)
    for name, adapter, number in (("runs", 1, 3), ("held", 2, 3), ("other", 1, 0)):
        engine.add(of_dead := request(name, adapter, tokens=9))
        of_dead.client_index = number
    engine.step()
    engine_core._end_api_server(core, 3)
    assert list(engine.scheduler.requests) == ["other"]
    engine.run()
    assert len(engine.tokens_of("other")) == 9


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.ABORT])
def test_no_part_joins_in_another_mode(make_engine: Make, mode: PauseMode) -> None:
    engine = make_engine()
    pause(engine.scheduler, NAME, mode)
    engine.add(part_of("c", 1), 1, tokens=1)
    engine.scheduler.join(NAME, ["c"])
    engine.run()
    assert engine.tokens_of(part_of("c", 1)) == []


def test_a_session_that_waits_for_its_next_part_is_held(make_engine: Make) -> None:
    engine = make_engine()
    engine.answer("s", 1, tokens=2, resumable=True)
    pause(engine.scheduler, NAME, PauseMode.WAIT)
    engine.answer("s", 1, tokens=2, resumable=True)
    assert len(engine.tokens_of("s")) == 2
    engine.scheduler.resume(NAME)
    engine.run()
    assert len(engine.tokens_of("s")) == 4


def test_resuming_twice_and_resuming_what_is_not_paused_does_nothing(make_engine: Make) -> None:
    engine = running(make_engine)
    engine.scheduler.resume(NAME)
    pause(engine.scheduler, NAME, PauseMode.KEEP)
    engine.scheduler.resume(NAME)
    engine.scheduler.resume(NAME)
    engine.run()
    assert engine.tokens_of("runs") == unpaused(make_engine, "runs", 20)
    assert not engine.scheduler.pauses._pauses
