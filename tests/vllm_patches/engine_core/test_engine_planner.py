"""Executors whose workers would not see the planner's commands are refused at start."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_plugins.errors import InvalidSettings
from lora_plugins.vllm_patches.engine_core.engine_planner import make_planner
from tests.vllm_patches.engine_bed import vllm_config


def test_rays_second_executor_is_not_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.delenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", raising=False)  # it is the default
    config = vllm_config(base)
    config.parallel_config.distributed_executor_backend, config.parallel_config.world_size = "ray", 2
    assert make_planner(config) is not None


@pytest.mark.deployment("Ray", "refused", "the first executor (before 0.33): L007 names the second")
@pytest.mark.parametrize(
    ("backend", "says"), [("ray", "first Ray executor"), ("external_launcher", "external launcher")]
)
def test_startup_fails_with_an_executor_past_the_workers(
    base: Path, backend: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    config = vllm_config(base)
    config.parallel_config.distributed_executor_backend, config.parallel_config.world_size = backend, 2
    with pytest.raises(InvalidSettings, match=says):
        make_planner(config)
