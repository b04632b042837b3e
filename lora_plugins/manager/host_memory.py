"""One block of host memory for each adapter, so that staging it costs few page faults and freeing it one call.

A tensor that safetensors hands out is a window into the mapped file: each of its pages is a fault at the first read,
folding the scaling in makes a private copy of each page, and with tensors allocated one by one the kernel's map of the
process is changed hundreds of times while the engine runs on it.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 64
_SPARE_RATIO = 1.2


def own_memory(model: Any) -> None:
    """Copy an adapter's tensors into one block, contiguous, with the scaling folded in on the way.

    `model` is vLLM's `LoRAModel` (vllm/lora/lora_model.py, 0.32) before its packed modules are merged. No page of its
    file is read later. Folding is what vLLM's `LoRALayerWeights.optimize` does, in the same dtype.
    """
    sides = [(weights, name) for weights in model.loras.values() for name in ("lora_a", "lora_b")]
    sides += [
        (full, name)
        for full in (getattr(model, "modules_to_save", None) or {}).values()
        for name in ("weight", "bias")
        if isinstance(getattr(full, name, None), torch.Tensor)
    ]
    block = _Block(sum(_room(tensor) for part, name in sides for tensor in tensors_of(getattr(part, name))))
    copies: dict[int, torch.Tensor] = {}  # what is shared stays shared
    for part, name in sides:
        side = getattr(part, name)
        scaling = getattr(part, "scaling", 1)
        fold = name == "lora_b" and isinstance(side, torch.Tensor) and isinstance(scaling, float | int)
        for tensor in tensors_of(side):
            if id(tensor) not in copies:
                copies[id(tensor)] = block.take(tensor, scaling if fold else 1)
        if fold and scaling != 1:
            part.scaling = 1
        owned = [t if t is None else copies[id(t)] for t in side] if isinstance(side, list) else copies.get(id(side))
        setattr(part, name, owned)


class _Block:
    """Memory of at least this many bytes."""

    def __init__(self, size_bytes: int) -> None:
        mapping = _spare_for(size_bytes) or _map(size_bytes)
        # The tensors hold the array, the array holds the mapping; when the last tensor goes, the mapping is spare.
        self._memory = np.frombuffer(mapping, dtype=np.uint8)
        weakref.finalize(self._memory, _spares.append, mapping)
        self._used = 0

    def take(self, tensor: torch.Tensor, scaling: float) -> torch.Tensor:
        """A copy of `tensor`, times `scaling`; the block lives as long as any of them."""
        if tensor.numel() == 0:
            return tensor.clone()
        place = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += _room(tensor)
        place = place.view(tensor.shape)
        if scaling == 1:
            return place.copy_(tensor)
        return torch.mul(tensor, scaling, out=place)


# A full host tier drops one adapter for each that it stages: the next one gets the memory of the last one, with its
# pages, and nothing is unmapped in the engine loop. One block at most, so that this much is held beyond the budget.
_spares: deque[mmap.mmap] = deque(maxlen=1)


def _spare_for(size_bytes: int) -> mmap.mmap | None:
    with contextlib.suppress(IndexError):
        mapping = _spares.pop()
        if size_bytes <= len(mapping) <= size_bytes * _SPARE_RATIO:
            return mapping
    return None


def _map(size_bytes: int) -> mmap.mmap:
    # No huge pages: gathering them takes long where a virtual machine has to get its memory from its host first.
    return mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _room(tensor: torch.Tensor) -> int:
    return -int(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def tensors_of(side: Any) -> Iterator[torch.Tensor]:
    """The tensors of one side of a module's weights, which is a tensor, None, or a list of these."""
    for tensor in side if isinstance(side, list) else [side]:
        if tensor is not None:
            yield tensor
