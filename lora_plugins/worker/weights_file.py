"""Reading an adapter's safetensors file without what the safetensors library leaves behind at each read.

Its `get_tensor` for torch (0.8.0, built with PyO3 0.28.3) never frees the two Python integers of the slice that it cuts
a tensor out by: 64 bytes for each tensor, for ever. An adapter of 500 tensors costs 32 kB each time that it is loaded.
Its `load(bytes)` frees them, but copies the file twice, in memory and with the interpreter's lock held.
"""

from __future__ import annotations

import mmap
import os
from types import SimpleNamespace
from typing import Any, Self

import safetensors
import torch

from lora_plugins.adapter.safetensors_header import read_header
from lora_plugins.errors import InvalidAdapter
from lora_plugins.ledger import Patch

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class MappedTensors(dict[str, torch.Tensor]):
    """The part of `safetensors.safe_open` that vLLM reads adapters by; keys are in the order of the tensors' bytes.

    Tensors are windows into the file, private when written, and keep it mapped for as long as one of them lives.

    Raises:
        InvalidAdapter: not a safetensors file of floating-point tensors. OSError: it cannot be read.
    """

    get_tensor = dict.__getitem__

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "rb") as file:
            header = read_header(file, os.fstat(file.fileno()).st_size)
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for info in header:
            dtype = _DTYPES[info.dtype]
            count = (info.end - info.begin) // dtype.itemsize
            self[info.name] = torch.frombuffer(mapping, dtype=dtype, count=count, offset=info.begin).view(info.shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The mapping goes with the last tensor."""


def open_weights(path: str | os.PathLike[str], framework: str = "pt") -> Any:
    """`safetensors.safe_open`, for torch on the CPU, by `MappedTensors` where these know the file.

    Raises:
        SafetensorError, OSError: as the library raises them.
    """
    try:
        return MappedTensors(path)
    except InvalidAdapter:
        return safetensors.safe_open(path, framework=framework)  # says what is wrong, or knows a rarer dtype


def patch_safetensors() -> None:
    """Have vLLM read adapters by `open_weights`; a second call changes nothing."""
    from vllm.lora import lora_model

    lora_model.safetensors = SimpleNamespace(**{**vars(safetensors), "safe_open": open_weights})


LEDGER = (
    Patch(
        "vllm.lora.lora_model: safetensors",
        what="replaced in this module by one whose safe_open is `open_weights`",
        why="safetensors' get_tensor for torch leaves 64 bytes for each tensor that is read, for ever",
        remove="every supported safetensors frees them (0.8.0 does not)",
    ),
)
