"""Which kernels: an explicit choice or none, and `auto` says why."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.record import bfloat16_instructions
from lora_plugins.errors import InvalidSettings
from lora_plugins.kernels import dispatch, processor, tuning
from lora_plugins.kernels.dispatch import (
    CPU_WRAPPER,
    REFERENCE_WRAPPER,
    Kernels,
    Machine,
    choose,
    triton_is_there,
)
from lora_plugins.kernels.processor import X86_64_V3, X86_64_V4, Processor
from lora_plugins.kernels.tuning import PACKAGED

NO_COMPILER = "no C compiler is on the PATH"
TRITON = "lora_plugins.kernels.punica_triton.TritonPunicaWrapper"


@pytest.mark.parametrize(
    ("asked", "machine", "kernels", "wrapper"),
    [
        ("auto", Machine("cpu", triton=False), "cpu", CPU_WRAPPER),
        ("auto", Machine("cpu", triton=True), "cpu", CPU_WRAPPER),
        ("auto", Machine("cuda", triton=True, architecture=lambda: "sm_90"), "vllm", None),
        ("auto", Machine("cuda", triton=True), "vllm", None),
        ("auto", Machine("cuda", triton=False), "vllm", None),
        ("auto", Machine("rocm", triton=True, architecture=lambda: "sm_90"), "vllm", None),
        ("auto", Machine("tpu", triton=True), "vllm", None),
        ("cpu", Machine("cpu", triton=False), "cpu", CPU_WRAPPER),
        ("auto", Machine("cpu", triton=False, cannot_compile=lambda: NO_COMPILER), "vllm", None),
        ("reference", Machine("cpu", triton=False), "reference", REFERENCE_WRAPPER),
        ("triton", Machine("cuda", triton=True), "triton", TRITON),
        ("triton", Machine("rocm", triton=True), "triton", TRITON),
        ("vllm", Machine("cuda", triton=True), "vllm", None),
    ],
)
def test_what_is_taken(asked, machine, kernels, wrapper):
    choice = choose(Kernels(asked), machine)
    assert (choice.kernels, choice.wrapper) == (kernels, wrapper)
    assert (NO_COMPILER in choice.why) is (asked == "auto" and machine.cannot_compile() is not None)
    assert (machine.platform if asked == "auto" else f"LORA_PLUGINS_KERNELS={asked}") in choice.why


@pytest.mark.parametrize(
    ("platform", "architecture", "kernels"),
    [("cuda", "sm_90", "triton"), ("cuda", "sm_80", "vllm"), ("cuda", None, "vllm"), ("rocm", "sm_90", "vllm")],
)
def test_auto_takes_triton_only_where_a_gpu_measured_it(platform, architecture, kernels, tmp_path, monkeypatch):
    (tmp_path / "sm_90.json").write_text("{}")
    monkeypatch.setattr(dispatch.tuning, "PACKAGED", tmp_path)
    choice = choose(Kernels.AUTO, Machine(platform, triton=True, architecture=lambda: architecture))
    assert choice.kernels == kernels
    if platform == "cuda" and kernels == "vllm":
        assert "have not been measured" in choice.why
        assert "LORA_PLUGINS_KERNELS=triton" in choice.why


def test_packaged_tables_of_architectures_have_results_measured_with_them():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    measured = {json.loads(path.read_text())["table"] for path in results.glob("kernels_gpu*.json")}
    assert {path.name for path in PACKAGED.glob("sm_*.json")} <= measured


@pytest.mark.parametrize(
    ("asked", "machine", "says"),
    [
        ("cpu", Machine("cuda", triton=True), "platform is cuda.*choose auto"),
        ("cpu", Machine("cpu", triton=True, cannot_compile=lambda: NO_COMPILER), f"{NO_COMPILER}.*install gcc"),
        ("reference", Machine("cuda", triton=True), "platform is cuda"),
        ("triton", Machine("cpu", triton=True), "platform is cpu"),
        ("triton", Machine("cuda", triton=False), "not installed"),
    ],
)
def test_startup_fails_with_kernels_that_cannot_be_had(asked, machine, says):
    with pytest.raises(InvalidSettings, match=f"LORA_PLUGINS_KERNELS={asked}.*{says}"):
        choose(Kernels(asked), machine)


def test_triton_needs_the_compiler_and_our_wrapper():
    assert not triton_is_there(lambda name: name if name == "triton" else None)
    assert not triton_is_there(lambda _: None)
    assert triton_is_there(lambda name: name)


@pytest.mark.parametrize("asked", ["reference", "vllm"])
def test_nothing_is_compiled_unless_the_choice_needs_it(asked):
    asked_for = []
    choose(Kernels(asked), Machine("cpu", triton=False, cannot_compile=lambda: asked_for.append(1)))
    assert asked_for == []


TABLES = sorted(tuning.PACKAGED.glob("*.json"))
PLAN = {"chunk": 16, "shrink": {}, "expand": {}}


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_every_packaged_table_can_be_read_and_written(tmp_path: Path) -> None:
    assert tuning.PACKAGED / "default.json" in TABLES
    for path in TABLES:
        table = tuning.read_table(path)
        assert tuning.read_table(write(tmp_path / "again.json", tuning.as_json(table))).plans == table.plans


def test_the_first_plan_whose_limits_hold_is_taken(tmp_path: Path) -> None:
    plans = [{**PLAN, "max_rows": 4, "max_in": 64}, {**PLAN, "chunk": 32, "max_rows": 4}, {**PLAN, "chunk": 64}]
    table = tuning.read_table(write(tmp_path / "t.json", {"plans": plans}))
    assert [table.plan(*batch).chunk for batch in ((4, 64, 1), (4, 65, 1), (5, 64, 1))] == [16, 32, 64]
    assert [plan.chunk for plan in table.invariant().plans] == [64]


def test_an_architecture_without_a_table_has_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default, own = (write(tmp_path / f"{name}.json", {"plans": [PLAN]}) for name in ("default", "sm_90"))
    monkeypatch.setattr(tuning, "PACKAGED", tmp_path)
    assert tuning.load_table("sm_90").origin == str(own)
    assert tuning.load_table("sm_0").origin == str(default)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_packaged_tables_hold_what_kernels_can_be_compiled_with(path: Path) -> None:
    table = tuning.read_table(path)
    assert table.dense_min_rows is None or table.dense_min_rows > 0
    assert table.plan(tuning.ANY, tuning.ANY, tuning.ANY) is table.plans[-1], "the last one has no limits"
    for plan in table.plans:
        assert plan.chunk in tuning.CHUNK_SIZES
        assert plan.fused is None or plan.chunk == tuning.CHUNK_SIZES[0]
        for tile in filter(None, (plan.shrink, plan.expand, plan.fused)):
            for name, value in asdict(tile).items():
                assert value >= (16 if name in {"rank", "columns", "columns_in", "columns_out"} else 1)  # tensor cores
                assert name in {"splits", "rank_programs", "stages"} or value & (value - 1) == 0  # a power of 2
        for tile in filter(None, (plan.expand, plan.fused)):
            # Before 13.3 ptxas miscompiles loads that are pipelined beside a factor in registers, on sm_90
            # (triton-lang/triton#9433).
            assert tile.stages == 1


AMX = Processor("x86_64", X86_64_V4 | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"})


def test_amx_that_the_system_refuses_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {' '.join(AMX.flags)}\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    found = processor.this_processor.__wrapped__()
    assert found.flags == (AMX.flags if torch.cpu._is_amx_tile_supported() else AMX.flags - processor.AMX_BF16)


def test_flags_are_read_as_the_kernel_writes_them(monkeypatch, tmp_path):
    assert processor.flags_in("model name\t: a: b\nflags\t\t: fpu avx2\n\nflags : other\n") == {"fpu", "avx2"}
    assert processor.flags_in("Features\t: fp asimd bf16\n") == {"fp", "asimd", "bf16"}
    assert processor.flags_in("nonsense") == frozenset()
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "missing")
    assert processor.this_processor.__wrapped__().flags == frozenset()


def test_the_processor_is_what_pytorch_finds():
    found = processor.this_processor()
    has_avx2 = torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}
    assert found.has(X86_64_V3) == (found.architecture == "x86_64" and has_avx2)
    assert (bfloat16_instructions(found) == "AMX") == torch.cpu._is_amx_tile_supported()
