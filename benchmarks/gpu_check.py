"""Correctness on the device itself, against float64, before anything is timed.

What must not be read is NaN; what must not be written, base rows and padding, is compared bit for bit. A captured
graph is replayed for other batches and other ranks than it was captured with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lora_plugins.kernels.ranks import SlotRanks
from lora_plugins.kernels.triton_ops.operators import Batch, Operators

# Largest error relative to the largest value: x, A, B are exact, t and y are rounded to the dtype once each.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Check:
    """One call: `rows` real rows and `padding` rows, a slot or -1 for each real one by `pattern`."""

    rows: int
    n_in: int
    widths: tuple[int, ...]
    slot_rank: int
    dtype: Any
    pattern: str
    padding: int = 0

    def slot_of_row(self, slots: int) -> list[int]:
        match self.pattern:
            case "one slot":
                return [slots - 1] * self.rows
            case "in turn":  # base rows too
                return [row % (slots + 1) - 1 for row in range(self.rows)]
            case "pieces":
                return [row * (slots + 1) // self.rows - 1 for row in range(self.rows)]
            case _:
                return [-1] * self.rows


RANKS = (16, 0, 5, 64, 8, 33)  # one per slot; the slot rank is 64 or more


def checks(*, small: bool = False) -> Iterator[Check]:
    """Every plan and path, every dtype, even and odd sizes; `small` for where the interpreter computes."""
    rows = (18,) if small else (1, 3, 16, 64, 300, 2048, 5000)
    shapes = [(67, (33, 16))] if small else [(4096, (4096, 1024, 1024)), (1023, (515, 77))]
    for dtype in TOLERANCE:
        for n_in, widths in shapes:
            for n_rows in rows:
                for pattern in ("in turn", "pieces", "one slot"):
                    yield Check(n_rows, n_in, widths, 64, dtype, pattern, padding=2 if n_rows > 1 else 0)
    yield Check(4, *shapes[0], 128, torch.bfloat16, "base", padding=1)


def run(check: Check, operators: Operators, device: Any, *, graph: bool = False) -> float:
    """The error of one call relative to the tolerance: at most 1 is right.

    Raises:
        AssertionError: something was written that must not be.
    """
    torch.manual_seed(0)
    rows, dtype, slots = check.rows + check.padding, check.dtype, len(RANKS)
    a = [torch.randn(slots, 1, check.slot_rank, check.n_in, device=device).mul_(0.1).to(dtype) for _ in check.widths]
    b = [torch.randn(slots, 1, width, check.slot_rank, device=device).mul_(0.1).to(dtype) for width in check.widths]
    for slot, rank in enumerate(RANKS):
        for a_i, b_i in zip(a, b, strict=True):
            a_i[slot, 0, rank:] = float("nan")
            b_i[slot, 0, :, rank:] = float("nan")
    ranks = SlotRanks(slots, [check.slot_rank] * len(check.widths))
    operators.register(a, b, ranks)
    x = torch.randn(rows, check.n_in, device=device).to(dtype)
    before = torch.randn(rows, sum(check.widths), device=device).to(dtype)
    slot_of_row = check.slot_of_row(slots)
    x[[row for row, slot in enumerate(slot_of_row) if slot < 0]] = float("nan")
    x[check.rows :] = float("nan")
    batch, y = Batch(rows, slots, device), before.clone()

    def call() -> None:
        torch.ops.lora_plugins.lora_linear(y, x, a, b, *batch.tensors, list(check.widths), 0.5, 0, True)

    def cut(slots_of: Sequence[int]) -> None:
        in_use = {slot for slot in slots_of if slot >= 0}
        batch.cut(torch.tensor(slots_of, device=device), in_use, base_rows=min(slots_of) < 0)

    def tell(true_ranks: Sequence[int]) -> None:
        for slot, rank in enumerate(true_ranks):
            ranks.written(slot, [rank] * len(check.widths))

    if graph:  # captured for another batch, with slots that hold nothing yet
        tell([0] * slots)
        cut([row % slots for row in range(check.rows)])
        replay = captured(call)
        tell(RANKS)
        cut(slot_of_row)
        y.copy_(before)
        replay()
    else:
        tell(RANKS)
        cut(slot_of_row)
        call()
    operators.forget()
    return _error(check, y, before, x, a, b, slot_of_row)


def captured(call: Any) -> Any:
    """The call in a CUDA graph, after it has run outside of one; returns what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _error(check: Check, y: Any, before: Any, x: Any, a: Any, b: Any, slot_of_row: Sequence[int]) -> float:
    untouched = [row for row in range(y.shape[0]) if row >= check.rows or slot_of_row[row] < 0]
    assert torch.equal(y[untouched], before[untouched]), f"{check}: a row of no adapter was written"
    want = before.double()
    offset = 0
    for a_i, b_i, width in zip(a, b, check.widths, strict=True):
        for slot, rank in enumerate(RANKS):
            mine = [row for row, s in enumerate(slot_of_row) if s == slot]
            if mine and rank:
                t = 0.5 * x[mine].double() @ a_i[slot, 0, :rank].double().T
                want[mine, offset : offset + width] += t @ b_i[slot, 0, :, :rank].double().T
        offset += width
    error = (y.double() - want).abs().max() / want.abs().max().clamp_min(1.0)
    return float(error) / TOLERANCE[check.dtype] if bool(error.isfinite()) else float("inf")
