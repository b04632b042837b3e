"""A restart with other kernels compiles the model again: vLLM keeps compiled models, with the operators they call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent.parent
RIGHT = {"adapted_row": True, "base_row": True}


def start(kernels: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "testbed.compiled_layer", kernels],
        cwd=ROOT,
        env={**os.environ, "VLLM_CACHE_ROOT": str(cache), "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def answer(kernels: str, cache: Path) -> object:
    done = start(kernels, cache)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


def test_a_restart_with_our_kernels_leaves_vllms_compiled_model(tmp_path: Path) -> None:
    assert answer("vllm", tmp_path) == {"from_cache": False, **RIGHT}
    assert answer("triton", tmp_path) == {"from_cache": False, **RIGHT}
    # Under vLLM's own hash it is found: loaded by mistake, it would answer as the base model does.
    done = start("triton-in-vllms-cache", tmp_path)
    assert done.returncode != 0
    assert "[L007] found a model that was compiled for vLLM's own LoRA kernels" in done.stderr


def test_a_restart_with_vllms_kernels_leaves_our_compiled_model(tmp_path: Path) -> None:
    assert answer("triton", tmp_path) == {"from_cache": False, **RIGHT}
    assert answer("vllm", tmp_path) == {"from_cache": False, **RIGHT}
