"""What the kernels share: which chunk a program works on, and loads that stay vectorised though limits are data.

Triton widens a load only as far as it can prove that the mask is constant over it. A rank that is read from memory
proves nothing; `rank // 8 * 8` does, so a rank that is a multiple of 8 takes a path of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pointer(table: tl.tensor, index: tl.tensor, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """The address at `table[index]` (int64) as a pointer to `ELEMENT`; ALIGNED promises a multiple of 16 bytes."""
    address = tl.load(table + index).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        address = tl.multiple_of(address, 16)  # of the pointer: Triton forgets what it knew of the number
    return address


@triton.jit
def number(table: tl.tensor, index: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """The number at `table[index]` (int64); ALIGNED promises a multiple of 8."""
    value = tl.load(table + index)
    if ALIGNED:
        value = tl.multiple_of(value, 8)
    return value


@triton.jit
def load_to_rank(pointers: tl.tensor, rank_index: tl.tensor, rank: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load a tile of which `rank_index` (broadcast against it) is the contiguous axis; 0 beyond `rank` and `mask`."""
    if rank % 8 == 0:
        tile = tl.load(pointers, mask=mask & (rank_index < rank // 8 * 8), other=0.0)
    else:
        tile = tl.load(pointers, mask=mask & (rank_index < rank), other=0.0)
    return tile


@triton.jit
def product(left: tl.tensor, right: tl.tensor, total: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """`total + left @ right`; PRECISION is Triton's, or "widened" (see `packed.precision`)."""
    if PRECISION == "widened":
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total
