"""An adapter in another form than the engine's, verified and converted, and what it then adds to a weight."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.config import CONFIG_FILE, parse_config
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.layouts.writing import tensors_of, weights_bytes, write_weights
from lora_plugins.adapter.model_modules import ModuleKind, ModulePlace
from lora_plugins.adapter.verify import VerifiedAdapter, verify_adapter
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.settings import Settings
from tests.make import BASE, LAYER, MODULES, PEFT, adapter_files, put, read_name

MLP = "model.layers.{}.mlp.{}"
PARTS = {
    MLP.format(layer, part): ModulePlace(MLP.format(layer, "gate_up_proj"), ModuleKind.LINEAR, 8, 12)
    for layer in range(2)
    for part in ("gate_proj", "up_proj")
}
FUSED = {
    LAYER.format(0, "qkv_proj"): ModulePlace(LAYER.format(0, "qkv_proj"), ModuleKind.LINEAR, 8, 16, matrices=(8, 4, 4)),
    MLP.format(0, "gate_up_proj"): ModulePlace(
        MLP.format(0, "gate_up_proj"), ModuleKind.LINEAR, 8, 24, matrices=(12, 12)
    ),
}


def base_of(places, respellings=(), **fields):
    modules = dataclasses.replace(MODULES, places=places, **fields)
    return dataclasses.replace(BASE, max_rank=None, model=Model(modules, read_name, respellings))


def convert(tmp_path: Path, tensors, base, files=None, **config) -> tuple[VerifiedAdapter, dict[str, np.ndarray], Path]:
    """The adapter verified and written in the engine's form: the tensors of the new file, read by safetensors."""
    from safetensors.numpy import load_file

    config = {"target_modules": "all-linear", **config}  # no names, which would have to be there
    original = put(tmp_path / "original", files or adapter_files(tensors, **config))
    verified = verify_adapter(original, base, Settings())
    assert verified.conversion is not None
    target = tmp_path / "converted"
    target.mkdir()
    landed: list[int] = []
    path = target / WEIGHTS_FILE

    def on_landed(size_bytes: int) -> None:
        assert path.stat().st_size >= size_bytes, "what has landed can be read"
        landed.append(size_bytes)

    write_weights(tensors_of(verified.conversion), lambda name: original / (name or WEIGHTS_FILE), path, on_landed)
    assert landed[-1] == path.stat().st_size == weights_bytes(tensors_of(verified.conversion))
    (target / CONFIG_FILE).write_bytes(canonical_bytes(verified.conversion.config))
    assert verify_adapter(target, base, Settings()).conversion is None, "the engine's form already"
    return verified, load_file(path), target


def delta(tensors, module: str, config_path: Path) -> np.ndarray:
    """What the pair adds to the module's weight, by the configuration beside it."""
    config = parse_config(config_path.read_bytes())
    from lora_plugins.adapter.patterns import PatternBudget

    rank, alpha = config.ranks()(module, PatternBudget()), config.alphas()(module, PatternBudget())
    a, b = (tensors[f"{PEFT}{module}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    assert a.shape[0] == b.shape[1] == rank
    return b @ a * config.scaling(rank, alpha)
