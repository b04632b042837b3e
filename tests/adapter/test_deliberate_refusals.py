"""What vLLM's own loader takes and we refuse: the rows of a table in docs/reference/verification.md, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lora_plugins.adapter.config import CONFIG_FILE, MAX_CONFIG_BYTES
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import BaseMatch, Settings
from tests.make import BASE, LAYER, PEFT, adapter_files, config_bytes, pair, put, safetensors, weights

Q = LAYER.format(0, "q_proj")
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "verification.md"

Case = tuple[dict[str, bytes], dict[str, Any]]


def saved(tensors: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    return save(tensors)


def with_weights(data: bytes, **config: Any) -> Case:
    return {CONFIG_FILE: config_bytes(**config), WEIGHTS_FILE: data}, {}


def of(tensors: dict[str, np.ndarray], **config: Any) -> Case:
    return with_weights(safetensors(tensors), **config)


def as_torch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(dtype) for name, array in weights().items()}


def without_prefix(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(PEFT): array for name, array in tensors.items()}


def pickled(tmp_path: Path) -> Case:
    torch.save(as_torch(torch.float32), tmp_path / "pickle")
    return {CONFIG_FILE: config_bytes(), "adapter_model.bin": (tmp_path / "pickle").read_bytes()}, {}


def not_finite() -> dict[str, np.ndarray]:
    tensors = weights()
    next(iter(tensors.values()))[0, 0] = np.nan
    return tensors


CASES: dict[str, Callable[[Path], Case]] = {
    "modules": lambda _: of(weights() | pair(LAYER.format(7, "q_proj"), 4, 8, 8)),
    "lost": lambda _: of(
        {name: array for name, array in weights().items() if "layers.1.self_attn.q" not in name},
        target_modules=["q_proj", "v_proj"],
    ),
    "ranks": lambda _: of(weights(rank=4), r=8),
    "alpha": lambda _: of(weights(), lora_alpha=0),
    "kinds": lambda _: of(weights(), target_modules=5),
    "ignored": lambda _: of(weights(), arrow_config={"top_k": 1}),
    "twice": lambda _: of(weights() | without_prefix(pair(Q, 4, 8, 8))),
    "float8": lambda _: with_weights(saved(as_torch(torch.float8_e4m3fn))),
    "integers": lambda _: with_weights(saved(as_torch(torch.int64))),
    "vocabulary": lambda _: of(
        weights() | {f"{PEFT}model.embed_tokens.base_layer.weight": np.ones((40, 8), "float32")}
    ),
    "labels": lambda _: of(weights() | {f"{PEFT}score.weight": np.ones((2, 8), "float32")}, modules_to_save=["score"]),
    "values": lambda _: of(not_finite()),
    "magnitudes": lambda _: of(weights(), lora_alpha=1e30),
    "base": lambda _: (adapter_files(base_model_name_or_path="another"), {"base_match": BaseMatch.STRICT}),
    "pickle": pickled,
    "size": lambda _: (adapter_files(), {"max_adapter_bytes": 100}),
    "config-size": lambda _: of(weights(), target_modules=["x" * 1000] * (MAX_CONFIG_BYTES // 1000)),
    "patterns": lambda _: of(weights(), rank_pattern={"|".join(["(a|b|c|d|e)*x"] * 9000): 4}),
    "bounds": lambda _: of(weights(), unknown=[[]] * 1_000_001),
    "symlinks": lambda _: (adapter_files(), {}),
}


def test_the_table_has_a_row_for_each_case() -> None:
    table = DOCS.read_text().split("## Refused although")[1].split("## ")[0]
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE) == list(CASES)


def load_by_vllm(directory: Path) -> Any:
    """As vLLM's `WorkerLoRAManager._load_adapter` does for a model with the modules of `MODULES`."""
    from vllm.config import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(directory), 1024)
    helper.validate_legal(LoRAConfig(max_lora_rank=16))
    modules = {"q_proj", "k_proj", "v_proj", "embed_tokens"}
    return LoRAModel.from_local_checkpoint(
        str(directory), modules, helper, lora_model_id=1, device="cpu", dtype=torch.float32, model_vocab_size=32
    )


@pytest.mark.parametrize("row", [row for row in CASES if row != "symlinks"])
def test_vllm_loads_what_is_refused_on_purpose(tmp_path: Path, row: str) -> None:
    files, settings = CASES[row](tmp_path)
    directory = put(tmp_path / "adapter", files)
    loaded = load_by_vllm(directory)
    assert {Q, LAYER.format(1, "v_proj")} <= set(loaded.loras)
    with pytest.raises(LoRAPluginsError):
        verify_adapter(directory, BASE, Settings(**settings))


def test_vllm_reads_through_symlinks(tmp_path: Path) -> None:
    """Which we refuse is `tests/resolvers/sources/test_filesystem.py`'s to show."""
    (tmp_path / "link").symlink_to(put(tmp_path / "adapter", adapter_files()))
    assert load_by_vllm(tmp_path / "link").loras
