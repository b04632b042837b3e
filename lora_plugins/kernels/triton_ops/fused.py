"""Shrink and expand in one launch, for few rows: every program computes what it needs of `A x` itself.

A is read once for each tile of output columns, out of the second-level cache after the first. That costs less than a
second launch only where A is small and rows are few; the tuning table says where.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from lora_plugins.kernels.triton_ops.chunks import Chunks
from lora_plugins.kernels.triton_ops.packed import ELEMENTS, PackedModule, columns, precision
from lora_plugins.kernels.triton_ops.tiles import (
    load_to_rank,
    number,
    pointer,
    product,
    put,
    rows_of_chunk,
    shrink_tile,
)
from lora_plugins.kernels.tuning import FusedTile


def fused(
    y: Any,
    x: Any,
    module: PackedModule,
    ranks: Any,
    chunks: Chunks,
    size: int,
    tile: FusedTile,
    scale: float,
    *,
    add_inputs: bool = True,
) -> None:
    """Add `scale * B A x` to the slices' columns of `y`, or put it there; the rest of `y` is not touched.

    Args:
        y: `[rows, columns]`, contiguous in its last axis.
        x: `[rows, in]`, contiguous in its last axis.
        module: the stacked A and B of all slices.
        ranks: int32 `[slices, slots]` on the device.
        chunks: the batch, cut.
        size: the chunk size to use, one of `SIZES`.
        tile: how the work is cut.
        scale: what every sum of the shrink is multiplied with.
        add_inputs: whether what is in `y` counts.
    """
    rows, n_in = x.shape
    tiles = triton.cdiv(module.widest, tile.columns_out)
    grid = (chunks.at_most(rows, size) * module.slices * tiles,)
    if not grid[0]:
        return
    _fused_kernel[grid](
        x,
        module.table,
        ranks,
        y,
        chunks.order,
        chunks.of_size(size),
        chunks.capacity,
        rows,
        tiles,
        n_in,
        ranks.stride(0),
        ranks.stride(1),
        x.stride(0),
        module.a_strides[0],
        module.a_strides[1],
        module.b_row_stride,
        y.stride(0),
        scale,
        ELEMENT=ELEMENTS[module.dtype],
        ALIGNED=module.aligned,
        PRECISION=precision(module.dtype),
        ADD=add_inputs,
        SLICES=module.slices,
        ROWS=size,
        RANK=tile.rank,
        IN=columns(tile.columns_in, module.dtype),
        OUT=tile.columns_out,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit(
    do_not_specialize=["capacity", "rows", "tiles", "ranks_stride", "ranks_slot_stride"],
    do_not_specialize_on_alignment=["ranks"],
)
def _fused_kernel(
    x: tl.tensor,
    module: tl.tensor,
    ranks: tl.tensor,
    y: tl.tensor,
    order: tl.tensor,
    chunks: tl.tensor,
    capacity: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    n_in: tl.tensor,
    ranks_stride: tl.tensor,
    ranks_slot_stride: tl.tensor,
    x_stride: tl.tensor,
    a_slot_stride: tl.tensor,
    a_rank_stride: tl.tensor,
    b_row_stride: tl.tensor,
    y_stride: tl.tensor,
    scale: tl.tensor,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    ADD: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
) -> None:
    """One chunk, slice and tile of its columns."""
    program = tl.program_id(0)
    tile = program % tiles
    slice_ = program // tiles % SLICES
    chunk = program // (tiles * SLICES)
    rows_here = tl.load(chunks + 2 * capacity + chunk)
    if rows_here == 0:
        return
    width = number(module, 2 * SLICES + slice_, ALIGNED)
    if tile * OUT >= width:
        return
    slot = tl.load(chunks + chunk).to(tl.int64)
    rank = tl.load(ranks + slice_ * ranks_stride + slot * ranks_slot_stride)
    if ADD:
        if rank == 0:
            return
    row, mine = rows_of_chunk(order, chunks, capacity, chunk, rows_here, rows, ROWS)
    n = tile * OUT + tl.arange(0, OUT)
    a = pointer(module, slice_, ELEMENT, ALIGNED) + slot * a_slot_stride
    b = pointer(module, SLICES + slice_, ELEMENT, ALIGNED)
    b += slot * (tl.load(module + 4 * SLICES + slice_) * b_row_stride)
    total = tl.zeros((ROWS, OUT), dtype=tl.float32)
    for rank_begin in range(0, rank, RANK):
        r = rank_begin + tl.arange(0, RANK)
        t = shrink_tile(
            x, a, row, mine, r, rank, 0, n_in, x_stride, a_rank_stride, ELEMENT, PRECISION, ROWS, RANK, IN, IN
        )
        b_tile = load_to_rank(
            b + n[None, :].to(tl.int64) * b_row_stride + r[:, None], r[:, None], rank, n[None, :] < width
        )
        total = product((t * scale).to(ELEMENT), b_tile, total, PRECISION)
    out = y + row[:, None] * y_stride + number(module, 3 * SLICES + slice_, ALIGNED) + n[None, :]
    put(out, total, mine[:, None] & (n[None, :] < width), ADD)
