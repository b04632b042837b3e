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
