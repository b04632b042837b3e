"""A streamed session that runs through an in-flight swap goes on with the weights that it has by then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from lora_plugins.scheduler.messages import AdapterSpec, Move
from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.vllm_patches.engine_core.pausing import pause
from lora_plugins.vllm_patches.message_fields import VERSIONS
from tests.vllm_patches.engine_bed import (
    BLOCK,
    Engine,
    make_keys,
    make_scheduler,
    request,
    request_with_path,
    vllm_config,
)

V1, V2, V3 = ("/store/" + digit * 64 for digit in "123")
NAME = "adapter-7"


@pytest.fixture(params=[False, True], ids=["Scheduler", "AsyncScheduler"])
def bed(request: pytest.FixtureRequest, base: Path) -> Callable[..., Engine]:
    """An engine with a prefix cache."""

    def make(*, blocks: int = 64, max_loras: int = 2) -> Engine:
        config = vllm_config(base, is_async=request.param, max_loras=max_loras, max_cpu_loras=4)
        config.cache_config.enable_prefix_caching = True
        make_keys()
        return Engine(make_scheduler(config, blocks=blocks), lag=int(request.param))

    return make


def asked(name: str, path: str = V1, **more: Any) -> Any:
    return request_with_path(name, path, **more)


def step_until(engine: Engine, is_reached: Callable[[], bool]) -> None:
    for _ in range(50):
        if is_reached():
            return
        engine.step()
    raise AssertionError("it does not go on")


def swap(engine: Engine, path: str) -> None:
    """A new version in flight."""
    moves = sum(isinstance(command, Move) for command in engine.commands)
    engine.scheduler.planner.load(AdapterSpec(7, NAME, path, size_bytes=100), time.monotonic(), moves=True)
    while sum(isinstance(command, Move) for command in engine.commands) == moves:
        engine.step()


def moved_session(engine: Engine, *, prompt: int = 8) -> None:
    """A session `s` whose first part, of 20 tokens, began with V1 and ended with V2."""
    engine.scheduler.add_request(asked("s", prompt=prompt, tokens=20, resumable=True))
    while not engine.tokens_of("s"):
        engine.step()
    swap(engine, V2)
    engine.run()
    assert len(engine.tokens_of("s")) == 20


def spans(engine: Engine, name: str) -> list[Any]:
    last = [output for output in engine.outputs if output.request_id == name][-1]
    return (last.kv_transfer_params or {}).get(VERSIONS, [])  # type: ignore[no-any-return]


def test_the_next_part_is_answered(bed: Callable[..., Engine]) -> None:
    engine = bed()
    moved_session(engine)
    for turn in (1, 2):
        engine.scheduler.add_request(asked("s", V2, prompt=3, tokens=5, resumable=True))
        engine.run()
        assert len(engine.tokens_of("s")) == 20 + 5 * turn
        assert engine.scheduler.requests["s"].num_preemptions == 0, "its KV cache is its own still"


def test_the_next_part_moves_with_the_next_swap(bed: Callable[..., Engine]) -> None:
    engine = bed()
    moved_session(engine)
    had = len(engine.tokens_of("s"))
    engine.scheduler.add_request(asked("s", V2, prompt=3, tokens=20, resumable=True))
    step_until(engine, lambda: len(engine.tokens_of("s")) > had)
    swap(engine, V3)
    engine.run()
    assert len(engine.tokens_of("s")) == had + 20
    assert [version for version, _ in spans(engine, "s")] == ["2" * 64, "3" * 64]


def test_no_other_request_finds_blocks_of_mixed_weights(bed: Callable[..., Engine]) -> None:
    """All tokens of the session are computed for a request of the new version."""
    engine = bed()
    moved_session(engine)
    engine.scheduler.add_request(asked("s", V2, prompt=3, tokens=9, resumable=True))
    engine.run()
    tokens = list(engine.scheduler.requests["s"].all_token_ids)
    assert len(tokens) > 2 * BLOCK
    for name in ("first", "second"):
        engine.scheduler.add_request(asked(name, V2, prompt=len(tokens), token_ids=tokens, tokens=2))
        engine.run()
    assert computed(engine, "first") == len(tokens), "nothing was found"
    assert computed(engine, "second") < len(tokens), "the cache works"


def computed(engine: Engine, name: str) -> int:
    """How many tokens of its prompt were computed."""
    return next(count for output in engine.sent if (count := output.num_scheduled_tokens.get(name)))


def test_a_moved_session_computed_again_has_keys_of_its_own(bed: Callable[..., Engine]) -> None:
    """Its tokens are computed with V2 then, also the ones that V1 computed before."""
    engine = bed()
    moved_session(engine, prompt=20)
    session = engine.scheduler.requests["s"]
    began_with = list(session.block_hashes[:1])
    engine.scheduler.add_request(asked("s", V2, prompt=3, tokens=10, resumable=True))
    step_until(engine, lambda: len(engine.tokens_of("s")) > 20)
    assert session.block_hashes[:1] == began_with
    pause(engine.scheduler, NAME, PauseMode.KEEP)  # which preempts
    engine.run()
    assert session.block_hashes[:1] != began_with
    engine.scheduler.resume(NAME)
    engine.run()
    assert len(engine.tokens_of("s")) == 30


def test_a_part_that_comes_in_a_pause_is_answered(bed: Callable[..., Engine]) -> None:
    engine = bed()
    moved_session(engine)
    pause(engine.scheduler, NAME, PauseMode.KEEP)
    engine.scheduler.add_request(asked("s", V2, prompt=3, tokens=5, resumable=True))
    engine.step()
    engine.run()
    engine.scheduler.resume(NAME)
    engine.run()
    assert len(engine.tokens_of("s")) == 25


def test_a_part_that_comes_in_vllms_pause_keeps_its_adapter(bed: Callable[..., Engine]) -> None:
    """Another adapter has the slot: the session frees its KV cache in the pause, and runs in the step after it."""
    engine = bed(max_loras=1)
    engine.scheduler.add_request(asked("s", tokens=3, resumable=True))
    engine.run()
    engine.scheduler.add_request(request("other", 8))
    engine.run()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.scheduler.add_request(asked("s", prompt=3, tokens=20, resumable=True))
    engine.step()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    while len(engine.tokens_of("s")) < 10:
        engine.step()
        runs = {it.request_id for it in engine.scheduler.running}
        assert runs <= engine.scheduler.planner.state.of_request.keys()
    engine.run()
    assert len(engine.tokens_of("s")) == 23


def test_a_session_goes_on_after_an_unload_between_two_parts(bed: Any) -> None:
    engine = bed()
    begin = asked("a", prompt=8, tokens=5, resumable=True)
    engine.scheduler.add_request(begin)
    engine.run()
    engine.scheduler.planner.retire(7, time.monotonic(), is_last=True)
    engine.run()
    assert engine.in_memory == set()
    engine.scheduler.add_request(asked("a", prompt=3, tokens=5, resumable=True))
    engine.run()
    assert len(engine.tokens_of("a")) == 10
    assert engine.in_memory == set()
