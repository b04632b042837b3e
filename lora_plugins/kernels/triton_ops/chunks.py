"""Rows of a batch grouped by slot and cut into chunks, on the device; the host never waits.

A chunk is a run of at most `size` rows of one slot, in slot order. Kernels launch programs for as many chunks as a
batch of so many rows could have; programs without a chunk find 0 rows and leave. So a grid depends on the number of
rows alone, and a captured CUDA graph serves every mapping. Ideas: Punica's SGMV (arXiv:2310.18547), and the tile tables
of grouped matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lora_plugins.kernels.tuning import CHUNK_SIZES as SIZES  # neighbours differ by a factor of 2, see _cut_kernel

_CHUNKS_AT_ONCE = 64
# Chunks at once times slots, compared by a single program: a larger tile would not fit into the program's registers.
_TILE = 64 * 128


def chunks_at_most(rows: int, size: int, slots: int) -> int:
    """Return how many chunks of `size` rows a batch of `rows` rows can have: each slot may end in a partial chunk."""
    return min(rows, rows // size + slots)


class Chunks:
    """The chunks of the current batch, in buffers whose addresses never change: captured CUDA graphs read them.

    Attributes:
        order: int64 `[max_rows]`, row numbers in the order of their slots.
        table: int32 `[len(SIZES), 3, capacity]`; for each chunk its slot, its first place in `order`, its rows (or 0).
        rows: rows of the batch, as far as the host knows.
    """

    def __init__(self, max_rows: int, slots: int, device: Any) -> None:
        self.slots, self.rows = slots, 0
        self.capacity = max(1, chunks_at_most(max_rows, SIZES[0], slots))
        self.order = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.table = torch.zeros(len(SIZES), 3, self.capacity, dtype=torch.int32, device=device)
        # Old slots beyond `rows` stay: `_first_not_below` reads up to `rows` only.
        self._sorted = torch.full((max_rows,), -1, dtype=torch.int64, device=device)

    @classmethod
    def over(cls, order: Any, table: Any, slots: int, rows: int) -> Chunks:
        """Return the chunks in another object's `order` and `table`; only the other object calls `cut`."""
        chunks = cls.__new__(cls)
        chunks.slots, chunks.rows, chunks.capacity = slots, rows, table.shape[2]
        chunks.order, chunks.table = order, table
        return chunks

    def at_most(self, rows: int, size: int) -> int:
        """Return how many chunks to launch for a layer that sees the first `rows` rows.

        The chunks of these rows may lie among all other chunks, so the count follows the larger number of rows.
        """
        return chunks_at_most(max(rows, self.rows), size, self.slots) if rows else 0

    def cut(self, slot_of_row: Any) -> None:
        """Group the rows of a new batch; all data stays on the device.

        Args:
            slot_of_row: int64 `[rows]` on the device, with `rows` at most `max_rows`; negative for the base model.
        """
        rows = self.rows = int(slot_of_row.shape[0])
        if rows:
            torch.sort(slot_of_row, stable=True, out=(self._sorted[:rows], self.order[:rows]))
        slots = triton.next_power_of_2(self.slots)
        at_once = max(1, min(_CHUNKS_AT_ONCE, _TILE // slots))
        grid = (len(SIZES), triton.cdiv(self.capacity, at_once))
        _cut_kernel[grid](
            self._sorted,
            self.table,
            rows,
            self.capacity,
            SLOTS=slots,
            AT_ONCE=at_once,
            SMALLEST=SIZES[0],
            STEPS=self.order.shape[0].bit_length(),
        )

    def of_size(self, size: int) -> Any:
        """Return the table for this chunk size, int32 `[3, capacity]`."""
        return self.table[SIZES.index(size)]


@triton.jit(do_not_specialize=["rows", "capacity"])
def _cut_kernel(
    sorted_slots: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    capacity: tl.tensor,
    SLOTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SMALLEST: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """Fill one chunk size's table (program 0), `AT_ONCE` chunks of it (program 1)."""
    # Sizes double from `SMALLEST` on: a shift gives the size without a load.
    size = SMALLEST << tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    # Rows of the base model have negative slots, sort first, and lie before every `begin`.
    begin = _first_not_below(sorted_slots, slot, rows, SLOTS, STEPS)
    count = _first_not_below(sorted_slots, slot + 1, rows, SLOTS, STEPS) - begin
    full = (count + size - 1) // size
    ends = tl.cumsum(full, 0)

    chunk = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    owner = tl.sum((ends[None, :] <= chunk[:, None]).to(tl.int32), 1)
    mine = slot[None, :] == owner[:, None]  # all False beyond the last chunk
    number_in_slot = chunk - tl.sum(tl.where(mine, (ends - full)[None, :], 0), 1)
    first = tl.sum(tl.where(mine, begin[None, :], 0), 1) + number_in_slot * size
    left = tl.sum(tl.where(mine, count[None, :], 0), 1) - number_in_slot * size
    there = owner < SLOTS
    kept = chunk < capacity
    out = table + tl.program_id(0) * 3 * capacity + chunk
    # Places without a chunk get slot -1 and 0 rows: kernels read the rows first, and leave.
    tl.store(out, tl.where(there, owner, -1), mask=kept)
    tl.store(out + capacity, tl.where(there, first, 0), mask=kept)
    tl.store(out + 2 * capacity, tl.where(there, tl.minimum(left, size), 0), mask=kept)


@triton.jit
def _first_not_below(
    sorted_slots: tl.tensor, slot: tl.tensor, rows: tl.tensor, SLOTS: tl.constexpr, STEPS: tl.constexpr
) -> tl.tensor:
    """Binary search: for each slot the first place whose slot is not smaller."""
    low = tl.zeros((SLOTS,), dtype=tl.int32)
    high = tl.zeros((SLOTS,), dtype=tl.int32) + rows
    for _ in range(STEPS):
        open_ = low < high
        middle = (low + high) // 2
        below = tl.load(sorted_slots + middle, mask=open_, other=0) < slot
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    return low


# What the kernels share: rows of a chunk, products of tiles, and loads that stay vectorised.
#
# Triton widens a load only as far as Triton can prove the mask constant. A rank that is read from memory proves
# nothing, but `rank // 8 * 8` does; so a rank that is a multiple of 8 takes a path of its own.


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
