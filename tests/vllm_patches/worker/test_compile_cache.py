"""A model compiled in pieces computes whatever adapters come later, and a restart with other kernels compiles again.

vLLM keeps compiled models, with the operators they call. It compiles without graph breaks, once for all batches.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed import v2_runner
from testbed.compiled_layer import BATCHES
from testbed.forking_vllm import run_forked
from testbed.server import outer_environment

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")
pytestmark = pytest.mark.slow

COMPILED = {"from_cache": False, "pieces": 4, "right": [True] * len(BATCHES)}


def started(cache: Path, *order: str) -> tuple[list[object], str]:
    """What a start over this cache with each of these kernels answers, in order, and what all print beside."""
    done = run_forked(
        "testbed.compiled_layer:main",
        ["compiled_layer", *(part for kernel in order for part in (str(cache), kernel))],
        environment={
            **outer_environment(),
            **v2_runner.INTERPRETED,
            "OMP_NUM_THREADS": "1",
            "VLLM_PLUGINS": "",
            "VLLM_USE_AOT_COMPILE": "1",
        },
        home=cache,
    )
    answers = list(map(json.loads, done.stdout.splitlines()))
    assert len(answers) == len(order), done.stderr[-6000:]
    return answers, done.stderr


@pytest.mark.nightly
def test_a_restart_loads_our_compiled_model_for_any_adapters(tmp_path: Path) -> None:
    answers, said = started(tmp_path, "triton", "triton")
    assert answers == [COMPILED, {**COMPILED, "from_cache": True, "pieces": 0}], said


def test_a_restart_with_our_kernels_leaves_vllms_compiled_model(tmp_path: Path) -> None:
    answers, said = started(tmp_path, "vllm", "triton", "triton-in-vllms-cache")
    assert answers[:2] == [COMPILED] * 2, said
    # Under vLLM's own hash it is found: loaded by mistake, it would answer as the base model does.
    assert answers[2] is None
    assert "[L007] found a model that was compiled for vLLM's own LoRA kernels" in said


@pytest.mark.nightly
def test_a_restart_with_vllms_kernels_leaves_our_compiled_model(tmp_path: Path) -> None:
    answers, said = started(tmp_path, "triton", "vllm")
    assert answers == [COMPILED] * 2, said
