"""All of an adapter's copies into a slot as one table, made when the adapter is loaded: one call activates it.

Layer by layer, hundreds of small tensors cost more in calls than in copying, and PyTorch copies the short rows of B,
which lie far apart below `max_lora_rank`, through the caches. This is for slots in host memory, where the layer's
`set_lora` is ours (`slot_copy.py`), and says the same to who watches writes (`lora_plugins.kernels.layers`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_plugins.kernels.compiled.library import Block, Copy
from lora_plugins.kernels.layers import watched_ranks
from lora_plugins.worker.slot_copy import Ranks, clear, filling_sides, is_exact, ranks_of, slot_of


@dataclass(frozen=True, slots=True)
class TableLayer:
    """A layer, its stacks as they are in the table, and an adapter's weights for it as `set_lora` takes them.

    Attributes:
        set_lora: the layer object's, where it has one of its own.
        ranks: rows of A and columns of B, for each slice.
        blocks: where they come from and go to.
    """

    module: Any
    lora_a: Any
    lora_b: Any
    stacks: tuple[Any, Any]
    set_lora: Any
    ranks: Ranks
    blocks: tuple[Block, ...]


def table_layer(module: Any, lora_a: Any, lora_b: Any) -> TableLayer | None:
    """The layer's part of a table; None where only its `set_lora` can write it.

    Args:
        module: vLLM's layer.
        lora_a: as for its `set_lora`; not changed as long as the result is used.
        lora_b: likewise.
    """
    if not is_exact(module) or ("set_lora" in vars(module) and watched_ranks(module) is None):
        return None
    stacks = module.lora_a_stacked, module.lora_b_stacked
    sides = filling_sides(module, lora_a, lora_b)
    if sides is None:
        return None
    pairs = [
        (side, stack)
        for of_sides, of_stacks in zip(sides, stacks, strict=True)
        for side, stack in zip(of_sides, of_stacks, strict=True)
        if side is not None
    ]
    if not all(_is_plain(side, stack) for side, stack in pairs):
        return None
    blocks = tuple(_block(side, stack) for side, stack in pairs)
    return TableLayer(module, lora_a, lora_b, stacks, vars(module).get("set_lora"), ranks_of(sides), blocks)


def _is_unchanged(layer: TableLayer) -> bool:
    """Whether the layer has the memory that the table points at, and nobody has wrapped its `set_lora` since."""
    module = layer.module
    return (
        module.lora_a_stacked is layer.stacks[0]
        and module.lora_b_stacked is layer.stacks[1]
        and module.__dict__.get("set_lora") is layer.set_lora
    )


def _is_plain(side: Any, stack: Any) -> bool:
    return bool(
        stack.device.type == side.device.type == "cpu"
        and stack.dtype == side.dtype
        and stack.stride(3) == side.stride(1) == 1
        and side.shape[0] <= stack.shape[2]
        and side.shape[1] <= stack.shape[3]
    )


def _block(side: Any, stack: Any) -> Block:
    size = side.element_size()
    return Block(
        stack.data_ptr(), stack.stride(0) * size, stack.stride(2) * size,
        side.data_ptr(), side.stride(0) * size, side.shape[0], side.shape[1] * size,
    )  # fmt: skip


class SlotTable:
    """Writes these layers' slots at once.

    Args:
        copy: the compiled copy.
        layers: of `table_layer`.
    """

    def __init__(self, copy: Copy, layers: Sequence[TableLayer]) -> None:
        self._copy, self._layers = copy, tuple(layers)
        blocks = [block for layer in layers for block in layer.blocks]
        self._blocks = (Block * len(blocks))(*blocks)

    def write(self, index: int) -> None:
        """As each layer's `set_lora(index, ...)`; nobody reads the slot meanwhile."""
        layers = self._layers
        if not all(map(_is_unchanged, layers)):
            return self._one_by_one(index)
        slots = [slot_of(layer.module, index) for layer in layers]
        before = [slot.held for slot in slots]
        watched = [watched_ranks(layer.module) for layer in layers]
        for slot, ranks in zip(slots, watched, strict=True):
            slot.held = None  # while it is written, it may hold anything
            if ranks is not None:
                ranks.writing(index)
        self._copy(ctypes.addressof(self._blocks), len(self._blocks), index)
        for layer, slot, held, ranks in zip(layers, slots, before, watched, strict=True):
            if held != layer.ranks:
                clear(layer.module, index, layer.ranks, held)
            slot.held = layer.ranks
            if ranks is not None:
                ranks.written(index, [rank for rank, _ in layer.ranks])
        return None

    def _one_by_one(self, index: int) -> None:
        for layer in self._layers:
            layer.module.set_lora(index, layer.lora_a, layer.lora_b)
