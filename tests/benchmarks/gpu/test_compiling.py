"""Kernels compiled ahead, for a device that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

COMPILE_AHEAD = """
import sys, time
import torch
from benchmarks.gpu import compiling, weights
from benchmarks.gpu.cases import Case
from lora_plugins.kernels import tuning
from lora_plugins.kernels.triton_ops import operators

def two_layers(table):
    case = Case("Llama-8B", "qkv", 64, 4, 16, 64)
    operators.use(made := operators.Operators(table))
    stacks = weights.make_stacks(case, 2, torch.bfloat16, "cpu", filled=False)
    call = weights.ours(made, case, stacks, weights.batch_of(case, "cpu"))
    for layer in range(2):  # the second one's ranks lie 12 bytes further
        call(layer, torch.empty(64, 6144, dtype=torch.bfloat16), torch.empty(64, 4096, dtype=torch.bfloat16))

if __name__ == "__main__":
    table = tuning.read_table(tuning.PACKAGED / "default.json")
    for _ in range(2):
        with compiling.Compilers(90, processes=1) as compilers:
            assert compilers.compile([(two_layers, (table,))], time.monotonic() + 600) == []
            print(compilers.compiled)
"""


@pytest.mark.slow
def test_kernels_are_compiled_ahead_for_an_absent_device(tmp_path: Path) -> None:
    """Each once, whichever layer calls it. In a process of its own: this one has Triton in its interpreter."""
    program = tmp_path / "compile_ahead.py"
    program.write_text(COMPILE_AHEAD)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["3", "0"]  # cut, shrink, expand; then all of them from the cache
    assert list((tmp_path / "cache").rglob("*.cubin"))
