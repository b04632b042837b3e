"""Expand: `y += B t` for every row with its slot's adapter, over no more than the slot's rank.

All slices of a packed module, of whatever widths, go in one launch. Partial sums of a split shrink are added here, in
one order.

The left factor of its product lies in registers. ptxas before 13.3 miscompiles that on sm_90 where loads are pipelined
(triton-lang/triton#9433); tables therefore keep `stages` at 1 here, which costs nothing, as a rank is one or two tiles.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from lora_plugins.kernels.triton_ops.chunks import Chunks
from lora_plugins.kernels.triton_ops.packed import ELEMENTS, PackedModule, precision
from lora_plugins.kernels.triton_ops.tiles import load_to_rank, number, pointer, product, put, rows_of_chunk
from lora_plugins.kernels.tuning import ExpandTile


def expand(
    y: Any,
    t: Any,
    module: PackedModule,
    ranks: Any,
    chunks: Chunks,
    size: int,
    tile: ExpandTile,
    *,
    add_inputs: bool = True,
) -> None:
    """Add `B t` to the slices' columns of `y`, or put it there; base rows and other columns are not touched.

    Args:
        y: `[rows, columns]`, contiguous in its last axis.
        t: float `[splits, slices, rows, max_rank]`, contiguous in its last axis; nothing beyond the rank is read.
        module: the stacked B of all slices and where their columns begin.
        ranks: int32 `[slices, slots]` on the device.
        chunks: the batch, cut.
        size: the chunk size to use, one of `SIZES`.
        tile: how the work is cut.
        add_inputs: whether what is in `y` counts.
    """
    rows = y.shape[0]
    tiles = triton.cdiv(module.widest, tile.columns)
    grid = (chunks.at_most(rows, size) * module.slices * tiles,)
    if not grid[0]:
        return
    _expand_kernel[grid](
        t,
        module.table,
        ranks,
        y,
        chunks.order,
        chunks.of_size(size),
        chunks.capacity,
        rows,
        tiles,
        ranks.stride(0),
        ranks.stride(1),
        t.stride(0),
        t.stride(1),
        t.stride(2),
        module.b_row_stride,
        y.stride(0),
        ELEMENT=ELEMENTS[module.dtype],
        ALIGNED=module.aligned,
        PRECISION=precision(module.dtype),
        ADD=add_inputs,
        SLICES=module.slices,
        SPLITS=t.shape[0],
        ROWS=size,
        RANK=tile.rank,
        OUT=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit(
    do_not_specialize=["capacity", "rows", "tiles", "ranks_stride", "ranks_slot_stride"],
    do_not_specialize_on_alignment=["ranks"],
)
def _expand_kernel(
    t: tl.tensor,
    module: tl.tensor,
    ranks: tl.tensor,
    y: tl.tensor,
    order: tl.tensor,
    chunks: tl.tensor,
    capacity: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    ranks_stride: tl.tensor,
    ranks_slot_stride: tl.tensor,
    t_split_stride: tl.tensor,
    t_slice_stride: tl.tensor,
    t_row_stride: tl.tensor,
    b_row_stride: tl.tensor,
    y_stride: tl.tensor,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    ADD: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    OUT: tl.constexpr,
) -> None:
    """One chunk, slice and tile of its columns; programs of one chunk are neighbours."""
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
    b = pointer(module, SLICES + slice_, ELEMENT, ALIGNED)
    b += slot * (tl.load(module + 4 * SLICES + slice_) * b_row_stride)
    t += slice_.to(tl.int64) * t_slice_stride
    total = tl.zeros((ROWS, OUT), dtype=tl.float32)
    for rank_begin in range(0, rank, RANK):
        r = rank_begin + tl.arange(0, RANK)
        t_tile = tl.zeros((ROWS, RANK), dtype=tl.float32)
        for split in range(SPLITS):
            t_split = t + tl.cast(split, tl.int64) * t_split_stride
            t_tile += load_to_rank(t_split + row[:, None] * t_row_stride + r[None, :], r[None, :], rank, mine[:, None])
        b_tile = load_to_rank(
            b + n[None, :].to(tl.int64) * b_row_stride + r[:, None], r[:, None], rank, n[None, :] < width
        )
        total = product(t_tile.to(ELEMENT), b_tile, total, PRECISION)
    out = y + row[:, None] * y_stride + number(module, 3 * SLICES + slice_, ALIGNED) + n[None, :]
    put(out, total, mine[:, None] & (n[None, :] < width), ADD)
