"""What every backend must compute, one row at a time in plain torch: the truth that tests compare with.

Shapes and names throughout, after vLLM's layers (vllm/lora/layers/base_linear.py, 0.32):

- `x`: `[rows, in]`, `y`: `[rows, out]`, any floating dtypes; `y` is changed in place and never replaced.
- `a[i]`: `[slots, 1, max_rank, in]` and `b[i]`: `[slots, 1, out_i, max_rank]`, one pair for each of the slices that a
  packed module has (q, k, v). `output_slices[i]` is `out_i`.
- `slot_of_row`: one slot per row; a negative one stands for the base model. Rows of `y` beyond it are padding. Both are
  left as they are, bit for bit.
- `ranks[slot][i]`: the true rank. What lies beyond it in the slot is never read.

Sums are in float32, or in float64 where an input is, and rounded to `y`'s dtype once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Ranks(Protocol):
    """True ranks of a slot's slices: a list of them, or `lora_plugins.kernels.ranks.SlotRanks`."""

    def __getitem__(self, slot: int, /) -> Sequence[int]: ...


def shrink(
    x: Any, a: Sequence[Any], slot_of_row: Sequence[int], ranks: Ranks, scale: float = 1.0
) -> list[list[Any | None]]:
    """`scale * A x` for every row and slice: `[row][slice]`, a vector of the true rank; None for a base row."""
    wide = _accumulator(x, *a)
    return [
        [
            None if slot < 0 else scale * (a_i[slot, 0, : ranks[slot][i]].to(wide) @ x[row].to(wide))
            for i, a_i in enumerate(a)
        ]
        for row, slot in enumerate(slot_of_row)
    ]


def expand(
    y: Any,
    shrunk: Sequence[Sequence[Any | None]],
    b: Sequence[Any],
    slot_of_row: Sequence[int],
    ranks: Ranks,
    output_slices: Sequence[int],
    *,
    offset_start: int = 0,
    add_inputs: bool = True,
) -> None:
    """Add `B` times each shrunk vector to the slice's columns of `y`, or put it there where `add_inputs` is False."""
    for row, slot in enumerate(slot_of_row):
        offset = offset_start
        for i, width in enumerate(output_slices):
            vector = shrunk[row][i]
            if slot >= 0 and vector is not None:
                wide = _accumulator(vector, b[i])
                delta = b[i][slot, 0, :width, : ranks[slot][i]].to(wide) @ vector.to(wide)
                into = y[row, offset : offset + width]
                into.copy_(into.to(wide) + delta if add_inputs else delta)
            offset += width


def lora_linear(
    y: Any,
    x: Any,
    a: Sequence[Any],
    b: Sequence[Any],
    slot_of_row: Sequence[int],
    ranks: Ranks,
    output_slices: Sequence[int],
    *,
    scale: float = 1.0,
    add_inputs: bool = True,
) -> None:
    """`y += scale * B A x` for every row with its slot's adapter."""
    rows = min(len(slot_of_row), y.shape[0])
    shrunk = shrink(x[:rows], a, slot_of_row[:rows], ranks, scale)
    expand(y[:rows], shrunk, b, slot_of_row[:rows], ranks, output_slices, add_inputs=add_inputs)


def _accumulator(*tensors: Any) -> Any:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
