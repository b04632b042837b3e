"""The slots' true ranks where kernels can read them: an int32 table on the device that keeps its place.

A CUDA graph that was captured with it sees every later change. A change is a fill on the current stream, like vLLM's
own copy of the weights just before it, so what orders the one orders the other, and the host never waits.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_plugins.kernels.ranks import SlotRanks

_SLICES_AT_ONCE = 256


class DeviceRanks:
    """Hands out int32 `[slices, slots]` views of a table and follows `SlotRanks`."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._block: Any = None
        self._used = 0

    def follow(self, ranks: SlotRanks, slots: int) -> Any:
        """A module's view: what is known now, and from now on whatever is written.

        Must not be called while a CUDA graph is captured.
        """
        view = self._reserve(len(ranks.largest), slots)
        for slot in range(slots):
            _put(view, slot, ranks[slot])
        ranks.listen(lambda slot: _put(view, slot, ranks[slot]))
        return view

    def constant(self, largest: list[int], slots: int) -> Any:
        """For a module that is not registered: the largest rank everywhere, which is right at any true rank.

        In memory of its own: a sleep of level 2 discards what was made while the model was loaded, and only slots are
        written again.
        """
        view = torch.empty(len(largest), slots, dtype=torch.int32, device=self._device)
        for slot in range(slots):
            _put(view, slot, tuple(largest))
        return view

    def _reserve(self, slices: int, slots: int) -> Any:
        if self._block is None or self._block.shape[1] != slots or self._used + slices > self._block.shape[0]:
            self._block = torch.zeros(max(slices, _SLICES_AT_ONCE), slots, dtype=torch.int32, device=self._device)
            self._used = 0
        view = self._block[self._used : self._used + slices]
        self._used += slices
        return view


def _put(view: Any, slot: int, ranks: tuple[int, ...]) -> None:
    if len(set(ranks)) == 1:
        view[:, slot].fill_(ranks[0])
        return
    for slice_, rank in enumerate(ranks):
        view[slice_, slot].fill_(rank)
