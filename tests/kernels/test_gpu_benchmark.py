"""The GPU benchmark's parts that need no GPU: cases, the floor's arithmetic, goals, the check, options."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")
import torch

from benchmarks import gpu_cases, gpu_check, gpu_weights, kernels_gpu
from benchmarks.gpu_cases import Case
from lora_plugins.kernels.triton_ops import operators
from lora_plugins.kernels.triton_ops.operators import Operators
from lora_plugins.kernels.tuning import ExpandTile, Plan, ShrinkTile, Table
from tests.kernels.triton_bed import TOLERANCE

ROOT = Path(__file__).parents[2]
PLAN = Plan(16, ShrinkTile(rank=64, columns=128, splits=1, rank_programs=1), ExpandTile(rank=64, columns=64))
SMALL = Case("Llama-8B", "qkv", 4, 2, 8, 16)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Operators:
    made = Operators(Table("", (PLAN,)))
    monkeypatch.setattr(operators, "_operators", made)
    return made


def test_the_cases_begin_with_the_goals() -> None:
    cases = list(gpu_cases.cases())
    assert len(set(cases)) == len(cases)
    assert {case.rows for case in cases} == {1, 16, 64, 256, 2048, 8192}
    assert {case.adapters for case in cases} == {1, 4, 16, 64}
    assert {case.rank for case in cases} == {8, 16, 32, 64, 128}
    assert {case.slot_rank for case in cases} == {16, 64, 128, 256}
    assert {case.model for case in cases} == {"Llama-8B", "Llama-70B"}
    assert all(case.rank <= case.slot_rank and case.adapters <= case.rows for case in cases)
    groups = gpu_cases.by_weights(cases)
    assert [(group[0].rank, group[0].slot_rank) for group in groups[:8]] == [(16, 16)] * 4 + [(16, 128)] * 4
    assert sorted(map(repr, cases)) == sorted(repr(case) for group in groups for case in group)


def test_every_adapter_has_rows_and_prompts_lie_in_one_piece() -> None:
    for case in gpu_cases.cases():
        slots = case.slot_of_row()
        assert len(slots) == case.rows
        assert set(slots) == set(range(case.adapters))
        if case.prefill:
            assert slots == sorted(slots)


def test_the_floor_counts_each_byte_once() -> None:
    case = Case("Llama-8B", "o", 64, 4, 16, 128)
    x_and_y = 64 * 4096 * 2 + 2 * 64 * 4096 * 2
    a_and_b = 4 * 16 * (4096 + 4096) * 2
    assert case.floor_bytes() == x_and_y + a_and_b
    assert replace(case, slot_rank=256).floor_bytes() == case.floor_bytes()  # padding need not move
    assert case.floor_us(1e12) == pytest.approx(case.floor_bytes() / 1e6)


def test_goals_omit_what_was_not_measured() -> None:
    def row(case: Case, ours: float, vllm: float | None) -> dict[str, object]:
        us = {"ours graph": ours} | ({} if vllm is None else {"vllm graph": vllm})
        return gpu_cases.row(case, us, 2.0)

    same, padded = Case("Llama-8B", "o", 64, 4, 16, 16), Case("Llama-8B", "o", 1, 1, 16, 128)
    never_slower, twice, floor = gpu_cases.goals([row(same, 4.0, 3.0), row(same, 2.0, 3.0), row(padded, 4.0, None)])
    assert (never_slower["measured"], never_slower["held"], never_slower["worst"]) == (2, 1, 0.75)
    assert twice == {"goal": twice["goal"], "measured": 0}
    assert (floor["measured"], floor["held"], floor["worst"], floor["median"]) == (2, 1, 2.0, 1.5)


def test_copies_exceed_the_cache_within_the_budget() -> None:
    case = Case("Llama-8B", "qkv", 64, 4, 16, 128)
    weights = 4 * 16 * (3 * 4096 + 6144) * 2
    assert (
        (gpu_weights.copies_for(case) - 1) * weights < gpu_weights.COLD_BYTES <= gpu_weights.copies_for(case) * weights
    )
    assert gpu_weights.copies_for(case, 3 * weights * 128 // 16) == 3
    assert gpu_weights.copies_for(case, 0) == 1


def test_what_is_timed_is_what_is_meant(made: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_cases.MODELS["Llama-8B"], "qkv", (48, (32, 16)))
    stacks = gpu_weights.make_stacks(replace(SMALL, adapters=3), 2, torch.float32, "cpu").first(SMALL.adapters)
    x, y = torch.randn(4, 48), torch.zeros(4, 48)
    call = gpu_weights.ours(made, SMALL, stacks, x, y, SMALL.slot_of_row())
    call(1)
    want = torch.cat(
        [
            torch.stack([b[slot, 0] @ (a[slot, 0] @ x[row]) for row, slot in enumerate(SMALL.slot_of_row())])
            for a, b in zip(stacks.a[1], stacks.b[1], strict=True)
        ],
        1,
    )
    assert (y - want).abs().max() <= TOLERANCE[torch.float32] * want.abs().max().clamp_min(1)
    assert want.abs().max() > 0


def test_the_check_passes_in_the_interpreter_and_covers_all_dtypes(made: Operators) -> None:
    (found,), right = kernels_gpu.correctness(made, "cpu", small=True, graphs=False)
    assert right, found
    assert set(found["error_per_tolerance"]) == {f"{dtype} eager" for dtype in ("float32", "float16", "bfloat16")}
    assert 0 < max(found["error_per_tolerance"].values()) <= 1


def test_the_check_sees_a_wrong_rank_and_a_touched_row(made: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(check for check in gpu_check.checks(small=True) if check.pattern == "in turn")
    assert gpu_check.run(check, made, "cpu") <= 1
    register = Operators.register

    def register_with_one_rank_less(self: Operators, a: object, b: object, ranks: object) -> None:
        register(self, a, b, ranks)
        written = ranks.written
        ranks.written = lambda slot, given: written(slot, [max(0, rank - 1) for rank in given])

    with monkeypatch.context() as patched:
        patched.setattr(Operators, "register", register_with_one_rank_less)
        assert gpu_check.run(check, made, "cpu") > 1
    monkeypatch.setattr(
        gpu_check.Batch, "cut", lambda self, slots, *_args, **_kwargs: _cut_with_no_base_row(self, slots)
    )
    with pytest.raises(AssertionError, match="a row of no adapter was written"):
        gpu_check.run(check, made, "cpu")


def _cut_with_no_base_row(batch: operators.Batch, slots: torch.Tensor) -> None:
    batch.host[0], batch.host[1] = len(slots), 1
    batch.chunks.cut(slots.clamp_min(0))


def test_it_needs_no_vllm_to_be_imported() -> None:
    """The machine with the GPU has torch and Triton, and little else."""
    code = (
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "import benchmarks.kernels_gpu, benchmarks.gpu_check, benchmarks.gpu_weights, benchmarks.tune_kernels\n"
        "import lora_plugins.kernels.tuning\n"
        "print(benchmarks.kernels_gpu._vllm_error())\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not measured: ModuleNotFoundError")


def test_options_come_with_what_one_command_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    options = kernels_gpu._options([])
    assert (options.out, options.seconds, options.check) == (tmp_path, 420.0, False)
    monkeypatch.delenv("OUT")
    assert kernels_gpu._options([]).out == ROOT / "benchmarks" / "results"
