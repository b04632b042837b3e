"""The package as a whole: light to import, with the metadata that it promises."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys

import pytest

import lora_plugins
from lora_plugins.cli.doctor import CHECKS
from lora_plugins.plugin_names import EVERYTHING, OURS, SOURCES
from lora_plugins.settings import Settings

HEAVY = ("torch", "vllm", "transformers", "peft", "safetensors", "fastapi", "numpy")
# The entry points' module takes over vLLM's name when it is imported, and only where it is named. The others are
# subclasses of vLLM's own classes, work on tensors, or are FastAPI's; nothing imports them before a plugin that needs
# them runs.
WITH_VLLM = {
    "lora_plugins.plugin",
    *(f"lora_plugins.worker.{name}" for name in ("manager", "model_manager", "prompt_rows", "weights_file")),
    "lora_plugins.api.routes",
}
BESIDE = ("beside", "row_norms", "token_rows", "trained_tokens", "vectors")
# These compute with torch or NumPy, or hold tensors; what chooses, groups and plans stays pure.
COMPUTING = {
    *(f"lora_plugins.kernels.{name}" for name in ("reference", "packing", "cpu", "punica_cpu", "punica_triton")),
    *(
        f"lora_plugins.worker.{name}"
        for name in ("adapter_checks", "given_to_worker", "host_memory", "jobs", "loaded_adapter", "lora_metrics")
    ),
    *(f"lora_plugins.worker.{name}" for name in ("slot_stream", *BESIDE)),
}
# These need Ray, and begin in processes of their own.
ON_RAY = {f"lora_plugins.ray.{name}" for name in ("application", "ingress", "replica", "router", "__main__")}
PURE = [
    "lora_plugins",
    *(
        module.name
        for module in pkgutil.walk_packages(lora_plugins.__path__, "lora_plugins.")
        if module.name not in WITH_VLLM | COMPUTING | {*ON_RAY}
        and not module.name.startswith("lora_plugins.kernels.triton_ops.")
    ),
]


def test_pure_modules_import_neither_vllm_nor_torch():
    # In one interpreter, one after the other: what one imports is imported for all that follow.
    script = (
        "import importlib, sys\n"
        f"for name in {PURE!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [other for other in {HEAVY!r} if other in sys.modules]\n"
        "    assert not heavy, (name, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("named", [False, True])
def test_importing_an_unnamed_plugin_imports_no_vllm(named):
    # vLLM imports every entry point of a group; ours costs nothing where it is not named.
    env = {"PATH": "", "VLLM_PLUGINS": "something_else"}
    if not named:
        del env["VLLM_PLUGINS"]
    script = "import lora_plugins.plugin, sys; assert 'vllm' not in sys.modules and 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=env, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_public_names_exist():
    assert all(hasattr(lora_plugins, name) for name in lora_plugins.__all__)
    assert sorted(lora_plugins.__all__) == lora_plugins.__all__


def test_version_is_that_of_the_distribution():
    assert lora_plugins.__version__ == importlib.metadata.version("lora-plugins")


def test_a_plugin_is_named_wherever_plugins_are():
    """A source whose plugin one place forgets is off, or cannot be made, without a word."""
    points = importlib.metadata.distribution("lora-plugins").entry_points
    assert {it.name for it in points if it.group == "vllm.general_plugins"} == {*OURS, EVERYTHING}
    for kind in SOURCES:
        assert kind.label in CHECKS
        assert hasattr(Settings(), kind.setting)
        assert callable(importlib.import_module(f"lora_plugins.resolvers.sources.{kind.module}").configured)
