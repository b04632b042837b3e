"""Expand: `y += B t` for every row with its slot's adapter, up to the slot's rank; then `y = g * y + c` with vectors.

All slices of a packed module, of whatever widths, go in one launch. The kernel adds the partial sums of a split shrink,
always in the same order. A single program computes a tile of `y` from all ranks and partial sums, so the program can
turn the finished sum by the slot's vectors before its only store. A program of a slot without vectors skips the step.

Fused, for few rows, every program computes its part of `t = A x` itself. Each tile of output columns reads A once,
after the first tile from the second-level cache. Fusing costs less than a second launch only where A is small and rows
are few; the tuning table says where.

The left factor of the product lies in registers. ptxas before 13.3 miscompiles a left factor in registers on sm_90
where loads are pipelined (triton-lang/triton#9433); tables therefore keep `stages` at 1 for an expand. A single stage
costs nothing, as a rank is one or two tiles.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from lora_plugins.kernels.triton_ops.packed import Operands, columns
from lora_plugins.kernels.triton_ops.tiles import load_to_rank, number, pointer, product, rows_of_chunk, shrink_tile
from lora_plugins.kernels.tuning import ExpandTile, FusedTile


def expand(y: Any, t: Any, operands: Operands, tile: ExpandTile, *, add_inputs: bool = True) -> None:
    """Add `B t` to the slices' columns of `y`, or replace the columns; base rows and other columns are not touched.

    Args:
        y: `[rows, columns]`, contiguous in its last axis.
        t: float `[splits, slices, rows, max_rank]`, contiguous in its last axis; read up to the true rank.
        operands: module and batch.
        tile: how the work is cut.
        add_inputs: whether to add to `y`, or to replace.
    """
    t_strides = (t.stride(2), t.stride(0), t.stride(1))
    # IN is not used without FUSED; 16 is the smallest tile that Triton's `dot` takes.
    cut = {"FUSED": False, "SPLITS": t.shape[0], "IN": 16, "RANK": tile.rank, "OUT": tile.columns}
    # The kernel reads `n_in` (0) and `scale` (1.0) only where FUSED: the shrink has scaled `t`.
    _launch(y, t, t_strides, 0, 1.0, operands, tile, cut, add_inputs=add_inputs)


def fused(y: Any, x: Any, operands: Operands, tile: FusedTile, scale: float, *, add_inputs: bool = True) -> None:
    """Add `scale * B A x` to the slices' columns of `y`, or replace the columns; the rest of `y` is not touched.

    Args:
        y: as for `expand`.
        x: `[rows, in]`, contiguous in its last axis.
        operands: module and batch.
        tile: how the work is cut.
        scale: factor of every sum of the shrink.
        add_inputs: whether to add to `y`, or to replace.
    """
    columns_in = columns(tile.columns_in, operands.module.dtype)
    cut = {"FUSED": True, "SPLITS": 1, "IN": columns_in, "RANK": tile.rank, "OUT": tile.columns_out}
    # x has neither splits nor slices, whose strides are 0.
    _launch(y, x, (x.stride(0), 0, 0), x.shape[1], scale, operands, tile, cut, add_inputs=add_inputs)


def _launch(
    y: Any,
    source: Any,
    source_strides: tuple[int, int, int],
    n_in: int,
    scale: float,
    operands: Operands,
    tile: ExpandTile | FusedTile,
    cut: dict[str, int],
    *,
    add_inputs: bool,
) -> None:
    rows, module = y.shape[0], operands.module
    # Tiles of the widest slice for every slice: programs beyond a narrow slice leave at once.
    tiles = triton.cdiv(module.widest, cut["OUT"])
    grid = (operands.chunks.at_most(rows, operands.size) * module.slices * tiles,)
    if not grid[0]:
        return
    _expand_kernel[grid](
        source,
        y,
        *operands.arguments(rows),
        operands.vectors,
        tiles,
        n_in,
        *source_strides,
        *module.a_strides,
        module.b_row_stride,
        y.stride(0),
        operands.vectors.stride(1),
        scale,
        **operands.constants(),
        **cut,
        ADD=add_inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit(
    do_not_specialize=["capacity", "rows", "tiles", "ranks_stride", "ranks_slot_stride"],
    do_not_specialize_on_alignment=["ranks"],
)
def _expand_kernel(
    source: tl.tensor,
    y: tl.tensor,
    module: tl.tensor,
    ranks: tl.tensor,
    order: tl.tensor,
    chunks: tl.tensor,
    capacity: tl.tensor,
    rows: tl.tensor,
    ranks_stride: tl.tensor,
    ranks_slot_stride: tl.tensor,
    vectors: tl.tensor,
    tiles: tl.tensor,
    n_in: tl.tensor,
    source_stride: tl.tensor,
    t_split_stride: tl.tensor,
    t_slice_stride: tl.tensor,
    a_slot_stride: tl.tensor,
    a_rank_stride: tl.tensor,
    b_row_stride: tl.tensor,
    y_stride: tl.tensor,
    vectors_stride: tl.tensor,
    scale: tl.tensor,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    FUSED: tl.constexpr,
    SPLITS: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    OUT: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """Compute a chunk, slice and tile of columns; programs of a chunk are neighbours. `source` is t, or x if FUSED."""
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
    # int64: slot times stride exceeds 2³¹ elements for large vocabularies.
    slot = tl.load(chunks + chunk).to(tl.int64)
    rank = tl.load(ranks + slice_ * ranks_stride + slot * ranks_slot_stride)
    has_vectors = tl.load(ranks + SLICES * ranks_stride + slot * ranks_slot_stride)
    # Without ADD a rank of 0 still stores zeros: the columns must not keep old content.
    if ADD:
        if (rank == 0) & (has_vectors == 0):
            return
    row, mine = rows_of_chunk(order, chunks, capacity, chunk, rows_here, rows, ROWS)
    n = tile * OUT + tl.arange(0, OUT)
    a = pointer(module, slice_, ELEMENT, ALIGNED) + slot * a_slot_stride
    b = pointer(module, SLICES + slice_, ELEMENT, ALIGNED)
    # B's rows differ by slice: rows (the table's fifth row) times the stride is the distance from slot to slot.
    b += slot * (tl.load(module + 4 * SLICES + slice_) * b_row_stride)
    total = tl.zeros((ROWS, OUT), dtype=tl.float32)
    # The loop ends at the slot's true rank: beyond the rank, memory may hold anything.
    for rank_begin in range(0, rank, RANK):
        r = rank_begin + tl.arange(0, RANK)
        if FUSED:
            t = scale * shrink_tile(
                source, a, row, mine, r, rank, 0, n_in, source_stride, a_rank_stride, ELEMENT, PRECISION,
                ROWS, RANK, IN, IN,
            )  # fmt: skip
        else:
            t = tl.zeros((ROWS, RANK), dtype=tl.float32)
            for split in range(SPLITS):
                of_split = source + slice_.to(tl.int64) * t_slice_stride + tl.cast(split, tl.int64) * t_split_stride
                places = of_split + row[:, None] * source_stride + r[None, :]
                t += load_to_rank(places, r[None, :], rank, mine[:, None])
        b_tile = load_to_rank(
            b + n[None, :].to(tl.int64) * b_row_stride + r[:, None], r[:, None], rank, n[None, :] < width
        )
        total = product(t.to(ELEMENT), b_tile, total, PRECISION)
    column = number(module, 3 * SLICES + slice_, ALIGNED) + n
    out = y + row[:, None] * y_stride + column[None, :]
    mask = mine[:, None] & (n[None, :] < width)
    if ADD:
        total += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    if has_vectors:
        g = vectors + slot * 2 * vectors_stride + column
        total = total * tl.load(g, mask=n < width, other=0.0)[None, :]
        total += tl.load(g + vectors_stride, mask=n < width, other=0.0)[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=mask)
