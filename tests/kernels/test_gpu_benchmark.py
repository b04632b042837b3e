"""The GPU programs' parts that need no GPU: cases, the floor's arithmetic, goals, checks, weights, what is carried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")
import torch

from benchmarks import gpu_cases, gpu_check, gpu_device, gpu_vllm, gpu_weights, record
from benchmarks.gpu_cases import Case
from benchmarks.gpu_check import Check
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


@pytest.fixture
def gpu() -> gpu_device.Rehearsal:
    return gpu_device.Rehearsal()


def test_the_cases_begin_with_what_users_have() -> None:
    cases = list(gpu_cases.cases())
    assert len(set(cases)) == len(cases)
    assert {case.rows for case in cases} == {1, 4, 16, 64, 256, 1024, 2048, 8192}
    users = [case for case in cases if case.slots]
    assert cases[: len(users)] == users
    assert {(case.slots, case.adapters) for case in users} == {(64, 1), (64, 4), (64, 16), (128, 4), (128, 16)}
    assert {case.rows for case in users} == {1, 4, 16, 64, 256, 1024}
    assert {(case.rank, case.slot_rank) for case in users[:60]} == {(16, 128)}  # the goal of twice as fast
    assert any(case.mixed and case.base_rows for case in users)
    assert {case.model for case in cases} == {"Llama-8B", "Llama-70B"}
    assert all(case.rank <= case.slot_rank and case.adapters <= case.rows for case in cases)
    groups = gpu_cases.by_weights(cases)
    assert sorted(map(repr, cases)) == sorted(repr(case) for group in groups for case in group)


def test_every_adapter_has_rows_and_prompts_lie_in_one_piece() -> None:
    for case in gpu_cases.cases():
        slots = case.slot_of_row()
        assert len(slots) == case.rows
        assert {slot for slot in slots if slot >= 0} == {case.slot_of(adapter) for adapter in range(case.adapters)}
        assert (-1 in slots) is case.base_rows
        assert max(slots) < case.n_slots
        if case.prefill:
            assert slots == sorted(slots)


def test_mixed_ranks_are_all_halvings_down_to_8() -> None:
    case = Case("Llama-8B", "qkv", 64, 16, 64, 64, slots=64, mixed=True)
    assert {case.rank_of_slot(slot) for slot in case.slot_of_row()} == {64, 32, 16, 8}
    assert {replace(case, mixed=False).rank_of_slot(slot) for slot in range(64)} == {64}


def test_the_floor_counts_each_byte_once() -> None:
    case = Case("Llama-8B", "o", 64, 4, 16, 128)
    x_and_y = 64 * 4096 * 2 + 2 * 64 * 4096 * 2
    a_and_b = 4 * 16 * (4096 + 4096) * 2
    assert case.floor_bytes() == x_and_y + a_and_b
    assert replace(case, slot_rank=256, slots=64).floor_bytes() == case.floor_bytes()  # padding need not move
    assert replace(case, base_rows=True).floor_bytes() == x_and_y // 2 + a_and_b
    assert case.floor_us(1e12) == pytest.approx(case.floor_bytes() / 1e6)


def test_goals_omit_what_was_not_measured() -> None:
    def row(case: Case, ours: float, vllm: float | None) -> dict[str, object]:
        us = {"ours graph": ours}
        if vllm is not None:
            us |= {"vllm graph": vllm, "vllm specialized graph": vllm + 1}
        return gpu_cases.row(case, us, 2.0)

    same, padded = Case("Llama-8B", "o", 64, 4, 16, 16), Case("Llama-8B", "o", 16, 16, 16, 128, slots=64)
    never_slower, twice, floor = gpu_cases.goals([row(same, 4.0, 3.0), row(same, 2.0, 3.0), row(padded, 4.0, None)])
    assert (never_slower["measured"], never_slower["held"], never_slower["worst"]) == (2, 1, 0.75)
    assert twice == {"goal": twice["goal"], "measured": 0}
    assert (floor["measured"], floor["held"], floor["worst"], floor["median"]) == (2, 1, 2.0, 1.5)


def test_ours_is_held_to_the_fastest_of_vllms_ways() -> None:
    us = {"ours graph": 3.0, "vllm graph": 6.0, "vllm specialized graph": 2.0, "vllm eager": 1.0}
    assert gpu_cases.row(SMALL, us, 1.0)["vllm/ours graph"] == pytest.approx(2 / 3, abs=1e-3)


def test_copies_exceed_the_cache_within_the_budget() -> None:
    case = Case("Llama-8B", "qkv", 64, 4, 16, 128)
    weights = 4 * 16 * (3 * 4096 + 6144) * 2
    copies = gpu_weights.copies_for(case)
    assert (copies - 1) * weights < gpu_weights.COLD_BYTES <= copies * weights
    assert gpu_weights.copies_for(case, 3 * weights * 128 // 16) == 3
    assert gpu_weights.copies_for(case, 0) == 1
    many_slots = replace(case, slots=64)
    assert gpu_weights.copies_for(many_slots) == copies  # what is read counts
    assert gpu_weights.copies_that_fit(many_slots, 2 * weights * 128) == 2


@pytest.mark.parametrize("mixed", [False, True], ids=["one rank", "mixed ranks"])
def test_what_is_timed_is_what_is_meant(made: Operators, monkeypatch: pytest.MonkeyPatch, mixed: bool) -> None:
    monkeypatch.setitem(gpu_cases.MODELS, "Llama-8B", {"qkv": (48, (32, 16))})
    case = replace(SMALL, rank=16, slots=5, mixed=mixed, base_rows=True)
    stacks = gpu_weights.make_stacks(case, 2, torch.float32, "cpu")
    for slot in range(5):
        rank = case.rank_of_slot(slot)
        assert not stacks.a[0][0][slot, 0, rank:].any()
        assert stacks.a[0][0][slot, 0, :rank].any()
    x, y = torch.randn(4, 48), torch.zeros(4, 48)
    gpu_weights.ours(made, case, stacks, gpu_weights.batch_of(case, "cpu"))(1, y, x)
    want = torch.zeros(4, 48)
    for row, slot in enumerate(case.slot_of_row()):
        if slot >= 0:
            parts = zip(stacks.a[1], stacks.b[1], strict=True)
            want[row] = torch.cat([b[slot, 0] @ (a[slot, 0] @ x[row]) for a, b in parts])
    assert (y - want).abs().max() <= TOLERANCE[torch.float32] * want.abs().max().clamp_min(1)
    assert want.abs().max() > 0


def test_checks_have_every_operator_dtype_and_path() -> None:
    for small in (True, False):
        checks = list(gpu_check.checks(small=small))
        assert len(set(checks)) == len(checks)
        operators_of = {dtype: {check.operator for check in checks if check.dtype == dtype} for dtype in ("float32",)}
        assert operators_of["float32"] == {"linear", "shrink", "expand", "embedding", "logits"}
        assert {check.dtype for check in checks} == {"float32", "float16", "bfloat16"}
    assert gpu_check.MOST_NORM["bfloat16"] == 5e-3


ONE_OF_EACH = {
    "linear": Check("linear", 9, 67, (33, 16), 64, "bfloat16", "in turn", padding=2),
    "linear, one slot, not added": Check("linear", 5, 40, (24,), 64, "float32", "one slot", add_inputs=False),
    "shrink": Check("shrink", 9, 40, (33, 16), 64, "float16", "in turn", padding=2),
    "expand from an offset": Check("expand", 9, 40, (24, 16), 64, "float32", "pieces", offset=16, add_inputs=False),
    "embedding": Check("embedding", 9, 0, (40,), 64, "bfloat16", "pieces", padding=1),
    "logits": Check("logits", 9, 40, (70,), 64, "float16", "in turn"),
    "rows of a larger batch": Check("linear", 4, 40, (24,), 64, "float32", "in turn", unseen=40),
    "base rows": Check("linear", 4, 40, (24,), 128, "float32", "base", padding=1),
}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_each_check_passes_in_the_interpreter(name: str, made: Operators, gpu: gpu_device.Gpu) -> None:
    check = ONE_OF_EACH[name]
    for graph in (False, True) if gpu_check.in_a_graph(check) else (False,):
        error = gpu_check.run(check, made, gpu, seed=1, graph=graph)
        assert error <= 1
        assert error > 0 or check.pattern == "base"


@pytest.mark.parametrize("name", ["linear", "expand from an offset", "embedding", "logits"])
def test_a_check_sees_one_wrong_element(
    name: str, made: Operators, gpu: gpu_device.Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = gpu_check.Call.__call__

    def call_and_spoil(self: gpu_check.Call) -> None:
        call(self)
        row = next(row for row in range(self.check.rows) if self.slot(row) >= 0)
        self.y[row, -1] += self.y.abs().max() / 4

    monkeypatch.setattr(gpu_check.Call, "__call__", call_and_spoil)
    assert gpu_check.run(ONE_OF_EACH[name], made, gpu, seed=1) > 1


def test_the_check_sees_a_wrong_rank_and_a_touched_row(
    made: Operators, gpu: gpu_device.Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = ONE_OF_EACH["linear"]
    register = Operators.register

    def register_with_one_rank_less(self: Operators, a: object, b: object, ranks: object) -> None:
        register(self, a, b, ranks)
        written = ranks.written
        ranks.written = lambda slot, given: written(slot, [max(0, rank - 1) for rank in given])

    with monkeypatch.context() as patched:
        patched.setattr(Operators, "register", register_with_one_rank_less)
        patched.setattr(gpu_check, "RANKS", (16, 0, 5, 64, 8, 33, 48, 3))
        call = gpu_check.Call(check, made, gpu.device)
        call.fill(gpu_check.RANKS)
        call.cut(check.slot_of_row())
        call()
        call.ranks.written = type(call.ranks).written.__get__(call.ranks)
        for slot, rank in enumerate(gpu_check.RANKS):
            call.ranks.written(slot, [rank, rank])
        assert call.error() > 1
    made.forget()
    monkeypatch.setattr(
        gpu_check.Call, "cut", lambda self, slots: (_cut_with_no_base_row(self.batch, slots), _fill(self, slots))
    )
    with pytest.raises(AssertionError, match="a row of no adapter was written"):
        gpu_check.run(check, made, gpu, seed=1)


def _cut_with_no_base_row(batch: operators.Batch, slots: list[int]) -> None:
    batch.host[0], batch.host[1] = len(slots), 1
    batch.chunks.cut(torch.tensor(slots).clamp_min(0))


def _fill(call: gpu_check.Call, slots: list[int]) -> None:
    call.slot_of_row = slots


def test_a_graph_never_holds_the_dense_path(gpu: gpu_device.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels would be compiled and loaded for the first time within the capture, which CUDA refuses."""
    made = Operators(Table("", (PLAN,), dense_min_rows=1))
    monkeypatch.setattr(operators, "_operators", made)
    dense, taken = operators.dense, []
    monkeypatch.setattr(operators, "dense", lambda *args, **kwargs: (taken.append(1), dense(*args, **kwargs)))
    check = Check("linear", 5, 40, (24,), 64, "float32", "one slot")
    assert gpu_check.run(check, made, gpu, seed=1, graph=True) <= 1
    assert not taken
    assert gpu_check.run(check, made, gpu, seed=1) <= 1
    assert taken


def test_checks_that_time_is_not_left_for_are_counted(made: Operators, gpu: gpu_device.Gpu) -> None:
    wanted = list(gpu_check.checks(small=True))
    kept: list[dict[str, object]] = []
    assert gpu_check.all_right(made, gpu, kept.append, time.monotonic() - 1, wanted) == ({}, [], 0)


def test_programs_import_without_vllm_and_say_what_lacks(tmp_path: Path) -> None:
    """The machine with the GPU has torch and Triton, and little else."""
    code = (
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "import benchmarks.kernels_gpu, benchmarks.gpu_check, benchmarks.gpu_weights, benchmarks.tune_kernels\n"
        "import benchmarks.gpu_step, benchmarks.gpu_streams, benchmarks.gpu_run\n"
        "from pathlib import Path\n"
        "benchmarks.gpu_vllm.load(rehearse=False, carried=Path(sys.argv[1]))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "vLLM's operators cannot be imported: ModuleNotFoundError" in done.stderr
    assert "benchmarks.gpu_prepare" in done.stderr


def test_specialized_counts_are_vllms() -> None:
    from vllm.lora.utils import get_captured_lora_counts

    for slots in (1, 7, 8, 64, 128):
        assert gpu_vllm.Vllm.captured_counts(slots) == get_captured_lora_counts(slots, specialize=True)


def test_the_carried_commit_says_whether_sources_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu" / "commit.json"
    assert record.carried_commit(path) == "unknown"
    record.carry_commit(path)
    known = record.commit() or "unknown"
    assert record.carried_commit(path) == known
    path.write_text(json.dumps({**json.loads(path.read_text()), "sources": "others"}))
    assert record.carried_commit(path) == f"{known}, and sources changed since"


def test_circumstances_need_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(record, "CARRIED_COMMIT", Path("/nonexistent"))
    monkeypatch.setattr(record, "carried_commit", lambda: "abc, carried")
    assert record.commit() is None
    assert record.circumstances()["commit"] == "abc, carried"
