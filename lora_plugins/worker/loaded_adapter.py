"""An adapter in a worker's host memory, in the form in which its slot is written.

A worker's loading thread calls `build` for an adapter that vLLM has parsed and merged. `build` copies all tensors off
the adapter's file, into one `Block`, and returns a `LoadedAdapter`. The engine loop, or the writing thread, then calls
`LoadedAdapter.write` for each slot that the adapter gets.

Where the kernels offer a packer for a layer (`lora_plugins.kernels.packing`), `build` packs the layer's weights once,
and a slot points at the panels. Otherwise the weights are copied into the slot. Where several workers divide a layer,
`build` keeps this worker's part alone, contiguous: on CUDA the copy of a strided part goes through memory that is not
page-locked, and waits.

Source: `LoRAModel` in vllm/lora/lora_model.py and `LoRAModelManager.activate_adapter` in vllm/lora/model_manager.py,
0.32: attributes, and the look-ups of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lora_plugins.kernels.layers import watched_ranks
from lora_plugins.kernels.packing import packer_of
from lora_plugins.kernels.slot_ranks import at_once
from lora_plugins.worker.host_memory import Block, bytes_of
from lora_plugins.worker.slot_copy import part_of_worker
from lora_plugins.worker.vectors import AdapterVectors

WriteSlot = Callable[[int], None]
# Writes a slot, the last argument, with these tensors of the adapter.
SlotWrite = tuple[Callable[..., None], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that needs no file any more.

    Attributes:
        size_bytes: of all its tensors here, a part of the adapter where workers divide its layers.
        is_instant: whether `write` copies nothing but tables of trained tokens.
        writes: a function for each layer that writes the layer's slot.
        rank: the largest rank of any module.
        vectors: of modules that have any.
    """

    name: str
    size_bytes: int
    is_instant: bool
    writes: tuple[WriteSlot, ...]
    rank: int = 0
    vectors: AdapterVectors | None = None

    def settle(self) -> None:
        """Make the adapter ready for a slot, in the engine loop: in all workers of an engine in the same order."""
        if self.vectors is not None:
            self.vectors.settle()

    def write(self, slot: int) -> None:
        """Let every layer compute with this adapter where a row's slot is `slot`."""
        with at_once():
            for write in self.writes:
                write(slot)


def take_scalings(model: Any) -> dict[int, float]:
    """Take the scalings off a parsed adapter, before vLLM multiplies them in; return the scalings by the id of each B.

    vLLM's multiplication would make private copies of the mapped file's pages. A mixture of experts keeps its scalings:
    vLLM stacks the weights of experts before `build` could tell the B's apart.
    """
    if any(".experts" in name for name in model.loras):
        return {}
    scalings = {}
    for weights in model.loras.values():
        if isinstance(weights.lora_b, torch.Tensor) and isinstance(weights.scaling, float | int):
            scalings[id(weights.lora_b)] = float(weights.scaling)
            weights.scaling = 1
    return scalings


def build(
    name: str,
    manager: Any,
    model: Any,
    scalings: Mapping[int, float],
    *,
    is_pinned: bool,
    rank: int = 0,
    beside: Sequence[SlotWrite] = (),
    vectors: AdapterVectors | None = None,
) -> LoadedAdapter:
    """Copy a parsed and merged adapter off its file, into memory of our own.

    Args:
        name: the adapter's name in errors.
        manager: vLLM's `LoRAModelManager`.
        model: its `LoRAModel`.
        scalings: of `take_scalings`.
        is_pinned: whether the memory is page-locked.
        rank: the largest of any module, before merging.
        beside: writes of tables that a slot has beside A and B.
        vectors: of modules that have any.
    """
    writes: list[WriteSlot] = []
    parts: list[_Part] = []
    for module_name, module in manager.modules.items():
        weights = manager._get_lora_layer_weights(model, module_name)  # noqa: SLF001 - as vLLM looks up
        if weights is None:
            writes.append(partial(_empty, module))
        else:
            parts.append(_pair(module, weights.lora_a, weights.lora_b, scalings))
        if hasattr(module, "set_module_to_save"):
            full = manager._get_module_to_save_weights(model, module_name)  # noqa: SLF001 - as vLLM
            if full is None:
                writes.append(partial(_without_head, module))
            else:
                parts.append(_head(module, full))
    parts += [_Part(bytes_of(list(kept)), partial(_table, write, kept)) for write, kept in beside]
    # A single block for the whole adapter: freeing the adapter is one call.
    block = Block(sum(part.size_bytes for part in parts), is_pinned=is_pinned)
    writes += [part.copied_into(block) for part in parts]
    size_bytes = sum(part.size_bytes for part in parts)
    if vectors is not None:
        writes.append(vectors.write)  # last: each write of a layer's slot forgets the slot's vectors
        size_bytes += vectors.size_bytes
    is_instant = all(part.is_instant for part in parts)
    return LoadedAdapter(name, size_bytes, is_instant, tuple(writes), rank, vectors)


@dataclass(frozen=True, slots=True)
class _Part:
    """What an adapter has for one layer.

    Attributes:
        size_bytes: of the copy, in a block.
        copied_into: copies the tensors into the block, and returns the function that writes a slot with the copy.
        is_instant: whether that function copies nothing but tables of trained tokens.
    """

    size_bytes: int
    copied_into: Callable[[Block], WriteSlot]
    is_instant: bool = True


def _pair(module: Any, lora_a: Any, lora_b: Any, scalings: Mapping[int, float]) -> _Part:
    """Return A and B of a layer, packed where the layer has a packer; each B is multiplied by its scaling."""
    of_members = [scalings.get(id(b), 1.0) for b in (lora_b if isinstance(lora_b, list) else [lora_b])]
    packer = packer_of(module)
    if packer is None:
        lora_a, lora_b = part_of_worker(module, lora_a, lora_b)

        def copied_into(block: Block) -> WriteSlot:
            a, b = _copied(block, lora_a, [1.0] * len(of_members)), _copied(block, lora_b, of_members)
            return lambda slot: module.set_lora(slot, a, b)

        return _Part(bytes_of(lora_a) + bytes_of(lora_b), copied_into, is_instant=False)
    size_bytes = packer.size_bytes(lora_a, lora_b)  # the packer takes this worker's part by itself

    def packed_into(block: Block) -> WriteSlot:
        scaling = of_members if isinstance(lora_b, list) else of_members[0]
        packed = packer.pack(lora_a, lora_b, scaling, memory=block.acquire(size_bytes))
        return partial(packer.place, packed=packed)

    return _Part(size_bytes, packed_into)


def _copied(block: Block, side: Any, scalings: Sequence[float]) -> Any:
    """Return a copy of one side, times a scaling for each tensor; a `Divided` stays a `Divided`."""
    if not isinstance(side, list):
        return block.copy(side, scalings[0])
    pairs = zip(side, scalings, strict=True)
    return type(side)(None if tensor is None else block.copy(tensor, scaling) for tensor, scaling in pairs)


def _empty(module: Any, slot: int) -> None:
    ranks = watched_ranks(module)
    if ranks is None or any(ranks[slot]) or slot in ranks.vectors:  # else the slot is empty, and nothing is written
        module.reset_lora(slot)


def _head(module: Any, full: Any) -> _Part:
    """Return a whole classification head, which vLLM has beside A and B."""

    def copied_into(block: Block) -> WriteSlot:
        weight, bias = block.copy(full.weight), None if full.bias is None else block.copy(full.bias)
        return lambda slot: module.set_module_to_save(slot, weight, bias)

    return _Part(bytes_of([full.weight, full.bias]), copied_into, is_instant=False)


def _without_head(module: Any, slot: int) -> None:
    if module.full_module_enabled[slot]:
        module.reset_module_to_save(slot)


def _table(write: Callable[..., None], kept: Sequence[torch.Tensor], block: Block) -> WriteSlot:
    return partial(write, *map(block.copy, kept))
