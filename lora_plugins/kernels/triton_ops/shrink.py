"""Shrink: `A x` for every row with its slot's adapter, up to the slot's rank.

All slices of a packed module go in one launch. The input axis may be split over programs; each program stores a partial
sum, and the reader adds the partial sums in a fixed order. There are no atomics, so a result never depends on timing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lora_plugins.kernels.triton_ops.packed import Operands, PackedModule, columns
from lora_plugins.kernels.triton_ops.tiles import pointer, rows_of_chunk, shrink_tile
from lora_plugins.kernels.tuning import ShrinkTile


def shrink(out: Any, x: Any, operands: Operands, tile: ShrinkTile, scale: float) -> None:
    """Store `scale * A x` of each split into `out`; base rows and columns beyond the rank are not written.

    Args:
        out: float32 `[tile.splits, slices, rows, max_rank]`, contiguous in its last axis.
        x: `[rows, in]`, contiguous in its last axis; `in` may be odd.
        operands: module and batch.
        tile: how the work is cut.
        scale: factor of every sum.
    """
    rows, n_in = x.shape
    module = operands.module
    rank_programs = min(tile.rank_programs, triton.cdiv(module.max_rank, tile.rank))
    per_chunk = tile.splits * rank_programs * module.slices
    grid = (operands.chunks.at_most(rows, operands.size) * per_chunk,)
    if not grid[0]:
        return
    _shrink_kernel[grid](
        x,
        out,
        *operands.arguments(rows),
        n_in,
        x.stride(0),
        *module.a_strides,
        *out.stride()[:3],
        scale,
        **operands.constants(),
        RANK=tile.rank,
        IN=columns(tile.columns, module.dtype),
        SPLITS=tile.splits,
        RANK_PROGRAMS=rank_programs,
        num_warps=tile.warps,
        num_stages=tile.stages if x.dtype == module.dtype else 1,  # a conversion puts x into registers, see expand.py
    )


def partials(tile: ShrinkTile, module: PackedModule, rows: int, device: Any) -> Any:
    """An uninitialised buffer for `shrink`."""
    return torch.empty(tile.splits, module.slices, rows, module.max_rank, dtype=torch.float32, device=device)


@triton.jit(
    do_not_specialize=["capacity", "rows", "ranks_stride", "ranks_slot_stride"],
    do_not_specialize_on_alignment=["ranks"],
)
def _shrink_kernel(
    x: tl.tensor,
    out: tl.tensor,
    module: tl.tensor,
    ranks: tl.tensor,
    order: tl.tensor,
    chunks: tl.tensor,
    capacity: tl.tensor,
    rows: tl.tensor,
    ranks_stride: tl.tensor,
    ranks_slot_stride: tl.tensor,
    n_in: tl.tensor,
    x_stride: tl.tensor,
    a_slot_stride: tl.tensor,
    a_rank_stride: tl.tensor,
    out_split_stride: tl.tensor,
    out_slice_stride: tl.tensor,
    out_row_stride: tl.tensor,
    scale: tl.tensor,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    IN: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
) -> None:
    """Compute one chunk, slice, part of the rank and part of the input axis; programs of one chunk are neighbours."""
    program = tl.program_id(0)
    split = program % SPLITS
    rank_program = program // SPLITS % RANK_PROGRAMS
    slice_ = program // (SPLITS * RANK_PROGRAMS) % SLICES
    chunk = program // (SPLITS * RANK_PROGRAMS * SLICES)
    rows_here = tl.load(chunks + 2 * capacity + chunk)
    if rows_here == 0:
        return
    # int64: slot times stride exceeds 2³¹ elements for large vocabularies.
    slot = tl.load(chunks + chunk).to(tl.int64)
    rank = tl.load(ranks + slice_ * ranks_stride + slot * ranks_slot_stride)
    # The grid is made for the largest rank: programs beyond the slot's rank leave.
    if rank_program * RANK >= rank:
        return
    row, mine = rows_of_chunk(order, chunks, capacity, chunk, rows_here, rows, ROWS)
    a = pointer(module, slice_, ELEMENT, ALIGNED) + slot * a_slot_stride
    out += split.to(tl.int64) * out_split_stride + slice_.to(tl.int64) * out_slice_stride
    for rank_begin in range(rank_program * RANK, rank, RANK * RANK_PROGRAMS):
        r = rank_begin + tl.arange(0, RANK)
        total = shrink_tile(
            x, a, row, mine, r, rank, split * IN, n_in, x_stride, a_rank_stride, ELEMENT, PRECISION,
            ROWS, RANK, IN, IN * SPLITS,
        )  # fmt: skip
        tl.store(
            out + row[:, None] * out_row_stride + r[None, :], total * scale, mask=mine[:, None] & (r[None, :] < rank)
        )
