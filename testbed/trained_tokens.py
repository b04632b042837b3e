"""Gives an adapter trained tokens, as PEFT saves them: rows in the place of those of the embedding and of the head."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.models import edit_config

NAME = "base_model.model.{}.token_adapter.trainable_tokens_delta"


def train_tokens(adapter: Path, ids: Mapping[str, Sequence[int]], features: int, seed: int = 0) -> Path:
    """Add random rows of these tokens to an adapter; `ids` by the whole name of the embedding or the head."""
    import torch
    from safetensors.torch import load_file, save_file

    generator, file = torch.Generator().manual_seed(seed), adapter / "adapter_model.safetensors"
    rows = {
        NAME.format(module): 0.3 * torch.randn(len(of), features, generator=generator) for module, of in ids.items()
    }
    save_file(load_file(file) | rows, file, metadata={"format": "pt"})
    edit_config(adapter, trainable_token_indices={module: list(of) for module, of in ids.items()})
    return adapter


def with_tokens(adapter: Path, target: Path, ids: Mapping[str, Sequence[int]], features: int, seed: int = 0) -> Path:
    """A copy of an adapter, with trained tokens."""
    shutil.copytree(adapter, target)
    return train_tokens(target, ids, features, seed)
