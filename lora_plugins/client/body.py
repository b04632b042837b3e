"""The body of a push: the files of a PEFT directory as parts, or a safetensors file of tensors."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

CONFIG_FILE = "adapter_config.json"
# What a server takes, and no others: of these the client has the names itself, as it may not import servers' parts.
_FILES = (CONFIG_FILE, "adapter_model.safetensors", "adapter_model.safetensors.index.json")
_SHARDS = "adapter_model-*-of-*.safetensors"
_CHAT_FILES = ("chat_template.jinja", "tokenizer_config.json", "generation_config.json", "tokenizer.json")


def parts_of(directory: Path) -> tuple[bytes, dict[str, str]]:
    """Return the body of a push of a PEFT directory, and the headers that describe the body."""
    known = filter(Path.exists, (directory / name for name in (*_FILES, *_CHAT_FILES)))
    files = [("files", (path.name, path.read_bytes())) for path in (*known, *sorted(directory.glob(_SHARDS)))]
    digest = hashlib.sha256()
    for _, (_, content) in files:
        digest.update(content)
    # No file holds a digest over itself; and the same files are the same body.
    content_type = f"multipart/form-data; boundary={digest.hexdigest()}"
    body = httpx.Request("PUT", "http://localhost", files=files, headers={"Content-Type": content_type}).read()
    return body, _headers(body, content_type)


def body_of(adapter: Any, config: Mapping[str, Any] | None) -> tuple[bytes, dict[str, str]]:
    """Return the body of a push of a PEFT directory or of tensors, and the headers that describe the body."""
    if isinstance(adapter, str | os.PathLike):
        return parts_of(Path(adapter))
    if config is None:
        raise TypeError("tensors need `config`, the content of adapter_config.json")
    metadata = {CONFIG_FILE: json.dumps(dict(config), default=_plain)}
    if all(map(_is_numpy, adapter.values())):
        import safetensors.numpy

        body = safetensors.numpy.save({name: _ordered(it) for name, it in adapter.items()}, metadata=metadata)
    else:
        import safetensors.torch

        body = safetensors.torch.save(_torch_tensors(adapter), metadata=metadata)
    return body, _headers(body, "application/octet-stream")


def _ordered(array: Any) -> Any:
    """Return the array in C's and the machine's order: safetensors writes memory as it lies."""
    import numpy as np

    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def _torch_tensors(adapter: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    tensors, written = {}, set()
    for name, given in adapter.items():
        try:
            tensor = torch.tensor(_ordered(given)) if _is_numpy(given) else given.detach().contiguous().cpu()
            # safetensors writes the memory, which a view may negate or conjugate.
            tensor = tensor.resolve_conj().resolve_neg()
            storage = tensor.untyped_storage().data_ptr()
        except RuntimeError as error:
            raise ValueError(f"tensor '{name}' has no memory here; gather or load it before a push ({error})") from None
        # safetensors refuses two names of one memory, such as tied weights.
        tensors[name] = tensor.clone() if storage in written else tensor
        written.add(storage)
    return tensors


def _is_numpy(tensor: Any) -> bool:
    return type(tensor).__module__.startswith("numpy")


def _headers(body: bytes, content_type: str) -> dict[str, str]:
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    return {"Content-Type": content_type, "Content-Digest": f"sha-256=:{digest}:"}


def _plain(value: Any) -> Any:
    # PEFT's configurations hold sets and enumerations, which JSON lacks.
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))
