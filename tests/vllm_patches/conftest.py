"""What one process of vLLM has, new for each test, and a base model's directory for vLLM's scheduler to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_plugins import process as process_module
from lora_plugins.process import Process
from tests.vllm_patches.engine_bed import Clock, Engine, Make, make_scheduler, vllm_config
from tests.worker.small_model import base_directory


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    fresh = Process()
    monkeypatch.setattr(process_module, "_process", fresh)
    return fresh


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_directory(tmp_path_factory.mktemp("base"))


@pytest.fixture(params=[False, True], ids=["Scheduler", "AsyncScheduler"])
def make_engine(request: pytest.FixtureRequest, base: Path) -> Make:
    """An engine bed over our class, over vLLM's own (`is_stock`), or over `kind`."""

    def make(
        *,
        kind: type | None = None,
        is_stock: bool = False,
        is_instant: bool = True,
        blocks: int = 64,
        finished_set: bool = False,
        **config: Any,
    ) -> Engine:
        options = vllm_config(base, is_async=request.param, **config)
        if is_stock:
            kind = options.scheduler_config.get_scheduler_cls()
        scheduler = make_scheduler(options, kind, blocks=blocks, include_finished_set=finished_set)
        assert ("Async" in type(scheduler).__name__) == request.param or kind is not None
        return Engine(scheduler, is_instant=is_instant, lag=int(request.param))

    return make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
