"""The body of a push: a tar archive of a PEFT directory, or a safetensors file of tensors.

Runs in the process of a trainer, or of `lora-plugins push`. Out: the bytes, and the headers that describe the bytes;
`api/push_forms.py` takes the body apart in the server.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "chat_template.json")
_TOKENS = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json")
_CHAT_FILES = (*_TEMPLATES, *_TOKENS, "generation_config.json", "processor_config.json")


def archive_of(directory: Path) -> tuple[bytes, dict[str, str]]:
    """Return the body of a push of a PEFT directory, and the headers that describe the body."""
    archive = io.BytesIO()
    # A snapshot of the Hub's cache has links instead of files, and servers refuse links.
    with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
        chat = (directory / name for name in _CHAT_FILES)
        for path in [*sorted(directory.glob("adapter_*")), *filter(Path.exists, chat)]:
            tar.add(path, path.relative_to(directory).as_posix())
    return archive.getvalue(), _headers(archive.getvalue(), "application/x-tar")


def body_of(adapter: Any, config: Mapping[str, Any] | None) -> tuple[bytes, dict[str, str]]:
    """Return the body of a push of a PEFT directory or of tensors, and the headers that describe the body."""
    if isinstance(adapter, str | os.PathLike):
        return archive_of(Path(adapter))
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
