"""A streamed session that runs through an in-flight swap goes on with the weights that it has by then."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from lora_plugins.scheduler.messages import AdapterSpec, Move
from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.vllm_patches.engine_core.pausing import pause
from lora_plugins.vllm_patches.message_fields import VERSIONS
from tests.vllm_patches.engine_bed import BLOCK, Engine, Make, request_with_path

V1, V2, V3 = ("/store/" + digit * 64 for digit in "123")
NAME = "adapter-7"


def asked(name: str, path: str = V1, **more: Any) -> Any:
    return request_with_path(name, path, **more)


def swap(engine: Engine, path: str) -> None:
    """A new version in flight."""
    engine.commands.clear()
    engine.scheduler.planner.load(AdapterSpec(7, NAME, path, size_bytes=100), time.monotonic(), moves=True)
    engine.step_until(lambda: any(isinstance(command, Move) for command in engine.commands))


def moved_session(engine: Engine, *, prompt: int = 8) -> None:
    """A session `s` whose first part, of 20 tokens, began with V1 and ended with V2."""
    engine.begin(asked("s", prompt=prompt, tokens=20, resumable=True))
    swap(engine, V2)
    engine.run()
    assert len(engine.tokens_of("s")) == 20


def spans(engine: Engine, name: str) -> list[Any]:
    last = [output for output in engine.outputs if output.request_id == name][-1]
    return (last.kv_transfer_params or {}).get(VERSIONS, [])  # type: ignore[no-any-return]


def test_the_next_part_is_answered(bed: Make) -> None:
    engine = bed()
    moved_session(engine)
    for turn in (1, 2):
        engine.answer(asked("s", V2, prompt=3, tokens=5, resumable=True))
        assert len(engine.tokens_of("s")) == 20 + 5 * turn
        assert engine.scheduler.requests["s"].num_preemptions == 0, "its KV cache is its own still"


def test_the_next_part_moves_with_the_next_swap(bed: Make) -> None:
    engine = bed()
    moved_session(engine)
    had = len(engine.tokens_of("s"))
    engine.add(asked("s", V2, prompt=3, tokens=20, resumable=True))
    engine.step_until(lambda: len(engine.tokens_of("s")) > had)
    swap(engine, V3)
    engine.run()
    assert len(engine.tokens_of("s")) == had + 20
    assert [version for version, _ in spans(engine, "s")] == ["2" * 64, "3" * 64]


def test_no_other_request_finds_blocks_of_mixed_weights(bed: Make) -> None:
    """All tokens of the session are computed for a request of the new version."""
    engine = bed()
    moved_session(engine)
    engine.answer(asked("s", V2, prompt=3, tokens=9, resumable=True))
    tokens = list(engine.scheduler.requests["s"].all_token_ids)
    assert len(tokens) > 2 * BLOCK
    for name in ("first", "second"):
        engine.answer(asked(name, V2, prompt=len(tokens), token_ids=tokens, tokens=2))
    assert computed(engine, "first") == len(tokens), "nothing was found"
    assert computed(engine, "second") < len(tokens), "the cache works"


def computed(engine: Engine, name: str) -> int:
    """How many tokens of its prompt were computed."""
    return next(count for output in engine.sent if (count := output.num_scheduled_tokens.get(name)))


def test_a_moved_session_computed_again_has_keys_of_its_own(bed: Make) -> None:
    """Its tokens are computed with V2 then, also the ones that V1 computed before."""
    engine = bed()
    moved_session(engine, prompt=20)
    session = engine.scheduler.requests["s"]
    began_with = list(session.block_hashes[:1])
    engine.add(asked("s", V2, prompt=3, tokens=10, resumable=True))
    engine.step_until(lambda: len(engine.tokens_of("s")) > 20)
    assert session.block_hashes[:1] == began_with
    pause(engine.scheduler, NAME, PauseMode.KEEP)  # which preempts
    engine.run()
    assert session.block_hashes[:1] != began_with
    engine.scheduler.resume(NAME)
    engine.run()
    assert len(engine.tokens_of("s")) == 30


def test_a_part_that_comes_in_vllms_pause_keeps_its_adapter(bed: Make) -> None:
    """Another adapter has the slot: the session frees its KV cache in the pause, and runs in the step after it."""
    engine = bed(max_loras=1)
    engine.answer(asked("s", tokens=3, resumable=True))
    engine.answer("other", 8)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.add(asked("s", prompt=3, tokens=20, resumable=True))
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
    engine.answer(begin)
    engine.scheduler.planner.retire(7, time.monotonic(), is_last=True)
    engine.run()
    assert engine.in_memory == set()
    engine.answer(asked("a", prompt=3, tokens=5, resumable=True))
    assert len(engine.tokens_of("a")) == 10
    assert engine.in_memory == set()
