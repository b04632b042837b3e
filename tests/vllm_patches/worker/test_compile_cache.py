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


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[object, str]]:
    """What each start over a cache has answered, in order, and what all have printed beside."""
    first, second = ("ours after vllm's", "vllm's after ours")
    order = [
        *((first, kernels) for kernels in ("vllm", "triton", "triton-in-vllms-cache")),
        *((second, kernels) for kernels in ("triton", "vllm")),
    ]
    root = tmp_path_factory.mktemp("caches")
    done = subprocess.run(
        [sys.executable, "-m", "testbed.compiled_layer", *(part for c, k in order for part in (str(root / c), k))],
        cwd=ROOT, env={**os.environ, "VLLM_PLUGINS": ""}, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    answers = list(map(json.loads, done.stdout.splitlines()))
    assert len(answers) == len(order), done.stderr[-6000:]
    return {one: (answer, done.stderr) for one, answer in zip(order, answers, strict=True)}


def test_a_restart_with_our_kernels_leaves_vllms_compiled_model(starts) -> None:
    for kernels in ("vllm", "triton"):
        answer, said = starts["ours after vllm's", kernels]
        assert answer == {"from_cache": False, **RIGHT}, said[-6000:]
    # Under vLLM's own hash it is found: loaded by mistake, it would answer as the base model does.
    answer, said = starts["ours after vllm's", "triton-in-vllms-cache"]
    assert answer is None
    assert "[L007] found a model that was compiled for vLLM's own LoRA kernels" in said


def test_a_restart_with_vllms_kernels_leaves_our_compiled_model(starts) -> None:
    for kernels in ("triton", "vllm"):
        answer, said = starts["vllm's after ours", kernels]
        assert answer == {"from_cache": False, **RIGHT}, said[-6000:]
