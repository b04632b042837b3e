"""Recognises adapters that another program than PEFT wrote, by names of files, tensors and keys, or by first bytes.

A table (`WRITERS`) and pure functions over it, called wherever an adapter is found, read or refused: the answer turns
"no such tensor" into an error that names the program and the conversion to run. Names of PyTorch's wrappers, such as
`_orig_mod` of torch.compile, are here too.

Source of the rows: mlx_lm/tuner/lora.py of mlx-lm (200af25d); finetune/checkpointing.py of mistral-finetune (20704b22);
`tune_to_peft_adapter_weights` in torchtune/models/convert_weights.py; tinker_cookbook/weights/_adapter.py and
_merge_utils.py of tinker-cookbook (9dfcc3a2); `save_lora_checkpoint` in litgpt/finetune/lora.py, 0.5.13;
`save_fsdp_model` in accelerate/utils/fsdp_utils.py, 1.15; the specifications of GGUF and of Git LFS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter

# Parts that PyTorch's wrappers put into the names of wrapped modules.
WRAPPERS: Mapping[str, str] = {
    "_orig_mod": "torch.compile",
    "_checkpoint_wrapped_module": "checkpoint_wrapper",
    "_fsdp_wrapped_module": "FSDP",
    "module": "DistributedDataParallel or DeepSpeed",
}

# mergekit/scripts/extract_lora.py, 0.1.5: without the options, norms and embeddings are saved whole.
FROM_MERGEKIT = "if mergekit-extract-lora made it, extract it again with --embed-lora --skip-undecomposable"

# `param.data` of a partitioned parameter is empty (deepspeed/runtime/zero/partition_parameters.py); FSDP's is flat.
NOT_GATHERED = "gather it before saving (ZeRO-3: stage3_gather_16bit_weights_on_model_save; FSDP: FULL_STATE_DICT)"

# Where a program that keeps a folder for each adapter of a model has PEFT's configuration of the first.
DEFAULT = "default/adapter_config.json"


@dataclass(frozen=True, slots=True)
class Writer:
    """A program or a format whose files vLLM does not read.

    Attributes:
        name: in words, for errors.
        remedy: the conversion to run, or another remedy.
        files: a pattern of names of files or folders that only this writer makes.
        keys: a pattern within names of tensors.
        config_keys: keys of `adapter_config.json` that only this writer makes.
        magic: the first bytes of the writer's files; at most eight, as many as are read of a safetensors file first.
    """

    name: str
    remedy: str
    files: str = ""
    keys: str = ""
    config_keys: frozenset[str] = frozenset()
    magic: tuple[bytes, ...] = ()


WRITERS = (
    Writer(
        "Tinker's own names",
        "convert it with tinker_cookbook.weights.build_lora_adapter(base_model=..., adapter_path=..., "
        "output_path=...); experts alone are also served with --enable-moe-shared-loras",
        keys=r"(^|\.)unembed_tokens\.|\.experts\.w[123]\.lora_[AB]\.weight$",
    ),
    Writer(
        "Megatron-Bridge's experts of three dimensions",
        "serve it with the base model that it was trained on; where all experts share a side "
        "(experts_shared_outer_loras), the engine must take a pair for each expert",
        keys=r"\.experts\.(gate_up_proj|down_proj)\.lora_[AB]\.weight$",
    ),
    Writer(
        "a tower or connector of a multimodal model, as Unsloth trains by default",
        "serve it with the base model that it was trained on and --enable-tower-connector-lora, or train it without "
        "(finetune_vision_layers=False)",
        keys=r"(^|\.)(vision_tower|audio_tower|vision_model|visual|embed_vision|embed_audio)\..+\.weight$",
    ),
    Writer(
        "MLX's form (mlx-lm)",
        "merge it into its model with mlx_lm.fuse and serve that, or write PEFT's form: lora_A and lora_B are lora_a "
        "and lora_b transposed, r is rank, lora_alpha is scale * rank",
        files=r"(\d+_)?adapters\.(safetensors|npz)",
        keys=r"\.lora_[ab]$",
        config_keys=frozenset({"lora_parameters", "fine_tune_type"}),
    ),
    Writer(
        "mistral-finetune's form",
        "merge it with mistral-finetune's utils/merge_lora.py and serve that model; its queries and keys are in "
        "another order than PEFT's, so renaming alone is wrong",
        files=r"lora\.safetensors",
        keys=r"(^|\.)layers\.\d+\.(attention\.w[qkvo]|feed_forward\.w[123])\.lora_[AB]\.weight$",
    ),
    Writer(
        "torchtune's form",
        "save it with torchtune's FullModelHFCheckpointer, which writes PEFT's adapter_model.safetensors and "
        "adapter_config.json beside its own adapter_0.pt",
        files=r"adapter_\d+\.pt",
        keys=r"\.lora_[ab]\.weight$",
    ),
    Writer(
        "LitGPT's form",
        "merge it with 'litgpt merge_lora', write the model with 'litgpt convert_from_litgpt', and serve that; its "
        "queries, keys and values are one tensor",
        files=r"lit_model\.pth\.lora",
        keys=r"(^|\.)transformer\.h\.\d+\..+\.lora_[AB](\.weight)?$",
    ),
    Writer(
        "xtuner's checkpoints",
        "convert it with 'xtuner convert pth_to_hf', which writes PEFT's form",
        files=r"(iter|epoch)_\d+\.pth",
    ),
    Writer(
        "shards of FSDP (accelerate)",
        "save it with fsdp_state_dict_type FULL_STATE_DICT, or join the shards with 'accelerate merge-weights' and "
        "save the adapter with PEFT",
        files=r"pytorch_model_fsdp(_\d+)?",
    ),
    Writer(
        "a form with a folder for each adapter (ms-swift)",
        "ask for the name with '/default' behind it, or copy the files one folder up",
        files=re.escape(DEFAULT),
    ),
    Writer(
        "GGUF",
        "serve the adapter that llama.cpp's convert_lora_to_gguf.py has made it of; vLLM reads PEFT's form only",
        files=r".+\.gguf",
        magic=(b"GGUF",),
    ),
    Writer(
        "a Git LFS pointer in place of the file",
        "run 'git lfs pull' where it was cloned, and copy the file again",
        magic=(b"version ",),
    ),
    Writer(
        "a file of torch.save under another name",
        "save it with safetensors; renaming does not convert it",
        magic=(b"PK\x03\x04",),
    ),
    Writer(
        "a web page in place of the file",
        "download the file itself, with the rights that it needs",
        magic=(b"<!DOCTYP", b"<!doctyp", b"<html"),
    ),
)


def by_keys(names: Iterable[str]) -> Writer | None:
    """Return the writer of the first tensor whose name fits a writer's pattern."""
    patterns = [(one, re.compile(one.keys)) for one in WRITERS if one.keys]
    return next((one for name in names for one, pattern in patterns if pattern.search(name)), None)


def by_files(names: Iterable[str]) -> tuple[str, Writer] | None:
    """Return a file that only one writer makes, and the writer."""
    return next(
        ((name, one) for name in sorted(names) for one in WRITERS if one.files and re.fullmatch(one.files, name)), None
    )


def foreign_bytes(begin: bytes) -> InvalidAdapter | None:
    """Return the error for a file that begins with these bytes; None where the writer is unknown."""
    writer = next((one for one in WRITERS if one.magic and begin.startswith(one.magic)), None)
    if writer is None:
        return None
    return InvalidAdapter(writer.name, expected="a file of PEFT's form", remedy=writer.remedy)


def foreign_config(raw: Mapping[str, Any]) -> IncompatibleAdapter | None:
    """Return the error for a configuration of another program than PEFT; None where PEFT may be the writer."""
    # PEFT always writes `r`: a file with `r` is PEFT's, whatever else the file has.
    writer = next((one for one in WRITERS if "r" not in raw and one.config_keys.intersection(raw)), None)
    if writer is None:
        return None
    keys = ", ".join(sorted(writer.config_keys.intersection(raw)))
    return IncompatibleAdapter(
        f"{writer.name}, by the keys {keys}", expected="PEFT's form, with r and lora_alpha", remedy=writer.remedy
    )


def foreign_key(name: str) -> IncompatibleAdapter | None:
    """Return the error for a tensor that another program than PEFT named; None where PEFT may be the writer."""
    writer = by_keys([name])
    if writer is None:
        return None
    return IncompatibleAdapter(
        f"{writer.name}, by tensor '{name}'",
        expected="PEFT's form, with tensors named <module>.lora_A.weight and .lora_B.weight",
        remedy=writer.remedy,
    )


def name_format(error: AdapterNotFound, files: Iterable[str]) -> None:
    """Add to an error for a missing file the writer of the present files, where their names show the writer."""
    found = by_files(files)
    if found is not None:
        name, writer = found
        error.found += f", but '{name}', which is of {writer.name}"
        error.remedy = writer.remedy


def wrappers_in(modules: Iterable[str]) -> list[str]:
    """Return the names of wrappers that occur in names of modules."""
    parts = {part for module in modules for part in module.split(".")}
    return [name for name in WRAPPERS if name in parts]


def unwrapped(module: str) -> str:
    """Return a module's name without the names of wrappers, and without PEFT's own prefix behind."""
    name = ".".join(part for part in module.split(".") if part not in WRAPPERS)
    while name.startswith("base_model.model."):
        name = name.removeprefix("base_model.model.")
    return name


def in_words(wrappers: Iterable[str]) -> str:
    """Return wrappers for an error, each with the program that puts the wrapper's name into names of modules."""
    return ", ".join(f"'{name}.' of {WRAPPERS[name]}" for name in wrappers)
