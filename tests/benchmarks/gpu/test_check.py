"""The checks of the GPU: they pass in Triton's interpreter, and see what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.gpu import check as check_module
from benchmarks.gpu.check import Check
from benchmarks.gpu.device import Gpu
from lora_plugins.kernels.triton_ops import operators
from lora_plugins.kernels.triton_ops.operators import Operators
from lora_plugins.kernels.tuning import FusedTile, Table
from tests.benchmarks.gpu.conftest import PLAN

ONE_OF_EACH = {
    "linear": Check("linear", 9, 67, (33, 16), 64, "bfloat16", "in turn", padding=2),
    "linear, one slot, not added": Check("linear", 5, 40, (24,), 64, "float32", "one slot", add_inputs=False),
    "shrink": Check("shrink", 9, 40, (33, 16), 64, "float16", "in turn", padding=2),
    "expand from an offset": Check("expand", 9, 40, (24, 16), 64, "float32", "pieces", offset=16, add_inputs=False),
    "embedding": Check("embedding", 9, 0, (40,), 64, "bfloat16", "pieces", padding=1),
    "logits": Check("logits", 9, 40, (70,), 64, "float16", "in turn"),
    "rows of a larger batch": Check("linear", 4, 40, (24,), 64, "float32", "in turn", unseen=40),
    "vectors": Check("linear", 9, 67, (33, 16), 64, "bfloat16", "in turn", padding=2, turned=True),
    "vectors, one slot": Check("linear", 5, 40, (24, 9), 64, "float16", "one slot", padding=2, turned=True),
    "vectors, not added": Check("linear", 9, 40, (24,), 64, "float32", "in turn", add_inputs=False, turned=True),
    "base rows": Check("linear", 4, 40, (24,), 128, "float32", "base", padding=1),
}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_each_check_passes_in_the_interpreter(name: str, made: Operators, gpu: Gpu) -> None:
    check = ONE_OF_EACH[name]
    for graph in (False, True) if check_module.in_a_graph(check) else (False,):
        error = check_module.error_of(check, made, gpu, seed=1, graph=graph)
        assert error <= 1
        assert error > 0 or check.pattern == "base"


@pytest.mark.parametrize("path", [{"dense_min_rows": 1}, {"fused": FusedTile()}], ids=["dense", "fused"])
@pytest.mark.parametrize("name", ["vectors", "vectors, one slot"])
def test_vectors_are_checked_on_other_paths(name: str, path: dict[str, Any], gpu: Gpu) -> None:
    plan = replace(PLAN, fused=path.get("fused"))
    operators.use(made := Operators(Table("", (plan,), dense_min_rows=path.get("dense_min_rows"))))
    assert 0 < check_module.error_of(ONE_OF_EACH[name], made, gpu, seed=1) <= 1


@pytest.mark.parametrize("rank", check_module.VECTORS)
@pytest.mark.parametrize("side", [0, 1], ids=["g", "c"])
def test_a_check_sees_a_vector_left_out(
    rank: int, side: int, made: Operators, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = check_module.Call.__call__

    def call_without(self: check_module.Call) -> None:
        (known,) = {id(one): one for one in made._known.values()}.values()
        known.vectors[check_module.RANKS.index(rank), side] = 1 - side
        call(self)

    monkeypatch.setattr(check_module.Call, "__call__", call_without)
    error = check_module.error_of(ONE_OF_EACH["vectors"], made, gpu, seed=1)
    assert (error > 1) == bool(check_module.VECTORS[rank][side])


@pytest.mark.parametrize("name", ["linear", "vectors", "expand from an offset", "embedding", "logits"])
def test_a_check_sees_one_wrong_element(name: str, made: Operators, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    call = check_module.Call.__call__

    def call_and_spoil(self: check_module.Call) -> None:
        call(self)
        row = next(row for row in range(self.check.rows) if self.slot(row) >= 0)
        self.y[row, -1] += self.y.abs().max() / 4

    monkeypatch.setattr(check_module.Call, "__call__", call_and_spoil)
    assert check_module.error_of(ONE_OF_EACH[name], made, gpu, seed=1) > 1


def test_a_graph_never_holds_the_dense_path(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels would be compiled and loaded for the first time within the capture, which CUDA refuses."""
    made = Operators(Table("", (PLAN,), dense_min_rows=1))
    operators.use(made)
    dense, taken = operators.dense, []
    monkeypatch.setattr(operators, "dense", lambda *args, **kwargs: (taken.append(1), dense(*args, **kwargs)))
    check = Check("linear", 5, 40, (24,), 64, "float32", "one slot")
    assert check_module.error_of(check, made, gpu, seed=1, graph=True) <= 1
    assert not taken
    assert check_module.error_of(check, made, gpu, seed=1) <= 1
    assert taken
