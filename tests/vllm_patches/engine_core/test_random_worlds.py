"""Anything that clients, trainers and workers do, in random order, over vLLM's real schedulers in virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from tests.repetitions import times
from tests.vllm_patches.engine_bed import vllm_config
from tests.vllm_patches.engine_core.random_world import World

CHUNKS = 4
WORLDS = times(10_000, short=120)


def options_of(base: Path) -> Callable[[Any], Any]:
    """Configurations, of which making one takes longer than a world."""
    made: dict[tuple[Any, ...], Any] = {}

    def options(choose: Any) -> Any:
        is_async, policy, slots = choose.random() < 0.5, choose.choice(["fcfs", "priority"]), choose.randint(1, 3)
        key = is_async, policy
        if key not in made:
            made[key] = vllm_config(base, is_async=is_async, policy=policy, max_loras=3, max_cpu_loras=4)
        config = copy(made[key])
        for part in ("scheduler_config", "cache_config", "lora_config"):
            setattr(config, part, copy(getattr(config, part)))
        config.lora_config.max_loras = slots
        config.scheduler_config.max_num_seqs = choose.randint(2, 8)
        config.scheduler_config.max_num_batched_tokens = choose.choice([16, 64])
        config.cache_config.enable_prefix_caching = choose.random() < 0.5
        return config

    return options


@pytest.mark.usefixtures("patched_core")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_request_and_call_is_answered_rightly(base: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    init_none_hash(sha256)
    options, now = options_of(base), [1000.0]
    with monkeypatch.context() as virtual:
        virtual.setattr(time, "monotonic", lambda: now[0])
        for seed in range(chunk, WORLDS, CHUNKS):
            now[0] = 1000.0
            world = World(seed, options, now)
            try:
                world.run()
            except Exception as error:
                raise AssertionError(f"world {seed}: {error}") from error
