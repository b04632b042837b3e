"""The slots' true ranks and vectors for Triton kernels to read: tables on the device whose addresses never change.

`operators.py` asks for a module's views once, when a worker registers its layers. From then on `SlotRanks` notifies the
tables of each write of a slot, in the thread that writes.

A captured CUDA graph sees every later change. The ranks of one slot lie together for all modules, and beside a module's
ranks whether the slot has vectors. A write of a slot copies the ranks once from a table on the host, on the current
stream, like vLLM's own copies of the weights before. So the stream orders ranks, vectors and weights alike, and the
host never waits.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_plugins.kernels.slot_ranks import SlotRanks, after_writing

_SLICES_AT_ONCE = 1024  # rows of one table; a model of 80 layers has 560 slices, in 320 modules with vectors or not


class DeviceRanks:
    """Hands out int32 `[slices + 1, slots]` views of tables on one device, and keeps the views equal to `SlotRanks`.

    The last row is 1 where the slot has vectors, or else 0.
    """

    def __init__(self) -> None:
        self._table: _RankTable | None = None

    def follow(self, ranks: SlotRanks, slots: int, device: Any) -> Any:
        """Return a module's view, with the present ranks and all later ones.

        Must not be called while a CUDA graph is captured.
        """
        rows, table = len(ranks.largest) + 1, self._table
        if table is None or table.slots != slots or table.used + rows > table.slices:
            table = self._table = _RankTable(slots, max(rows, _SLICES_AT_ONCE), device)
        first = table.used
        table.used += rows

        def numbers(slot: int) -> tuple[int, ...]:
            return (*ranks[slot], int(slot in ranks.vectors))

        for slot in range(slots):
            table.note(slot, first, numbers(slot))
        ranks.listen(lambda slot: table.put(slot, first, numbers(slot)))
        return table.view(first, rows)


def constant_ranks(largest: list[int], slots: int, device: Any) -> Any:
    """Return the largest rank everywhere, without vectors, for an unregistered module: right at any true rank.

    The ranks have memory of their own: vLLM's sleep of level 2 discards all memory from the model's loading, and only
    slots are written again.
    """
    every_slot = torch.tensor([*largest, 0], dtype=torch.int32).unsqueeze(1).expand(-1, slots)
    return every_slot.contiguous().to(device)


def follow_vectors(ranks: SlotRanks, slots: int, outputs: int, device: Any) -> Any:
    """Return float32 `[slots, 2, outputs]` on the device: g and c of the slots with vectors, now and later.

    Made before any graph is captured, as an adapter with vectors may come at any time later.
    """
    with torch.inference_mode(mode=False):
        table = torch.zeros(slots, 2, outputs, dtype=torch.float32, device=device)

    def put(slot: int) -> None:
        vectors = ranks.vectors.get(slot)
        if vectors is not None:
            table[slot, 0].copy_(vectors.g, non_blocking=True)
            table[slot, 1].copy_(vectors.c, non_blocking=True)

    for slot in range(slots):
        put(slot)
    ranks.listen(put)
    return table


class _RankTable:
    """int32 `[slots, slices]`, on the host and on the device."""

    def __init__(self, slots: int, slices: int, device: Any) -> None:
        self.slots, self.slices, self.used = slots, slices, 0
        # PyTorch refuses to write tensors of inference mode outside of inference mode.
        with torch.inference_mode(mode=False):
            self._host = torch.zeros(slots, slices, dtype=torch.int32)
            self._device = torch.zeros(slots, slices, dtype=torch.int32, device=device)
        # The first copy takes page-locked memory, which is slow to get; the first activation then finds the memory
        # cached.
        self._copy(0)

    def view(self, first: int, slices: int) -> Any:
        """Return int32 `[slices, slots]` on the device, with the present ranks of these slices."""
        columns = slice(first, first + slices)
        self._device[:, columns] = self._host[:, columns].to(self._device.device)
        return self._device[:, columns].T

    def note(self, slot: int, first: int, ranks: tuple[int, ...]) -> None:
        """Write the ranks of some slices on the host."""
        self._host[slot, first : first + len(ranks)] = torch.tensor(ranks, dtype=torch.int32)

    def put(self, slot: int, first: int, ranks: tuple[int, ...]) -> None:
        self.note(slot, first, ranks)
        after_writing((id(self), slot), lambda: self._copy(slot))

    def _copy(self, slot: int) -> None:
        row = self._host[slot]
        if self._device.is_cuda:
            # A separate copy in page-locked memory: a later `note` must not change ranks on their way to the device.
            row = row.pin_memory()
        self._device[slot].copy_(row, non_blocking=True)
