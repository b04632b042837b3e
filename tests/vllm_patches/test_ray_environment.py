"""What vLLM copies to the processes that it starts by Ray, as vLLM itself says."""

from __future__ import annotations

import os

import pytest

from lora_plugins.vllm_patches.ray_environment import name_our_variables

OURS = {
    "LORA_PLUGINS_STORE_DIR": "/store",
    "S3_PATH_TEMPLATE": "s3://adapters/{lora_name}",
    "LOCAL_PATH_TEMPLATE": "/links/{lora_name}",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
    "XDG_CACHE_HOME": "/cache",
}


@pytest.mark.deployment("Ray", "tested", "our settings are among the variables that vLLM copies to engines and workers")
def test_our_settings_are_copied_to_rays_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy

    for name, value in {**OURS, "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "MINE, YOURS"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MINE", "1")
    assert OURS.keys().isdisjoint(get_env_vars_to_copy()), "by itself, vLLM copies none"
    name_our_variables()
    assert {"MINE", "YOURS", "VLLM_PLUGINS", *OURS} <= get_env_vars_to_copy()
    once = os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"]
    name_our_variables()
    assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == once


@pytest.mark.deployment("Ray", "tested", "vLLM's second executor, its default, copies all variables to its workers")
def test_the_second_executor_copies_all_to_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor.ray_env_utils import get_driver_env_vars
    from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

    for name, value in OURS.items():
        monkeypatch.setenv(name, value)
    copied = get_driver_env_vars(WORKER_SPECIFIC_ENV_VARS)
    assert {name: copied[name] for name in OURS} == OURS


@pytest.mark.deployment(
    "Ray", "tested", "the second executor's workers take commands and batches from one queue, in one thread"
)
def test_the_second_executors_workers_loop_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the classes are looked at: they have the loop of vLLM's other workers."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

    assert RayWorkerProc.worker_busy_loop is WorkerProc.worker_busy_loop
    for method in ("execute_model", "sample_tokens", "collective_rpc"):
        assert getattr(RayExecutorV2, method) is getattr(MultiprocExecutor, method)
