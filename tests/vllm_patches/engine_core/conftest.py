"""vLLM's engine core with our patches, and engines with a prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from lora_plugins.vllm_patches.engine_core import engine_core, pausing
from tests.vllm_patches.engine_bed import Engine, Make, make_keys, make_scheduler, vllm_config
from tests.vllm_patches.put_back import put_back


@pytest.fixture
def patched_core() -> Iterator[None]:
    with put_back(EngineCore, EngineCoreProc):
        engine_core.patch()
        pausing.patch()
        yield


@pytest.fixture(params=[False, True], ids=["Scheduler", "AsyncScheduler"])
def bed(request: pytest.FixtureRequest, base: Path) -> Make:
    """An engine with a prefix cache: two slots and four places, unless told otherwise."""

    def make(*, blocks: int = 64, max_loras: int = 2, max_cpu_loras: int = 4, **config: Any) -> Engine:
        options = vllm_config(base, is_async=request.param, max_loras=max_loras, max_cpu_loras=max_cpu_loras, **config)
        options.cache_config.enable_prefix_caching = True
        make_keys()
        return Engine(make_scheduler(options, blocks=blocks), lag=int(request.param))

    return make
