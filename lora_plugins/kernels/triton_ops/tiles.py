"""What the Triton kernels of shrink and expand share, on the device: rows of a chunk, loads of tiles, their products.

Triton widens a load only as far as Triton can prove the mask constant. A rank that is read from memory proves nothing,
but `rank // 8 * 8` does; so a rank that is a multiple of 8 takes a path of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pointer(table: tl.tensor, index: tl.tensor, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """Return the address at `table[index]` (int64) as a pointer to `ELEMENT`; ALIGNED promises 16-byte multiples."""
    address = tl.load(table + index).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        address = tl.multiple_of(address, 16)  # on the pointer: a cast loses Triton's knowledge of the number
    return address


@triton.jit
def number(table: tl.tensor, index: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """Return the number at `table[index]` (int64); ALIGNED promises a multiple of 8."""
    value = tl.load(table + index)
    if ALIGNED:
        value = tl.multiple_of(value, 8)
    return value


@triton.jit
def load_to_rank(pointers: tl.tensor, rank_index: tl.tensor, rank: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load a tile, 0 beyond `rank` and `mask`; `rank_index` (broadcast against the tile) is the contiguous axis."""
    if rank % 8 == 0:
        tile = tl.load(pointers, mask=mask & (rank_index < rank // 8 * 8), other=0.0)
    else:
        tile = tl.load(pointers, mask=mask & (rank_index < rank), other=0.0)
    return tile


@triton.jit
def product(left: tl.tensor, right: tl.tensor, total: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return `total + left @ right`; PRECISION is Triton's, or "widened" (see `packed.precision`)."""
    # constexpr: Triton compiles only the chosen branch.
    if PRECISION == "widened":
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def rows_of_chunk(
    order: tl.tensor,
    chunks: tl.tensor,
    capacity: tl.tensor,
    chunk: tl.tensor,
    rows_here: tl.tensor,
    rows: tl.tensor,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the row numbers of a chunk, int64 `[ROWS]`, and which numbers are rows of the batch."""
    place = tl.arange(0, ROWS)
    # A chunk may hold rows beyond `rows`, where a layer sees the first rows only; the second mask drops such rows.
    row = tl.load(order + tl.load(chunks + capacity + chunk) + place, mask=place < rows_here, other=0)
    return row, (place < rows_here) & (row < rows)


@triton.jit
def shrink_tile(
    x: tl.tensor,
    a: tl.tensor,
    row: tl.tensor,
    mine: tl.tensor,
    r: tl.tensor,
    rank: tl.tensor,
    first: tl.tensor,
    n_in: tl.tensor,
    x_stride: tl.tensor,
    a_rank_stride: tl.tensor,
    ELEMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    IN: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """Return `A x` `[ROWS, RANK]` of the rows for the ranks `r`: over `IN` columns of every `STEP`, from `first` on."""
    total = tl.zeros((ROWS, RANK), dtype=tl.float32)
    # Splits interleave: a split takes every STEP-th tile, so tails spread evenly.
    for begin in range(first, n_in, STEP):
        k = begin + tl.arange(0, IN)
        x_tile = tl.load(x + row[:, None] * x_stride + k[None, :], mask=mine[:, None] & (k[None, :] < n_in), other=0.0)
        a_tile = tl.load(
            a + r[None, :].to(tl.int64) * a_rank_stride + k[:, None],
            mask=(r[None, :] < rank) & (k[:, None] < n_in),
            other=0.0,
        )
        total = product(x_tile.to(ELEMENT), a_tile, total, PRECISION)
    return total
