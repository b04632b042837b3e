"""Opens an adapter's safetensors file for vLLM's reader, without the memory that the safetensors library leaks.

`patch_safetensors`, at start, puts `open_weights` in the place of the library's function in vLLM's module for adapters.
A worker's loading thread has vLLM parse an adapter within `with_opened`, and gets the opened file too: vLLM is shown
the file's A and B, and our worker reads the tensors beside them, which vLLM would refuse.

`get_tensor` of safetensors for torch (0.8.0, built with PyO3 0.28.3) never frees the two Python integers of a tensor's
slice: 64 bytes for each tensor, for ever. Loading an adapter of 500 tensors leaks 32 kB each time. `load(bytes)` of
safetensors frees the integers, but copies the file twice, in memory and with the interpreter's lock held.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import safetensors
import torch

from lora_plugins.adapter.safetensors_header import read_header
from lora_plugins.adapter.weights import beside_of
from lora_plugins.errors import InvalidAdapter

T = TypeVar("T")

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class MappedTensors(dict[str, torch.Tensor]):
    """The part of `safetensors.safe_open` by which vLLM reads adapters; keys are in the order of the tensors' bytes.

    Tensors are windows into the file, private when written; the file stays mapped for as long as a tensor lives.

    Attributes:
        beside: the tensors beside A and B, which are no keys. directory: of the file.

    Raises:
        InvalidAdapter: not a safetensors file of floating-point tensors. OSError: the file cannot be read.
    """

    get_tensor = dict.__getitem__

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "rb") as file:
            header = read_header(file, os.fstat(file.fileno()).st_size)
            # ACCESS_COPY: vLLM multiplies scalings in place, which must never reach the file in the store.
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.beside: dict[str, torch.Tensor] = {}
        self.directory = Path(path).parent
        for info in header:
            dtype = _DTYPES[info.dtype]
            count = (info.end - info.begin) // dtype.itemsize
            tensors = self if beside_of(info) is None else self.beside
            tensors[info.name] = torch.frombuffer(mapping, dtype=dtype, count=count, offset=info.begin).view(info.shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing: the mapping ends with the last tensor."""


def open_weights(path: str | os.PathLike[str], framework: str = "pt") -> Any:
    """Open a file as `safetensors.safe_open` for torch on the CPU does, by `MappedTensors` where it reads the file.

    Raises:
        SafetensorError, OSError: as the library raises them.
    """
    try:
        tensors = MappedTensors(path)
    except InvalidAdapter:
        return safetensors.safe_open(path, framework=framework)  # names the fault, or reads a rarer dtype
    _opened.set(tensors)
    return tensors


_opened: ContextVar[MappedTensors | None] = ContextVar("opened", default=None)


def with_opened(read: Callable[[], T]) -> tuple[T, MappedTensors | None]:
    """Return what `read` returns, and the file that vLLM opens meanwhile: a path may be of the Hub, or of nothing."""
    _opened.set(None)
    try:
        return read(), _opened.get()
    finally:
        _opened.set(None)  # else the file would stay mapped


def patch_safetensors() -> None:
    """Let vLLM read adapters by `open_weights`; a second call changes nothing.

    Touches: vllm.lora.lora_model: safetensors
    Why: safetensors' get_tensor for torch leaves 64 bytes for each tensor that is read, for ever.
    Until: every supported safetensors frees the bytes (0.8.0 does not).
    """
    from vllm.lora import lora_model

    # The name in vLLM's module alone: other users of safetensors in the process keep the library's safe_open.
    lora_model.safetensors = SimpleNamespace(**{**vars(safetensors), "safe_open": open_weights})
