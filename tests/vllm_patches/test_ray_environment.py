"""What vLLM copies to the processes that it starts by Ray, as vLLM itself says."""

from __future__ import annotations

import os

import pytest

from lora_plugins.settings import variables_of_workers
from lora_plugins.vllm_patches import ray_environment

OURS = {
    "LORA_PLUGINS_STORE_DIR": "/store",
    "S3_PATH_TEMPLATE": "s3://adapters/{lora_name}",
    "LOCAL_PATH_TEMPLATE": "/links/{lora_name}",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
    "XDG_CACHE_HOME": "/cache",
}


@pytest.mark.deployment("Ray", "tested", "vLLM copies our settings to engines and workers")
def test_our_settings_are_copied_to_rays_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy
    from vllm.v1.executor import ray_env_utils

    monkeypatch.setattr(ray_env_utils, "get_driver_env_vars", ray_env_utils.get_driver_env_vars)
    for name, value in {**OURS, "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "MINE, YOURS"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MINE", "1")
    assert OURS.keys().isdisjoint(get_env_vars_to_copy()), "by itself, vLLM copies none"
    ray_environment.patch()
    assert {"MINE", "YOURS", "VLLM_PLUGINS", *OURS} <= get_env_vars_to_copy()
    once = os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"]
    ray_environment.patch()
    assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == once


KEYS = ("LORA_PLUGINS_ADMIN_KEY", "LORA_PLUGINS_POLICY", "LORA_PLUGINS_ADAPTERS_FILE")


def test_rays_processes_get_no_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy
    from vllm.v1.executor import ray_env_utils

    monkeypatch.setattr(ray_env_utils, "get_driver_env_vars", ray_env_utils.get_driver_env_vars)
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "LORA_PLUGINS_ADMIN_KEY")
    for name in (*KEYS, *OURS):
        monkeypatch.setenv(name, OURS.get(name, "the-key"))
    ray_environment.patch()
    ray_environment.patch()
    copied = ray_env_utils.get_driver_env_vars({"RANK"})
    for names in (get_env_vars_to_copy(), set(copied)):
        assert names.isdisjoint(KEYS)
        assert names >= OURS.keys()


@pytest.mark.parametrize(
    ("template", "allowed", "read"),
    [
        ("", "", set()),
        ("", "file:///a,hf://org", set()),
        ("s3://b/{lora_name}", "", {"AWS_SECRET_ACCESS_KEY", "S3_ENDPOINT_URL", "FSSPEC_X"}),
        ("", "file:///a, gs://b", {"GOOGLE_APPLICATION_CREDENTIALS", "FSSPEC_X"}),
        ("", "abfs://c", {"AZURE_STORAGE_KEY", "FSSPEC_X"}),
    ],
)
def test_workers_get_the_secrets_of_configured_stores(monkeypatch, template, allowed, read) -> None:
    secrets = {
        "AWS_SECRET_ACCESS_KEY",
        "S3_ENDPOINT_URL",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "AZURE_STORAGE_KEY",
        "FSSPEC_X",
    }
    for name in secrets:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("S3_PATH_TEMPLATE", template)
    monkeypatch.setenv("LORA_PLUGINS_ALLOWED_URIS", allowed)
    assert secrets.intersection(variables_of_workers()) == read


@pytest.mark.deployment("Ray", "tested", "the second executor, vLLM's default, copies all variables")
def test_the_second_executor_copies_all_to_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor.ray_env_utils import get_driver_env_vars
    from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

    for name, value in OURS.items():
        monkeypatch.setenv(name, value)
    copied = get_driver_env_vars(WORKER_SPECIFIC_ENV_VARS)
    assert {name: copied[name] for name in OURS} == OURS


@pytest.mark.deployment("Ray", "tested", "its workers take commands and batches from one queue")
def test_the_second_executors_workers_loop_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the classes are looked at: they have the loop of vLLM's other workers."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

    assert RayWorkerProc.worker_busy_loop is WorkerProc.worker_busy_loop
    for method in ("execute_model", "sample_tokens", "collective_rpc"):
        assert getattr(RayExecutorV2, method) is getattr(MultiprocExecutor, method)
