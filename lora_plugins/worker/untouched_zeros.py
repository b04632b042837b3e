"""Zeros that take no memory until they are written, for the rows of slots that are never written.

torch.zeros writes what it returns. Here it returns memory that the system has only promised: it is filled, with zeros,
page by page, when a page is first written; one that is only read takes none.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_MAP_NORESERVE = 0x4000  # of Linux; Python's mmap names it since 3.13


class UntouchedZeros(TorchFunctionMode):  # type: ignore[misc]
    """Within this, `torch.zeros` of CPU tensors is such memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if func is torch.zeros and is_on_cpu and kwargs.keys() <= {"size", "dtype", "device"}:
            shape = kwargs["size"] if "size" in kwargs else args[0] if isinstance(args[0], Sequence) else args
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            n_bytes = math.prod(shape) * dtype.itemsize
            if n_bytes:
                memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
                return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(dtype).view(tuple(shape))
        return func(*args, **kwargs)
