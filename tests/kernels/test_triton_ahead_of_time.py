"""The default table compiled for GPUs that are not here: nothing spills, everything fits, loads are wide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton's compiler comes with Triton, which is for Linux only")
pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # of one program; CUDA C++ Programming Guide, table 30

Row = dict[str, object]


@pytest.fixture(scope="module")
def compiled() -> list[Row]:
    # A process of its own: this one has Triton in its interpreter.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.aot", "--print"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_ampere_hopper_and_blackwell(compiled: list[Row]) -> None:
    assert {(row["kernel"], row["architecture"]) for row in compiled} == {
        (kernel, architecture)
        for kernel in ("cut_kernel", "shrink_kernel", "expand_kernel")
        for architecture in (80, 90, 100)
    }


def test_nothing_spills(compiled: list[Row]) -> None:
    assert [row for row in compiled if row["spilled_bytes"]] == []


def test_shared_memory_fits(compiled: list[Row]) -> None:
    assert [row for row in compiled if row["shared_bytes"] > SHARED_BYTES[row["architecture"]]] == []


def test_aligned_weights_are_loaded_16_bytes_at_a_time(compiled: list[Row]) -> None:
    """Shrink has no other loads of weights; expand keeps an element-wise path for ranks that are no multiple of 8."""
    aligned = [row for row in compiled if row["shape"] == "qkv"]
    assert [row for row in aligned if row["kernel"] == "shrink_kernel" and row["narrow"]] == []
    assert [row for row in aligned if row["kernel"] != "cut_kernel" and not row["wide"]] == []
    # Rank by columns of one tile, over the threads of one program: the loads of that one path, and no more.
    for row in aligned:
        if row["kernel"] == "expand_kernel":
            tile = 32 if row["max_rows"] == 8192 else 16
            assert row["narrow"] <= tile * 128 // (32 * row["warps"])
