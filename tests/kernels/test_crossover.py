"""Which products an adapter of many rows gets, by what the processor has."""

from __future__ import annotations

import pytest
import torch

from lora_plugins.kernels import crossover, processor
from lora_plugins.kernels.compiled import build
from lora_plugins.kernels.processor import X86_64_V3, X86_64_V4, Processor
from tests.kernels.common import FEW_COMPILED, make_case

AMX = Processor("x86_64", X86_64_V4 | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"})


@pytest.mark.parametrize(
    ("this", "rows"),
    [
        (AMX, 16),
        (Processor("x86_64", X86_64_V4 | {"avx512_bf16"}), 32),
        (Processor("x86_64", X86_64_V4), None),
        (Processor("x86_64", X86_64_V3), None),
        (Processor("x86_64"), None),
        (Processor("aarch64", frozenset({"asimd", "bf16"})), 32),
        (Processor("aarch64", frozenset({"asimd"})), None),
        (Processor("riscv64", frozenset({"bf16"})), None),
    ],
)
def test_bfloat16_goes_by_the_processors_instructions(this, rows):
    assert crossover.torch_from_rows("bfloat16", this) == rows


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_are_always_compiled(dtype):
    assert crossover.torch_from_rows(dtype, AMX) is None


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
    assert (found.bfloat16 == "AMX") == torch.cpu._is_amx_tile_supported()


@pytest.mark.skipif(build.problem() is not None, reason="there is no compiled product here")
def test_an_adapter_of_many_rows_is_pytorchs():
    few, many = 0, 2
    case = make_case([few, many, -1, many, many, few, many], [(8,), (0,), (16,)], products=FEW_COMPILED)
    weights = case.weights
    case.computed(case.outputs())
    assert list(weights.panels._of_slot) == [few]  # PyTorch reads the slot itself


@pytest.mark.skipif(build.problem() is not None, reason="there is no compiled product here")
def test_what_a_slot_points_at_stays_compiled():
    weights = make_case([], [(8,)], products=FEW_COMPILED).weights
    weights.panels.place(0, weights.panels.of(0))
    assert list(weights.compiled({0: range(1000)})) == [0]
