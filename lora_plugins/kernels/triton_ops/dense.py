"""The dense path: a batch of one adapter, as plain matrix products of the slot's true rank.

The dense path serves long prefills, where the library's products win. The host chooses the path and the rank, so the
path is never captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def dense(
    y: Any,
    x: Any,
    a: Sequence[Any],
    b: Sequence[Any],
    ranks: Sequence[int],
    output_slices: Sequence[int],
    *,
    scale: float = 1.0,
    offset: int = 0,
    add_inputs: bool = True,
    vectors: Any = None,
) -> None:
    """Add `scale * B A x` to the slices' columns of `y`, or replace the columns; then compute `g * y + c` of all.

    Args:
        y: `[rows, columns]`.
        x: `[rows, in]`, of the dtype of the weights.
        a: one slot's `[max_rank, in]` for each slice.
        b: one slot's `[out_i, max_rank]` for each slice.
        ranks: the slot's rank for each slice.
        output_slices: `out_i`.
        scale: factor of the shrink.
        offset: the first slice's first column in `y`.
        add_inputs: whether to add to `y`, or to replace.
        vectors: the slot's g and c, float32 `[2, columns]`; None without.
    """
    for a_i, b_i, rank, width in zip(a, b, ranks, output_slices, strict=True):
        into = y[:, offset : offset + width]
        offset += width
        # Rank 0 adds nothing; a product with an inner size of 0 would launch a kernel for nothing.
        if rank:
            t = torch.mm(x, a_i[:rank].t())
            torch.addmm(into, t, b_i[:width, :rank].t(), beta=int(add_inputs), alpha=scale, out=into)
        elif not add_inputs:
            into.zero_()
    if vectors is not None:
        # vLLM pads a head's logits. One launch, which rounds once: `addcmul` computes mixed dtypes in the widest.
        y, vectors = y[:, : vectors.shape[1]], vectors[:, : y.shape[1]]
        torch.addcmul(vectors[1], y, vectors[0], out=y)
