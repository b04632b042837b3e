"""Small real adapters, made of bytes: what PEFT would have saved, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lora_plugins.adapter.chat import (
    ADDED_FILE,
    GENERATION_FILE,
    SPECIAL_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    TOOLS_FILE,
    VOCABULARY_FILE,
)
from lora_plugins.adapter.config import CONFIG_FILE, ORIGINAL_CONFIG_FILE
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import ModelModules, ModuleKind, ModulePlace
from lora_plugins.adapter.weight_files import INDEX_FILE, WEIGHTS_FILE

# An adapter's files for chats.
CHAT = {
    TEMPLATE_FILE: b"{{ messages }}",
    TOOLS_FILE: b"{{ tools }}",
    TOKENIZER_FILE: b'{"eos_token": "</s>"}',
    GENERATION_FILE: b'{"eos_token_id": 2}',
    VOCABULARY_FILE: b'{"added_tokens": [{"id": 3, "content": "<a>"}], "model": {}}',
    SPECIAL_FILE: b'{"eos_token": {"content": "</s>"}}',
    ADDED_FILE: b'{"<a>": 3}',
    "chat_template.json": b'{"chat_template": "{{ messages }}"}',
    "processor_config.json": b"{}",
}
LAYER = "model.layers.{}.self_attn.{}"
PEFT = "base_model.model."


def read_name(tensor: str) -> tuple[str, bool]:
    """As vLLM reads names for a model that renames nothing; tests/vllm_patches/test_engine_modules.py compares them."""
    for end, is_a in ((".lora_A.weight", True), (".lora_B.weight", False)):
        if tensor.endswith(end):
            return tensor.removeprefix(PEFT).removesuffix(end), is_a
    for end, is_a in ((".lora_embedding_A", True), (".lora_embedding_B", False)):
        if tensor.endswith(end):
            return tensor.removeprefix(PEFT).removesuffix(end), is_a
    raise ValueError(f"{tensor} is unsupported LoRA weight")


def _places() -> dict[str, ModulePlace]:
    places = {"model.embed_tokens": ModulePlace("model.embed_tokens", ModuleKind.EMBEDDING, 32, 8)}
    for layer in range(2):
        module = LAYER.format(layer, "qkv_proj")
        for part, outputs in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4)):
            places[LAYER.format(layer, part)] = ModulePlace(module, ModuleKind.LINEAR, 8, outputs)
    return places


MODULES = ModelModules("TinyForCausalLM", "0.32.0", _places(), vocabulary=32)
BASE = BaseModel(
    path="org/tiny",
    served_names=("tiny",),
    max_rank=16,
    model=Model(MODULES, read_name),
)


def config(**changes: object) -> dict[str, object]:
    """The configuration of `weights()`; a value of `...` leaves the key out."""
    keys = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "org/tiny",
        **changes,
    }
    return {key: value for key, value in keys.items() if value is not ...}


def config_bytes(**changes: object) -> bytes:
    return json.dumps(config(**changes)).encode()


def pair(module: str, rank: int, wide: int, high: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """A `(rank, wide)` and B `(high, rank)` of one module, under PEFT's names."""
    values = np.random.default_rng(0)
    return {
        f"{PEFT}{module}.lora_A.weight": values.normal(size=(rank, wide)).astype(dtype),
        f"{PEFT}{module}.lora_B.weight": values.normal(size=(high, rank)).astype(dtype),
    }


def weights(rank: int = 4) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for layer in range(2):
        tensors |= pair(LAYER.format(layer, "q_proj"), rank, 8, 8)
        tensors |= pair(LAYER.format(layer, "v_proj"), rank, 8, 4)
    return tensors


_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "uint16": "BF16"}


def header_of(tensors: Mapping[str, np.ndarray]) -> dict[str, object]:
    """The header of a file that holds these tensors one after the other; `uint16` stands for bfloat16's bits."""
    entries: dict[str, object] = {}
    begin = 0
    for name, array in tensors.items():
        end = begin + array.nbytes
        entries[name] = {"dtype": _DTYPES[str(array.dtype)], "shape": list(array.shape), "data_offsets": [begin, end]}
        begin = end
    return entries


def with_header(header: bytes | object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    return with_header(header_of(tensors), b"".join(array.tobytes() for array in tensors.values()))


def adapter_files(tensors: Mapping[str, np.ndarray] | None = None, **changes: object) -> dict[str, bytes]:
    """File names to bytes of an adapter that `BASE` serves, with changes to its configuration."""
    return {
        CONFIG_FILE: config_bytes(**changes),
        WEIGHTS_FILE: safetensors(weights() if tensors is None else tensors),
    }


def sharded(files: Mapping[str, bytes], tensors: Mapping[str, np.ndarray] | None = None) -> dict[str, bytes]:
    """The same adapter with its weights in two files and an index, as Transformers names them."""
    tensors = weights() if tensors is None else tensors
    names = list(tensors)
    halves = {f"adapter_model-0000{half + 1}-of-00002.safetensors": names[half::2] for half in range(2)}
    index = {"metadata": {}, "weight_map": {name: file for file, its in halves.items() for name in its}}
    return {
        CONFIG_FILE: files[CONFIG_FILE],
        INDEX_FILE: json.dumps(index).encode(),
        **{file: safetensors({name: tensors[name] for name in its}) for file, its in halves.items()},
    }


def put(directory: Path, files: Mapping[str, bytes]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def content(directory: Path) -> dict[str, bytes]:
    """The files as the source has them, of an entry of the store as well."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json")
    found = {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}
    if ORIGINAL_CONFIG_FILE in found:
        found[CONFIG_FILE] = found.pop(ORIGINAL_CONFIG_FILE)
    return found
