"""Drafts for the tiny Llama: a model, and heads of EAGLE, EAGLE-3 and MTP. Each says nothing but the `few` tokens.

The heads say the last token once more: a greedy answer of few tokens to choose from often repeats one, so some of what
they say is right. Each head has a layer of attention too, a tenth as large as the base model's first one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIRST = "model.layers.0."
Tensors = dict[str, Any]


def model(base: Path, directory: Path, few: Sequence[int]) -> Path:
    """The base model, which says only some tokens."""
    import torch

    tensors, config = _read(base)
    head = torch.zeros_like(tensors["lm_head.weight"])
    head[few] = tensors["lm_head.weight"][few]
    return _write(directory, {**tensors, "lm_head.weight": head}, config)


def eagle(base: Path, directory: Path, few: Sequence[int]) -> Path:
    """EAGLE's first form, which has the base model's embeddings and head; it is fed the last token's embedding."""
    import torch

    tensors, config = _read(base)
    layer = _layer(tensors, "layers.0.")
    del layer["layers.0.input_layernorm.weight"]
    embedded = tensors["model.embed_tokens.weight"][few]
    once_more = _to_the_head_of(few, tensors, embedded)
    layer["fc.weight"] = torch.cat([once_more, torch.zeros_like(once_more)], dim=1)
    return _write(directory, layer, {**config, "num_hidden_layers": 1})


def eagle3(base: Path, directory: Path, few: Sequence[int]) -> Path:
    """EAGLE-3, with a vocabulary of its own: `few`; it is fed what each layer of the base model gives."""
    import torch

    tensors, config = _read(base)
    layer = _layer(tensors, "midlayer.")
    size = config["hidden_size"]
    for name in (f"midlayer.self_attn.{part}_proj.weight" for part in "qkv"):
        layer[name] = torch.cat([layer[name], layer[name]], dim=1)
    layer["midlayer.hidden_norm.weight"] = torch.ones(size)
    layer["fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1)
    layer |= {"norm.weight": tensors["model.norm.weight"], "lm_head.weight": tensors["lm_head.weight"][few]}
    layer["d2t"] = torch.tensor(few) - torch.arange(len(few))
    changes = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(few)}
    layers = {"eagle_aux_hidden_state_layer_ids": list(range(1, config["num_hidden_layers"] + 1))}
    return _write(directory, layer, {**config, **changes, "eagle_config": layers})


def multi_token(base: Path, directory: Path, few: Sequence[int]) -> Path:
    """The same base model as a MiMo, which is a Qwen2 whose checkpoint has a layer more, one that drafts (MTP)."""
    import torch

    tensors, config = _read(base)
    for layer_prefix in (f"model.layers.{i}.self_attn" for i in range(config["num_hidden_layers"])):
        for part in "qkv":
            rows = len(tensors[f"{layer_prefix}.{part}_proj.weight"])
            tensors[f"{layer_prefix}.{part}_proj.bias"] = torch.full((rows,), 0.1)
    prefix = "model.mtp_layers.0."
    layer = _layer(tensors, prefix)
    embedded = tensors["model.embed_tokens.weight"][few]
    once_more = _to_the_head_of(few, tensors, torch.nn.functional.rms_norm(embedded, embedded.shape[-1:]))
    layer[f"{prefix}input_proj.weight"] = torch.cat([torch.zeros_like(once_more), once_more], dim=1)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        layer[f"{prefix}{norm}.weight"] = torch.ones(config["hidden_size"])
    changes = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    shutil.copytree(base, directory)
    return _write(directory, {**tensors, **layer}, {**config, **changes})


def _read(base: Path) -> tuple[Tensors, dict[str, Any]]:
    from safetensors.torch import load_file

    return load_file(base / "model.safetensors"), json.loads((base / "config.json").read_text())


def _layer(tensors: Tensors, prefix: str) -> Tensors:
    """A small copy of the base model's first layer; its norms are as large as they are there."""
    first = {name.removeprefix(FIRST): one for name, one in tensors.items() if name.startswith(FIRST)}
    return {f"{prefix}{name}": one * (1 if "norm" in name else 0.1) for name, one in first.items()}


def _to_the_head_of(few: Sequence[int], tensors: Tensors, embedded: Any) -> Any:
    """What makes of each token's embedding ten times the row of the head that says the token."""
    import torch

    return 10 * tensors["lm_head.weight"][few].T @ torch.linalg.pinv(embedded).T


def _write(directory: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: one.contiguous() for name, one in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    (directory / "config.json").write_text(json.dumps(config))
    return directory
