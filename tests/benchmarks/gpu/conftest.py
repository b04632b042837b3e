"""The programs without a GPU: their device, our operators with one plan, and a session."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")

from benchmarks.gpu.device import Gpu, Rehearsal
from benchmarks.gpu.session import Session
from lora_plugins.kernels.triton_ops import operators
from lora_plugins.kernels.triton_ops.operators import Operators
from lora_plugins.kernels.tuning import ExpandTile, Plan, ShrinkTile, Table

PLAN = Plan(16, ShrinkTile(rank=64, columns=128, splits=1, rank_programs=1), ExpandTile(rank=64, columns=64))


@pytest.fixture(autouse=True)
def _operators_of_this_test() -> Iterator[None]:
    """Programs set the operators of the process; here others follow."""
    before = operators._operators
    yield
    operators._operators = before


@pytest.fixture
def made() -> Operators:
    made = Operators(Table("", (PLAN,)))
    operators.use(made)
    return made


@pytest.fixture
def gpu() -> Rehearsal:
    return Rehearsal()


@pytest.fixture
def session(tmp_path: Path) -> Callable[..., Session]:
    def begin(gpu: Gpu, seconds: float = 600.0) -> Session:
        begun = Session(gpu, Namespace(out=tmp_path, seconds=seconds, table=None))
        if seconds <= 0:
            begun.began = time.monotonic() - 1
        return begun

    return begin
