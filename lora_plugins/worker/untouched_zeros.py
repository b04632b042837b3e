"""Zeros that take no memory until they are written, for rows of slots that nobody ever writes.

torch.zeros writes the memory that it returns. `UntouchedZeros` returns memory that the system has only promised: the
system fills a page with zeros at the first write, and a page that is only read takes no memory.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_MAP_NORESERVE = 0x4000  # Linux's value; Python's mmap has the name since 3.13


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
            if n_bytes:
                memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
                return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(dtype).view(tuple(shape))
        return func(*args, **kwargs)
