"""Host memory of a worker with few page faults: a single block for each adapter, and zeros that take no memory.

The loading thread copies each adapter into a `Block` (`loaded_adapter.py`). `UntouchedZeros` is active while a worker
makes its slots at start.

A tensor of safetensors is a window into the mapped file: each page of the window is a fault at the first read, and
folding the scaling in makes a private copy of each page. Tensors allocated one by one change the kernel's map of the
process hundreds of times while the engine runs. A `Block` costs few page faults, and one call to free.

torch.zeros writes the memory that it returns. `UntouchedZeros`, for rows of slots that nobody ever writes, returns
memory that the system has only promised: the system fills a page with zeros at the first write, and a page that is only
read takes no memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

# Bytes, as `packing.ALIGNMENT`: packed weights (panels) in a block begin at such addresses.
ALIGNMENT = 64
_SPARE_RATIO = 1.2  # a spare block may be larger than needed by this factor
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_NORESERVE = 0x4000  # Linux's value; Python's mmap has the name since 3.13


class Block:
    """Memory of at least `size_bytes`, handed out piece by piece; the memory lives as long as any of the pieces.

    Args:
        is_pinned: page-locked, for copies to a CUDA device that do not wait.
    """

    def __init__(self, size_bytes: int, *, is_pinned: bool = False) -> None:
        if is_pinned:
            self._memory = torch.empty(max(size_bytes, 1), dtype=torch.uint8, pin_memory=True)
        else:
            # No huge pages: gathering them takes long where a virtual machine has to get memory from its host first.
            mapping = _spare_for(size_bytes) or mmap.mmap(-1, max(size_bytes, 1), flags=_PRIVATE)
            # Each piece holds the array, and the array holds the mapping; when the last piece goes, the mapping becomes
            # spare.
            array = np.frombuffer(mapping, dtype=np.uint8)
            weakref.finalize(array, _spares.append, mapping)
            self._memory = torch.from_numpy(array)
        self._used = 0

    def acquire(self, size_bytes: int) -> torch.Tensor:
        """Return the next `size_bytes` bytes, one-dimensional and aligned."""
        piece = self._memory[self._used : self._used + size_bytes]
        self._used += room(size_bytes)
        return piece

    def copy(self, tensor: torch.Tensor, scaling: float = 1) -> torch.Tensor:
        """Return a contiguous copy of `tensor`, times `scaling`, in its dtype."""
        if tensor.numel() == 0:
            return tensor.clone()
        place = self.acquire(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
        if scaling == 1:
            return place.copy_(tensor)
        return torch.mul(tensor, scaling, out=place)


# A full host cache drops an adapter for each adapter that it loads: the next adapter gets the memory of the last, with
# its pages, and nothing is unmapped in the engine loop. A single block at most, because a spare block lies beyond the
# budget.
_spares: deque[mmap.mmap] = deque(maxlen=1)


def _spare_for(size_bytes: int) -> mmap.mmap | None:
    with contextlib.suppress(IndexError):
        mapping = _spares.pop()
        if size_bytes <= len(mapping) <= size_bytes * _SPARE_RATIO:
            return mapping
    return None


def room(size_bytes: int) -> int:
    """Return the bytes that a piece of `size_bytes` takes of a block."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def tensors_of(side: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of one side of a module's weights: a tensor, None, or a list of both."""
    for tensor in side if isinstance(side, list) else [side]:
        if tensor is not None:
            yield tensor


def bytes_of(side: Any) -> int:
    """Return the bytes that a copy of one side takes of a block."""
    return sum(room(tensor.numel() * tensor.element_size()) for tensor in tensors_of(side))


class UntouchedZeros(TorchFunctionMode):  # type: ignore[misc]
    """Makes `torch.zeros` of CPU tensors return memory without pages, within the context."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        # Other arguments (out, layout, requires_grad, pin_memory) keep torch's own zeros.
        if func is torch.zeros and is_on_cpu and kwargs.keys() <= {"size", "dtype", "device"}:
            shape = kwargs["size"] if "size" in kwargs else args[0] if isinstance(args[0], Sequence) else args
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            n_bytes = math.prod(shape) * dtype.itemsize
            if n_bytes:  # mmap refuses 0 bytes
                memory = mmap.mmap(-1, n_bytes, flags=_PRIVATE | _MAP_NORESERVE)
                return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(dtype).view(tuple(shape))
        return func(*args, **kwargs)
