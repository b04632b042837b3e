"""Requests of one engine id go on with the adapter of another id: how our API server changes a version in flight.

The adapter is loaded first, beside the old one, and changes nothing; the move is a call of its own. VLLM's real
scheduler of each kind.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from lora_plugins.errors import InvalidAdapter
from lora_plugins.scheduler.messages import AdapterSpec, Evict, Load
from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.vllm_patches.engine_core.pausing import pause
from lora_plugins.vllm_patches.message_fields import error_in
from tests.vllm_patches.engine_bed import Engine, request_with_path
from tests.vllm_patches.engine_core.test_request import V1, V2, from_cache, spans

NAME = "adapter-7"
V3 = "/store/" + "3" * 64
OF_V1, OF_V2, OF_V3 = ("1" * 64, "2" * 64, "3" * 64)


def asked(name: str, path: str, lora: int, **more: Any) -> Any:
    """A request that an API server has given this version of the one name."""
    one = request_with_path(name, path, lora, **more)
    one.lora_request.lora_name = NAME
    one.block_hashes.clear()
    one.update_block_hashes()
    return one


def load(engine: Engine, lora: int, path: str, succeeds: int) -> None:
    """Load a version, whose requests of `succeeds` are to move; nothing has changed by the end."""
    spec = AdapterSpec(lora, NAME, path, size_bytes=100)
    future = engine.scheduler.planner.load(spec, time.monotonic(), succeeds=succeeds)
    for _ in range(20):
        if future.done():
            break
        engine.step()
    assert future.exception(timeout=0) is None


def move(engine: Engine, lora: int) -> None:
    engine.scheduler.planner.move(lora, time.monotonic())


def ask(engine: Engine, name: str, path: str, lora: int) -> str:
    """Send a short request, and return the path of the weights that it begins with."""
    one = asked(name, path, lora, tokens=2)
    engine.begin(one)
    by = str(one.lora_request.lora_path)
    engine.run()
    return by


def evict(engine: Engine) -> None:
    """Have another adapter take the only place in host memory."""
    engine.answer(f"evicts-{len(engine.sent)}", 3)


@pytest.mark.parametrize("slots", [1, 2])
def test_what_runs_goes_on_in_its_slot(bed: Any, slots: int) -> None:
    engine = bed(max_loras=slots, max_cpu_loras=4)
    one = asked("a", V1, 7, tokens=24)
    engine.begin(one)
    load(engine, 8, V2, succeeds=7)
    assert (one.lora_request.lora_int_id, one.lora_request.lora_path) == (7, V1), "loaded, and nothing has changed"
    had = len(engine.tokens_of("a"))
    move(engine, 8)
    engine.step()
    assert one.lora_request.lora_path.startswith(V2)
    late, new = asked("late", V1, 7, tokens=8), asked("new", V2, 8, tokens=8)
    engine.begin(late)
    engine.begin(new)
    assert {it.lora_request.lora_int_id for it in (one, late, new)} == {7}, "one adapter, in one slot"
    assert (late.lora_request.lora_path, new.lora_request.lora_path) == (V2, V2)
    engine.run()
    assert [digest for digest, _ in spans(engine, "a")] == [OF_V1, OF_V2]
    assert spans(engine, "a")[1][1] >= had
    assert spans(engine, "late") == [(OF_V2, 0)], "its header says V1"
    assert engine.end_of("new").kv_transfer_params is None
    assert [ask(engine, f"again-{lora}", path, lora) for lora, path in ((8, V2), (7, V1))] == [V2, V2]


def test_a_load_retired_before_its_move_changes_nothing(bed: Any) -> None:
    """Another engine could not load the version, or the caller has left: the API server retires the new id."""
    engine = bed()
    engine.begin(asked("a", V1, 7, tokens=24))
    load(engine, 8, V2, succeeds=7)
    engine.scheduler.planner.retire(8, time.monotonic(), is_last=True)
    move(engine, 8)
    engine.run()
    assert engine.end_of("a").kv_transfer_params is None
    assert ask(engine, "late", V1, 7) == V1
    assert engine.in_memory == {7}


def test_a_request_for_the_new_version_moves_what_runs(bed: Any) -> None:
    """Another API server knows of the change before this engine has got the call."""
    engine = bed(max_loras=1)
    one = asked("a", V1, 7, tokens=24)
    engine.begin(one)
    load(engine, 8, V2, succeeds=7)
    engine.begin(asked("new", V2, 8, tokens=2))
    assert one.lora_request.lora_path.startswith(V2), "else the new request would wait for the slot"
    move(engine, 8)
    engine.run()
    assert [digest for digest, _ in spans(engine, "a")] == [OF_V1, OF_V2]


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_an_evicted_version_still_answers_for_both_ids(bed: Any, is_forgotten: bool) -> None:
    """The engine remembers a bounded number of adapters that it has loaded."""
    engine = bed(max_loras=1, max_cpu_loras=1)
    engine.begin(asked("a", V1, 7, tokens=2))
    engine.run()
    load(engine, 8, V2, succeeds=7)
    move(engine, 8)
    for number, (lora, path) in enumerate(((7, V1), (8, V2), (7, V1))):
        evict(engine)
        if is_forgotten:
            engine.scheduler.planner.state.cache.known_bytes.clear()
        assert ask(engine, f"again-{number}", path, lora) == V2


def test_a_forgotten_id_never_gives_its_successor_old_weights(bed: Any) -> None:
    """Workers know the successor by the key of the id that it succeeds."""
    engine = bed(max_loras=1, max_cpu_loras=1)
    engine.begin(asked("a", V1, 7, tokens=12))
    engine.scheduler.planner.state.cache.max_adapters = 2
    load(engine, 8, V2, succeeds=7)
    move(engine, 8)
    engine.run()
    engine.scheduler.planner.state.cache.max_adapters = 1
    evict(engine)
    engine.scheduler.planner.state.generations._successors.clear()
    assert ask(engine, "as if new", V1, 7) == V1
    for number in range(2):
        assert ask(engine, f"current-{number}", V2, 8) == V2
        assert [it.spec.path for it in engine.commands if isinstance(it, Load)][-1] == V2
        evict(engine)


def test_moves_one_after_the_other(bed: Any) -> None:
    engine = bed()
    one = asked("a", V1, 7, tokens=40)
    engine.begin(one)
    for lora, path in ((8, V2), (9, V3), (10, V1)):
        load(engine, lora, path, succeeds=lora - 1)
        move(engine, lora)
        engine.step()
        assert one.lora_request.lora_path.startswith(path)
    engine.run()
    assert [digest for digest, _ in spans(engine, "a")] == [OF_V1, OF_V2, OF_V3, OF_V1]
    assert [ask(engine, f"late-{lora}", V2, lora) for lora in (7, 8, 9, 10)] == [V1] * 4
    state = engine.scheduler.planner.state
    engine.scheduler.planner.retire(10, time.monotonic(), is_last=True)
    engine.run()
    assert (state.adapters, state.current, engine.in_memory) == ({}, {}, set())


def test_moves_in_a_pause_come_after_it(bed: Any) -> None:
    engine = bed(max_loras=1)
    one = asked("a", V1, 7, tokens=24)
    engine.begin(one)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for lora, path in ((8, V2), (9, V3)):
        load(engine, lora, path, succeeds=lora - 1)
        move(engine, lora)
        engine.add(asked(f"held-{lora}", V1, lora - 1))
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert spans(engine, "a")[-1][0] == OF_V3
    assert [spans(engine, f"held-{lora}") for lora in (8, 9)] == [[(OF_V3, 0)]] * 2


def test_a_paused_name_goes_on_with_the_version_of_meanwhile(bed: Any) -> None:
    engine = bed()
    engine.begin(asked("a", V1, 7, tokens=24))
    pause(engine.scheduler, NAME, PauseMode.KEEP)
    engine.run()
    had = len(engine.tokens_of("a"))
    load(engine, 8, V2, succeeds=7)
    engine.add(asked("held", V1, 7, tokens=2))
    move(engine, 8)
    engine.run()
    engine.scheduler.resume(NAME)
    engine.run()
    assert spans(engine, "a") == [(OF_V1, 0), (OF_V2, had)]
    assert spans(engine, "held") == [(OF_V2, 0)]


def test_a_version_evicted_before_its_move_is_loaded_again(bed: Any) -> None:
    engine = bed(max_loras=1, max_cpu_loras=2)
    one = asked("a", V1, 7, tokens=40)
    engine.begin(one)
    load(engine, 8, V2, succeeds=7)
    engine.scheduler.planner.load(AdapterSpec(3, "other", "/store/3", size_bytes=100), time.monotonic())
    engine.step()
    assert Evict(8) in engine.commands
    move(engine, 8)
    engine.run()
    assert [digest for digest, _ in spans(engine, "a")] == [OF_V1, OF_V2]


def test_a_version_that_cannot_be_loaded_again_answers_nobody(bed: Any) -> None:
    """The chat template of the requests that named it is its own; what runs finishes with its weights."""
    engine = bed(max_loras=1, max_cpu_loras=2)
    engine.begin(asked("a", V1, 7, tokens=40))
    load(engine, 8, V2, succeeds=7)
    engine.scheduler.planner.load(AdapterSpec(3, "other", "/store/3", size_bytes=100), time.monotonic())
    engine.step()
    engine.fails[8] = InvalidAdapter("gone")
    engine.answer(asked("new", V2, 8))
    assert error_in(engine.end_of("new").stop_reason)
    assert (len(engine.tokens_of("a")), engine.end_of("a").kv_transfer_params) == (40, None)
    assert 7 not in engine.in_memory, "its id means the other version"


@pytest.mark.parametrize("is_running", [True, False])
def test_the_pin_goes_over_with_its_slot(bed: Any, is_running: bool) -> None:
    engine = bed()
    state = engine.scheduler.planner.state
    pinned = engine.scheduler.planner.pin(AdapterSpec(7, NAME, V1, size_bytes=100), time.monotonic())
    engine.run()
    assert pinned.done()
    if is_running:
        engine.begin(asked("a", V1, 7, tokens=24))
    load(engine, 8, V2, succeeds=7)
    move(engine, 8)
    engine.run()
    (adapter,) = state.pinned
    assert (adapter.spec.engine_id, adapter.is_active, len(state.adapters)) == (8, True, 1)
    assert engine.scheduler.planner.unpin(8, time.monotonic())


def test_the_next_part_of_a_session_comes_before_its_move(bed: Any) -> None:
    """Its first part ran; another request of the version is what the move finds in its slot."""
    engine = bed(max_loras=1)
    engine.add(asked("s", V1, 7, prompt=20, tokens=2, resumable=True))
    engine.begin(asked("long", V1, 7, tokens=40))
    load(engine, 8, V2, succeeds=7)
    move(engine, 8)
    engine.answer(asked("s", V1, 7, prompt=8, tokens=2, resumable=True))
    assert len(engine.tokens_of("s")) == 4
    parts = [it.kv_transfer_params for it in engine.outputs if it.request_id == "s" and it.finish_reason is not None]
    assert [digest for digest, _ in parts[-1]["lora_versions"]] == [OF_V1, OF_V2]


def test_prefixes_are_of_the_weights_that_computed_them(bed: Any) -> None:
    engine = bed()
    engine.begin(asked("a", V1, 7, prompt=36, tokens=8))
    load(engine, 8, V2, succeeds=7)
    move(engine, 8)
    engine.run()
    for name, lora, path, cached in (("late", 7, V1, 0), ("new", 8, V2, 32)):
        engine.begin(asked(name, path, lora, prompt=36, tokens=2))
        assert from_cache(engine, name) == cached
    engine.run()
    load(engine, 9, V1, succeeds=8)
    move(engine, 9)
    engine.begin(asked("back", V1, 9, prompt=36, tokens=2))
    assert from_cache(engine, "back") == 32, "which V1 has computed"
