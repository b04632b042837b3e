"""Writes an adapter's weights in the engine's form: a single safetensors file.

`write_weights` runs in the reading process (`verification/child.py`), which maps the adapter's files and reports the
bytes written; `tensors_of` and `weights_bytes` tell the API server before how large the file will be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lora_plugins.adapter.layouts.conversion_plan import Conversion
from lora_plugins.adapter.layouts.tensors import NewTensor, Part
from lora_plugins.adapter.safetensors_header import DTYPE_BYTES, LENGTH_BYTES, TensorInfo

_PIECE_BYTES = 16 << 20


def weights_bytes(tensors: Sequence[NewTensor]) -> int:
    return LENGTH_BYTES + len(_header(tensors)) + sum(tensor.info.size_bytes for tensor in tensors)


def write_weights(
    tensors: Sequence[NewTensor], source: Callable[[str], Path], target: Path, landed: Callable[[int], None]
) -> None:
    """Write all tensors to `target`.

    Args:
        tensors: the tensors to write, in this order (`tensors_of`).
        target: the file to write.
        source: returns the path of an adapter's file, by `TensorInfo.file`.
        landed: called with the bytes that are written so far.

    Raises:
        OSError: a file cannot be read or written.
    """
    import numpy as np

    header = _header(tensors)
    files: dict[str, Any] = {}
    with target.open("wb") as file:
        file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for tensor in tensors:
            # Mapped, not read: a conversion may take a few tensors of a file of gigabytes.
            for info in tensor.sources:
                if info.file not in files:
                    files[info.file] = np.memmap(source(info.file), mode="r", dtype=np.uint8)
            arrays = [_array(files[info.file], info) for info in tensor.sources]
            data = np.ascontiguousarray(tensor.make(arrays)).reshape(-1).view(np.uint8).data
            for begin in range(0, len(data), _PIECE_BYTES):
                file.write(data[begin : begin + _PIECE_BYTES])
                file.flush()  # the caller reads landed bytes again at once
                landed(file.tell())


def tensors_of(conversion: Conversion) -> list[NewTensor]:
    """Return all tensors of the conversion, in the order of writing."""
    kept = [NewTensor(info, (info,), Part()) for info in conversion.kept]
    made = [tensor for new in conversion.made for tensor in (new.a, new.b)]
    # Larger elements first, so that each tensor begins at a multiple of its elements' size.
    return sorted([*kept, *made, *conversion.vectors], key=lambda tensor: -DTYPE_BYTES[tensor.info.dtype])


def _header(tensors: Sequence[NewTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.info.size_bytes
        info = tensor.info
        entries[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # safetensors' own alignment: the header is filled up with spaces to a multiple of 8.
    return text + b" " * (-len(text) % LENGTH_BYTES)


def _array(file: Any, info: TensorInfo) -> Any:
    """Return the bits of a tensor, as unsigned integers."""
    return file[info.begin : info.end].view(f"<u{DTYPE_BYTES[info.dtype]}").reshape(info.shape)
