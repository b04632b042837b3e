"""Compares an adapter's copies of the base model's embeddings with the base model's own files.

Runs in a thread of the API server, and on the command line, when an adapter is compared with the served model. In go
the adapter's directory and tensors and the model's path or Hub id; out comes a warning for each copy that is not known
to be the model's.

PEFT saves such copies beside A and B of an embedding or a head, and loads them again. vLLM leaves them out, so an
adapter whose copy differs is served with other embeddings than PEFT's. Copies are compared whole, number by number: a
trainer may have widened them (float32 of bfloat16), or changed a few rows only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lora_plugins.adapter.safetensors_header import DTYPE_BYTES, TensorInfo, floats_of
from lora_plugins.adapter.weight_files import WEIGHTS_FILE, open_weights
from lora_plugins.adapter.weights import Weights, is_copy_of_embeddings
from lora_plugins.errors import LoRAPluginsError

_NUMBERS = 1 << 20  # compared at once, a few megabytes


def unlike_base(directory: Path, weights: Weights | None, base: str) -> Iterator[str]:
    """Yield a warning for each copy that is not, or not known to be, what `base`, a path or a Hub id, has.

    None stands for weights that are not read, of a pickle.
    """
    for copied in filter(is_copy_of_embeddings, weights.others if weights else ()):
        how = "could not be compared with"
        with suppress(LoRAPluginsError, OSError, ValueError, KeyError):
            known = _embeddings(base)
            # A head that shares the embedding's weights has none of its own.
            path, own = known.get(copied.name.split(".")[-3]) or known["embed_tokens"]
            both = _numbers(directory / (copied.file or WEIGHTS_FILE), copied), _numbers(path, own)
            if copied.shape == own.shape and all((mine == its).all() for mine, its in zip(*both, strict=True)):
                continue
            how = "differs from"
        yield f"not used of the adapter: {copied.name}, which {how} the base model's"


def _embeddings(base: str) -> dict[str, tuple[Path, TensorInfo]]:
    """Return file and weights of modules by the last parts of their names; of a Hub id, as in the Hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    is_here = os.path.isdir(base)
    folder = os.path.abspath(base) if is_here else os.path.dirname(str(try_to_load_from_cache(base, "config.json")))
    found: dict[str, tuple[Path, TensorInfo]] = {}
    # A model that no cache has has no folder: `/` then, not the working directory, where any files may lie.
    for path in Path("/", folder).glob("*.safetensors"):
        with open_weights(path.parent, path.name) as ((_, _, tensors),):
            found |= {one.name.split(".")[-2]: (path, one) for one in tensors if one.name.endswith(".weight")}
    return found


def _numbers(path: Path, tensor: TensorInfo) -> Iterator[Any]:
    """Yield a tensor's numbers as floats, some at a time."""
    import numpy as np

    with path.open("rb") as file:  # not mapped: a disk that fails below a mapped file ends the server
        file.seek(tensor.begin)
        for left in range(math.prod(tensor.shape), 0, -_NUMBERS):
            yield floats_of(np.fromfile(file, f"<u{DTYPE_BYTES[tensor.dtype]}", min(left, _NUMBERS)), tensor.dtype)
