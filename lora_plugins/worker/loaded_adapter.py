"""An adapter in a worker's host memory, in the form in which its slot is written.

Source: `LoRAModel` in vllm/lora/lora_model.py and `LoRAModelManager.activate_adapter` in vllm/lora/model_manager.py,
0.32: attributes, and the look-ups of weights. Where the kernels offer a packer for a layer
(`lora_plugins.kernels.packing`), `build` packs the layer's weights once, and a slot points at the panels. Otherwise the
weights are copied into the slot. Where several workers divide a layer, `build` keeps this worker's part alone,
contiguous: on CUDA the copy of a strided part goes through memory that is not page-locked, and waits.
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
from lora_plugins.worker.host_memory import Block, bytes_of, room
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
        packers: of the layers that may point at the adapter's memory.
        rank: the largest rank of any module.
        vectors: of modules that have any.
    """

    name: str
    path: str
    size_bytes: int
    is_instant: bool
    writes: tuple[WriteSlot, ...]
    packers: tuple[Any, ...] = ()
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

    def leave(self, slot: int) -> None:
        """Let the slot point at no memory of this adapter."""
        for packer in self.packers:
            packer.place(slot, None)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of the model, and an adapter's weights; `scalings` are still to be multiplied into each B."""

    module: Any
    lora_a: Any
    lora_b: Any
    scalings: list[float]

    @property
    def size_bytes(self) -> int:
        """Bytes of a block that the weights take, packed or copied."""
        packer = packer_of(self.module)
        if packer is not None:
            return packer.size_bytes(self.lora_a, self.lora_b)
        return room(bytes_of(self.lora_a) + bytes_of(self.lora_b))


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


def rank_of(model: Any) -> int:
    """Return the largest rank of any module of a parsed adapter; vLLM's merging of modules drops some modules."""
    return max((int(weights.rank) for weights in model.loras.values()), default=0)


def build(
    name: str,
    path: str,
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
        path: the directory that the adapter was read from.
        manager: vLLM's `LoRAModelManager`.
        model: its `LoRAModel`.
        scalings: of `take_scalings`.
        is_pinned: whether the memory is page-locked.
        rank: of `rank_of`.
        beside: writes of tables that a slot has beside A and B.
        vectors: of modules that have any.
    """
    layers: list[_Layer] = []
    writes: list[WriteSlot] = []
    heads: list[tuple[Any, Any]] = []
    for module_name, module in manager.modules.items():
        if hasattr(module, "set_module_to_save"):
            heads.append((module, manager._get_module_to_save_weights(model, module_name)))  # noqa: SLF001 - as vLLM
        weights = manager._get_lora_layer_weights(model, module_name)  # noqa: SLF001 - as vLLM looks up
        if weights is None:
            writes.append(partial(_empty, module))
            continue
        of_slices = weights.lora_b if isinstance(weights.lora_b, list) else [weights.lora_b]
        sides = weights.lora_a, weights.lora_b
        if packer_of(module) is None:  # a packer divides by itself
            sides = part_of_worker(module, *sides)
        layers.append(_Layer(module, *sides, [scalings.get(id(b), 1.0) for b in of_slices]))
    sizes = [layer.size_bytes for layer in layers]
    tensors = [t for _, full in heads if full is not None for t in (full.weight, full.bias) if t is not None]
    # A single block for the whole adapter: freeing the adapter is one call.
    tensors += [tensor for _, kept in beside for tensor in kept]
    block = Block(sum(sizes) + bytes_of(tensors), is_pinned=is_pinned)
    is_instant = all(full is None for _, full in heads) and all(packer_of(layer.module) for layer in layers)
    for layer, size_bytes in zip(layers, sizes, strict=True):
        packer = packer_of(layer.module)
        if packer is not None:
            scaling = layer.scalings if isinstance(layer.lora_b, list) else layer.scalings[0]
            packed = packer.pack(layer.lora_a, layer.lora_b, scaling, memory=block.acquire(size_bytes))
            writes.append(partial(packer.place, packed=packed))
        else:
            writes.append(partial(_set_lora, layer.module, *_copied_sides(layer, block)))
    writes.extend(_head(module, full, block) for module, full in heads)
    writes.extend(partial(write, *(block.copy(tensor) for tensor in kept)) for write, kept in beside)
    if vectors is not None:
        writes.append(vectors.write)  # last: each write of a layer's slot forgets the slot's vectors
    packers = tuple(packer for module in manager.modules.values() if (packer := packer_of(module)) is not None)
    size_bytes = sum(sizes) + bytes_of(tensors) + (0 if vectors is None else vectors.size_bytes)
    return LoadedAdapter(name, path, size_bytes, is_instant, tuple(writes), packers, rank, vectors)


def _empty(module: Any, slot: int) -> None:
    ranks = watched_ranks(module)
    if ranks is None or any(ranks[slot]) or slot in ranks.vectors:  # else the slot is empty, and nothing is written
        module.reset_lora(slot)


def _copied_sides(layer: _Layer, block: Block) -> tuple[Any, Any]:
    if not isinstance(layer.lora_b, list):
        return block.copy(layer.lora_a), block.copy(layer.lora_b, layer.scalings[0])
    lora_b = (_copied(block, b, scaling) for b, scaling in zip(layer.lora_b, layer.scalings, strict=True))
    # `Divided` stays `Divided`.
    return type(layer.lora_a)(_copied(block, a) for a in layer.lora_a), type(layer.lora_b)(lora_b)


def _set_lora(module: Any, lora_a: Any, lora_b: Any, slot: int) -> None:
    module.set_lora(slot, lora_a, lora_b)


def _copied(block: Block, tensor: torch.Tensor | None, scaling: float = 1) -> torch.Tensor | None:
    return None if tensor is None else block.copy(tensor, scaling)


def _head(module: Any, full: Any, block: Block) -> WriteSlot:
    if full is None:
        return lambda slot: module.reset_module_to_save(slot) if module.full_module_enabled[slot] else None
    weight, bias = block.copy(full.weight), None if full.bias is None else block.copy(full.bias)
    return lambda slot: module.set_module_to_save(slot, weight, bias)
