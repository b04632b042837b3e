"""The slots' true ranks where kernels can read them: int32 tables on the device that keep their place.

A CUDA graph that was captured with them sees every later change. The ranks of one slot lie together, those of all
modules, and are copied from a table on the host: one copy when a slot has been written, on the current stream, like
vLLM's own copies of the weights before it. So what orders the one orders the other, and the host never waits.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_plugins.kernels.ranks import SlotRanks, after_writing

_SLICES_AT_ONCE = 1024  # of one table; a model of 80 layers has 560


class DeviceRanks:
    """Hands out int32 `[slices, slots]` views of tables and follows `SlotRanks`."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._table: _Table | None = None

    def follow(self, ranks: SlotRanks, slots: int) -> Any:
        """A module's view: what is known now, and from now on whatever is written.

        Must not be called while a CUDA graph is captured.
        """
        table, first = self._reserve(len(ranks.largest), slots)
        for slot in range(slots):
            table.note(slot, first, ranks[slot])
        ranks.listen(lambda slot: table.put(slot, first, ranks[slot]))
        return table.view(first, len(ranks.largest))

    def constant(self, largest: list[int], slots: int) -> Any:
        """For a module that is not registered: the largest rank everywhere, which is right at any true rank.

        In memory of its own: a sleep of level 2 discards what was made while the model was loaded, and only slots are
        written again.
        """
        every_slot = torch.tensor(largest, dtype=torch.int32).unsqueeze(1).expand(-1, slots)
        return every_slot.contiguous().to(self._device)

    def _reserve(self, slices: int, slots: int) -> tuple[_Table, int]:
        table = self._table
        if table is None or table.slots != slots or table.used + slices > table.slices:
            table = self._table = _Table(slots, max(slices, _SLICES_AT_ONCE), self._device)
        first = table.used
        table.used += slices
        return table, first


class _Table:
    """int32 `[slots, slices]`, on the host and on the device."""

    def __init__(self, slots: int, slices: int, device: Any) -> None:
        self.slots, self.slices, self.used = slots, slices, 0
        with torch.inference_mode(mode=False):  # what is made within inference mode may not be written outside it
            self._host = torch.zeros(slots, slices, dtype=torch.int32)
            self._device = torch.zeros(slots, slices, dtype=torch.int32, device=device)
        self._copy(0)  # so that the first activation finds page-locked memory of this size, which takes long to get

    def view(self, first: int, slices: int) -> Any:
        """int32 `[slices, slots]` on the device, of these slices, as they are now known."""
        columns = slice(first, first + slices)
        self._device[:, columns] = self._host[:, columns].to(self._device.device)
        return self._device[:, columns].T

    def note(self, slot: int, first: int, ranks: tuple[int, ...]) -> None:
        """Write the ranks of some slices on the host."""
        self._host[slot, first : first + len(ranks)] = torch.tensor(ranks, dtype=torch.int32)

    def put(self, slot: int, first: int, ranks: tuple[int, ...]) -> None:
        """Note the ranks, and copy all that is known of the slot to the device."""
        self.note(slot, first, ranks)
        after_writing((id(self), slot), lambda: self._copy(slot))

    def _copy(self, slot: int) -> None:
        row = self._host[slot]
        if self._device.is_cuda:
            row = row.pin_memory()  # a copy of its own, which a later write does not change while it is on its way
        self._device[slot].copy_(row, non_blocking=True)
