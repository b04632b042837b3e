"""Makes an adapter DoRA's, or IA3's, or gives it biases beside B, as PEFT saves them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.models import edit_config

_B = ".lora_B.weight"


def with_magnitudes(adapter: Path, target: Path, base: Path, seed: int = 0) -> Path:
    """A copy with magnitudes around the norms of the base model's rows; `base` has its weights in one file."""
    from safetensors.torch import load_file

    weights = load_file(base / "model.safetensors")
    prefix = "base_model.model."
    return _with(
        adapter, target, ".lora_magnitude_vector", "use_dora", seed,
        lambda module, noise: weights[f"{module.removeprefix(prefix)}.weight"].float().norm(dim=1) * (1 + noise / 2),
    )  # fmt: skip


def with_biases(adapter: Path, target: Path, seed: int = 0) -> Path:
    """A copy with a random bias beside each B."""
    return _with(adapter, target, ".lora_B.bias", "lora_bias", seed, lambda _, noise: noise / 4)


def with_factors(adapter: Path, target: Path, base: Path, seed: int = 0) -> Path:
    """An adapter of PEFT's IA3 for its own targets in a Llama, in the place of A and B."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(adapter, target)
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        if leaf in ("k_proj", "v_proj", "down_proj"):
            outputs, inputs = weight.shape
            shape = (1, inputs) if leaf == "down_proj" else (outputs, 1)
            factors[f"base_model.model.{module}.ia3_l"] = 1 + torch.randn(shape, generator=generator)
    save_file(factors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    keys = {"peft_type": "IA3", "task_type": "CAUSAL_LM", "target_modules": ["k_proj", "v_proj", "down_proj"]}
    config = json.loads((adapter / "adapter_config.json").read_text())
    keys |= {"feedforward_modules": ["down_proj"], "base_model_name_or_path": config["base_model_name_or_path"]}
    (target / "adapter_config.json").write_text(json.dumps(keys))
    return target


def _with(adapter: Path, target: Path, end: str, key: str, seed: int, vector_of: Callable[[str, Any], Any]) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(adapter, target)
    generator, file = torch.Generator().manual_seed(seed), target / "adapter_model.safetensors"
    tensors = load_file(file)
    vectors = {
        name.removesuffix(_B) + end: vector_of(name.removesuffix(_B), torch.randn(len(b), generator=generator))
        for name, b in tensors.items()
        if name.endswith(_B)
    }
    save_file(tensors | vectors, file, metadata={"format": "pt"})
    edit_config(target, **{key: True})
    return target
