"""Rows of a batch grouped by slot and cut into chunks, on the device; the host never waits.

In a worker with a GPU, `Chunks.cut` runs once for each batch whose adapters change; all kernels of the batch read the
tables.

A chunk is a run of at most `size` rows of one slot, in slot order. For a batch of n rows, kernels launch programs for
as many chunks as any batch of n rows could have; programs without a chunk find 0 rows and leave. So a grid depends on
the number of rows alone, and a captured CUDA graph serves every mapping. Ideas: Punica's SGMV (arXiv:2310.18547), and
the tile tables of grouped matrix products.
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
        capacity: the chunks of the smallest size that the largest batch can have.
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
    # Chunks of each slot, the last perhaps partial. `ends`: the number of chunks up to and with the slot's.
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
