"""The result that every backend must compute, one row at a time in plain torch; tests compare with the reference.

In an engine only `LORA_PLUGINS_KERNELS=reference` computes with these functions (`punica_cpu.ReferencePunicaWrapper`).

Shapes and names throughout, after vLLM's layers (vllm/lora/layers/base_linear.py, 0.32):

- `x`: `[rows, in]`, `y`: `[rows, out]`, any floating dtypes; `y` is changed in place and never replaced.
- `a[i]`: `[slots, 1, max_rank, in]` and `b[i]`: `[slots, 1, out_i, max_rank]`, a pair for each slice of a packed module
  (q, k, v). `output_slices[i]` is `out_i`.
- `slot_of_row`: a slot for each row; a negative slot stands for the base model. Rows of `y` beyond `slot_of_row` are
  padding. Rows of the base model and padding keep every bit.
- `ranks[slot][i]`: the true rank. No function reads the slot beyond the true rank.

Sums are in float32, or in float64 where an input is float64, and rounded to `y`'s dtype once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from lora_plugins.kernels.slot_ranks import SlotRanks, Vectors


def lora_linear(
    y: Any,
    x: Any,
    a: Sequence[Any],
    b: Sequence[Any],
    slot_of_row: Sequence[int],
    ranks: SlotRanks | Sequence[Sequence[int]],
    output_slices: Sequence[int],
    *,
    scale: float = 1.0,
    add_inputs: bool = True,
    vectors: Mapping[int, Vectors] = MappingProxyType({}),
) -> None:
    """Compute `y += scale * B A x`, then `y = g * y + c`, for every row with its slot's adapter.

    Without `add_inputs`, `scale * B A x` replaces the slices' columns of `y`.
    """
    wide = _accumulator(x, *a, *b)
    # vLLM may show a layer fewer rows than the batch has, or pad `y` beyond the batch.
    for row, slot in enumerate(slot_of_row[: y.shape[0]]):
        if slot < 0:
            continue
        first = 0
        for a_i, b_i, rank, width in zip(a, b, ranks[slot], output_slices, strict=True):
            shrunk = scale * (a_i[slot, 0, :rank].to(wide) @ x[row].to(wide))
            delta = b_i[slot, 0, :width, :rank].to(wide) @ shrunk
            into = y[row, first : first + width]
            into.copy_(into.to(wide) + delta if add_inputs else delta)
            first += width
        if (own := vectors.get(slot)) is not None:
            y[row] = own.g * y[row].to(_accumulator(y)) + own.c


def _accumulator(*tensors: Any) -> Any:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
