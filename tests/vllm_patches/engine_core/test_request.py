"""Which weights a request of vLLM's real scheduler is computed with, and whose prefix cache it reads and fills."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import get_offload_block_hash

from lora_plugins.scheduler.messages import AdapterSpec, Load
from lora_plugins.vllm_patches.message_fields import error_in
from tests.vllm_patches.engine_bed import BLOCK, Engine
from tests.vllm_patches.engine_bed import request_with_path as asked

V1, V2 = "/store/" + "1" * 64, "/store/" + "2" * 64


def version(path: str) -> AdapterSpec:
    return AdapterSpec(7, "adapter-7", path, size_bytes=100)


def load(engine: Engine, path: str, steps: int = 4, **more) -> None:
    engine.scheduler.planner.load(version(path), time.monotonic(), **more)
    for _ in range(steps):
        engine.step()


def from_cache(engine: Engine, name: str) -> int:
    return next(
        new.num_computed_tokens for sent in engine.sent for new in sent.scheduled_new_reqs if new.req_id == name
    )


def spans(engine: Engine, name: str):
    engine.drain()
    return engine.end_of(name).kv_transfer_params["lora_versions"]


def test_prefixes_of_what_moved_and_was_preempted(bed) -> None:
    """inflight, then reset_prefix_cache(reset_running_requests=True) as trainers call it, then a rollback."""
    engine = bed()
    engine.begin(asked("a", V1, prompt=36, tokens=24))
    load(engine, V2, moves=True)
    assert engine.scheduler.requests["a"].lora_request.lora_path.startswith(V2)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()  # all of it is computed again, by V2
    load(engine, V1)
    later = asked("b", V1, prompt=36)
    engine.begin(later)
    assert later.lora_request.lora_path == V1
    assert from_cache(engine, "b") == 0, "nothing in the cache was computed by V1"


def test_offloaded_blocks_have_the_keys_of_what_computed_them(bed) -> None:
    """vLLM's connector to the CPU's memory keeps a prompt's keys from its first batch; the rest is computed by V2."""
    offloading = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config={"cpu_bytes_to_use": 1 << 24}
    )
    engine = bed(kv_transfer_config=offloading)
    engine.scheduler.max_num_scheduled_tokens = 4  # of a prompt, in each batch
    one = asked("a", V1, prompt=60, tokens=2)
    engine.add(one)
    while one.num_computed_tokens < BLOCK:
        engine.step()
    by_v1 = list(one.block_hashes)
    load(engine, V2, moves=True)
    assert one.num_computed_tokens < 3 * BLOCK, "the third block is V2's"
    while one.num_computed_tokens < 60:
        engine.step()
    (group,) = engine.scheduler.connector.connector_scheduler._req_status["a"].group_states
    keys = [get_offload_block_hash(key) for key in group.offload_keys]
    assert (keys, keys[0]) == (one.block_hashes[: len(by_v1)], by_v1[0])
    assert keys[2] not in by_v1


def test_who_had_not_begun_is_stamped_with_what_computes_it(bed) -> None:
    """Admitted by the planner, and in vLLM's queue, as all rows are taken."""
    engine = bed()
    for number in range(8):
        engine.begin(asked(f"row-{number}", V1, tokens=20))
    waits = asked("waits", V1)
    engine.add(waits)
    engine.step()
    assert waits.num_computed_tokens == 0
    load(engine, V2, moves=True)
    assert waits.num_computed_tokens == 0
    engine.run()
    assert spans(engine, "waits")[0][0] == "2" * 64, "the header says the first of these"


def test_a_request_for_a_past_version_has_newer_keys(bed) -> None:
    engine = bed()
    load(engine, V2)
    late = asked("late", V1, prompt=36)
    engine.begin(late)
    assert late.lora_request.lora_path == V2
    engine.begin(asked("new", V2, prompt=36))
    assert from_cache(engine, "new") == 32


@pytest.mark.parametrize("path", [V1, V2], ids=["its own weights", "other weights"])
def test_a_prompt_is_hashed_again_for_other_weights_only(bed, path: str) -> None:
    """In the engine's loop, 1.9 ms for 8,000 tokens."""
    engine = bed()
    load(engine, V1)
    load(engine, path, is_other=True)
    one, hashed = asked("one", V1, prompt=36), []
    update, one.update_block_hashes = one.update_block_hashes, lambda: hashed.append(update())
    engine.add(one)
    assert (one.lora_request.lora_int_id != 7, one.lora_request.lora_path) == (True, path)
    assert (len(one.block_hashes), len(hashed)) == (36 // BLOCK, int(path == V2))


def with_session(bed, how: str) -> Engine:
    """An engine with a session of V1 that waits for its next part, in whose adapter's place V2 is loaded."""
    engine = bed(max_loras=1, max_cpu_loras=1 if how == "evicted" else 4)
    engine.answer(asked("s", V1, prompt=20, tokens=2, resumable=True))
    if how == "evicted":
        engine.answer("other", 8)
        load(engine, V2)
    else:
        engine.begin(asked("long", V1, prompt=3, tokens=40))
        load(engine, V2, moves=True)
    return engine


@pytest.mark.parametrize("how", ["moved beside another", "evicted"])
def test_a_session_does_not_go_on_with_other_weights(bed, how: str) -> None:
    """Its KV cache is of V1; it should end with L002, as where the version was replaced."""
    engine = with_session(bed, how)
    engine.answer(asked("s", V1, prompt=30, tokens=2, resumable=True))
    begins = [one for one in engine.outputs if one.request_id == "s"]
    assert error_in(begins[-1].stop_reason), "and not the tokens of neither"


@pytest.mark.parametrize("how", ["moved beside another", "evicted"])
def test_what_a_session_computes_on_is_no_prefix_of_others(bed, how: str) -> None:
    engine = with_session(bed, how)
    session = engine.scheduler.requests["s"]
    engine.answer(asked("s", V1, prompt=30, tokens=2, resumable=True))
    tokens = list(session._all_token_ids)
    for name, length in (("first block", 17), ("all", len(tokens))):
        engine.begin(asked(name, V2, prompt=length, token_ids=tokens[:length]))
    assert from_cache(engine, "all") <= 16, "what V2 computed from V1's KV cache is under V2's keys"


# --- before the engine has its scheduler ---


@pytest.mark.usefixtures("patched_core")
def test_collective_rpc_while_the_engine_is_made() -> None:
    """EngineCore.__init__ and _initialize_kv_caches call it before `self.scheduler` is there."""
    core = object.__new__(EngineCore)
    core.model_executor = SimpleNamespace(collective_rpc=lambda method, *_, **__: ["done"])
    assert core.collective_rpc("update_max_model_len", args=(1024,)) == ["done"]


def test_a_late_load_of_the_version_before_is_nobody_elses(bed) -> None:
    """Its requests waited through the pause in which the next version was loaded; later both are evicted."""
    engine = bed(max_loras=1, max_cpu_loras=1)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.add(asked("before", V1))
    engine.scheduler.planner.load(version(V2), time.monotonic())
    engine.run()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert last_loaded(engine) == V1
    engine.answer("evicts", 1)
    engine.answer(asked("after", V2))
    assert last_loaded(engine) == V2
    assert len(engine.tokens_of("before")) == len(engine.tokens_of("after")) == 3


def last_loaded(engine: Engine) -> str:
    return [command.spec.path for command in engine.commands if isinstance(command, Load)][-1]


def test_moved_and_evicted_weights_keep_their_keys(bed) -> None:
    """The caller has written other weights to the directory, and nobody may find the keys of the first."""
    engine, path = bed(max_loras=1, max_cpu_loras=2), "/written/again"
    engine.begin(asked("a", path, prompt=36, tokens=24))
    load(engine, path, is_other=True, moves=True)
    engine.run()
    for number in (1, 2):
        engine.answer(f"evicts-{number}", number)
    engine.begin(asked("b", path, prompt=36))
    assert from_cache(engine, "b") == 0


@pytest.mark.parametrize("has_new_id", [True, False], ids=["as our API server", "as add_lora"])
def test_a_load_in_place_finds_no_earlier_prefix(bed, has_new_id: bool) -> None:
    """Only workers find the path, and another's weights lie there by the second load."""
    engine, path = bed(), "/workers/hand"
    planner = engine.scheduler.planner
    for lora, name in ((7, "before"), (8 if has_new_id else 7, "after")):
        is_other = name == "after" and not has_new_id
        planner.load(AdapterSpec(lora, "adapter-7", path, size_bytes=100), time.monotonic(), is_other=is_other)
        one = asked(name, path, lora, prompt=36, tokens=2)
        one.lora_request.lora_name = "adapter-7"
        one.block_hashes.clear()
        one.update_block_hashes()
        engine.begin(one)
        engine.run()
    assert from_cache(engine, "after") == 0
