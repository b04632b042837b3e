"""An adapter in another form than the engine's computes the same once it is converted, element by element."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.config import CONFIG_FILE, parse_config
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.layouts.writing import tensors_of, weights_bytes, write_weights
from lora_plugins.adapter.model_modules import Kind, Place
from lora_plugins.adapter.verify import VerifiedAdapter, verify_adapter
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter
from lora_plugins.settings import Settings
from tests.make import BASE, LAYER, MODULES, PEFT, adapter_files, pair, put, read_name, sharded, weights

MLP = "model.layers.{}.mlp.{}"
PARTS = {
    MLP.format(layer, part): Place(MLP.format(layer, "gate_up_proj"), Kind.LINEAR, 8, 12)
    for layer in range(2)
    for part in ("gate_proj", "up_proj")
}
FUSED = {
    LAYER.format(0, "qkv_proj"): Place(LAYER.format(0, "qkv_proj"), Kind.LINEAR, 8, 16, matrices=(8, 4, 4)),
    MLP.format(0, "gate_up_proj"): Place(MLP.format(0, "gate_up_proj"), Kind.LINEAR, 8, 24, matrices=(12, 12)),
}


def base_of(places, respellings=(), **fields):
    modules = dataclasses.replace(MODULES, places=places, **fields)
    return dataclasses.replace(BASE, max_rank=None, model=Model(modules, read_name, respellings))


def convert(tmp_path: Path, tensors, base, files=None, **config) -> tuple[VerifiedAdapter, dict[str, np.ndarray], Path]:
    """The adapter verified and written in the engine's form: the tensors of the new file, read by safetensors."""
    from safetensors.numpy import load_file

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
    assert landed[-1] == path.stat().st_size == weights_bytes(verified.conversion)
    (target / CONFIG_FILE).write_bytes(canonical_bytes(verified.conversion.config))
    assert verify_adapter(target, base, Settings()).conversion is None, "the engine's form already"
    return verified, load_file(path), target


def delta(tensors, module: str, config_path: Path) -> np.ndarray:
    """What the pair adds to the module's weight, by the configuration beside it."""
    config = parse_config(config_path.read_bytes())
    from lora_plugins.adapter.patterns import Deadline

    rank, alpha = config.ranks()(module, Deadline()), config.alphas()(module, Deadline())
    a, b = (tensors[f"{PEFT}{module}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    assert a.shape[0] == b.shape[1] == rank
    return b @ a * config.scaling(rank, alpha)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"alpha_pattern": {"layers.1.mlp.gate_up_proj": 3}}], ids=str
)
def test_a_fused_pair_is_split_into_parts(tmp_path, dtype, changes):
    fused = {}
    for layer in range(2):
        fused |= pair(MLP.format(layer, "gate_up_proj"), 4, 8, 24, dtype)
    verified, made, target = convert(tmp_path, fused, base_of({**MODULES.places, **PARTS}), **changes)
    assert verified.conversion.changes == ("gate_up_proj split into gate_proj, up_proj (4 modules)",)
    for layer in range(2):
        before = delta(fused, MLP.format(layer, "gate_up_proj"), tmp_path / "original" / CONFIG_FILE)
        after = [delta(made, MLP.format(layer, part), target / CONFIG_FILE) for part in ("gate_proj", "up_proj")]
        assert np.array_equal(before, np.concatenate(after))


@pytest.mark.parametrize("parts", [("q_proj", "k_proj", "v_proj"), ("v_proj", "q_proj"), ("k_proj",)], ids=",".join)
@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}], ids=str)
def test_parts_are_joined_into_a_fused_pair(tmp_path, parts, changes):
    sizes = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
    tensors = {}
    for part in parts:
        tensors |= pair(LAYER.format(0, part), 4, 8, sizes[part])
    verified, made, target = convert(tmp_path, tensors, base_of(FUSED), **changes)
    assert len(verified.conversion.changes) == 1
    assert verified.conversion.config.max_rank == 4 * len(parts)
    expected = [
        delta(tensors, LAYER.format(0, part), tmp_path / "original" / CONFIG_FILE)
        if part in parts
        else np.zeros((n, 8))
        for part, n in sizes.items()
    ]
    after = delta(made, LAYER.format(0, "qkv_proj"), target / CONFIG_FILE)
    assert np.allclose(np.concatenate(expected), after, rtol=1e-12, atol=0)


def test_parts_of_several_ranks_are_joined_with_one_scaling(tmp_path):
    one, other = MLP.format(0, "gate_proj"), MLP.format(0, "up_proj")
    tensors = {**pair(one, 4, 8, 12), **pair(other, 2, 8, 12)}
    config = {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"up_proj": 4}}
    verified, made, target = convert(tmp_path, tensors, base_of(FUSED), **config)
    assert verified.conversion.config.rank_pattern == {"gate_up_proj": 6}
    before = [delta(tensors, module, tmp_path / "original" / CONFIG_FILE) for module in (one, other)]
    after = delta(made, MLP.format(0, "gate_up_proj"), target / CONFIG_FILE)
    assert np.allclose(np.concatenate(before), after, rtol=1e-12, atol=0)


def test_parts_with_other_scalings_are_not_joined(tmp_path):
    tensors = {**pair(MLP.format(0, "gate_proj"), 4, 8, 12), **pair(MLP.format(0, "up_proj"), 4, 8, 12)}
    original = put(tmp_path, adapter_files(tensors, alpha_pattern={"up_proj": 5}))
    with pytest.raises(IncompatibleAdapter, match="modules that the model does not have"):
        verify_adapter(original, base_of(FUSED), Settings())


def test_a_joined_rank_above_the_slots_is_refused(tmp_path):
    tensors = pair(LAYER.format(0, "q_proj"), 4, 8, 8) | pair(LAYER.format(0, "v_proj"), 4, 8, 4)
    base = dataclasses.replace(base_of(FUSED), max_rank=7)
    with pytest.raises(IncompatibleAdapter, match="rank 8"):
        verify_adapter(put(tmp_path, adapter_files(tensors)), base, Settings())


@pytest.mark.parametrize("high", [20, 12])
def test_a_fused_pair_of_other_sizes_is_not_split(tmp_path, high):
    tensors = pair(MLP.format(0, "gate_up_proj"), 4, 8, high)
    with pytest.raises(IncompatibleAdapter, match="gate_up_proj"):
        verify_adapter(put(tmp_path, adapter_files(tensors)), base_of({**MODULES.places, **PARTS}), Settings())


def test_a_module_fused_and_in_parts_is_refused(tmp_path):
    tensors = pair(MLP.format(0, "gate_up_proj"), 4, 8, 24) | pair(MLP.format(0, "up_proj"), 4, 8, 12)
    with pytest.raises(InvalidAdapter, match="two forms of module"):
        verify_adapter(put(tmp_path, adapter_files(tensors)), base_of({**MODULES.places, **PARTS}), Settings())


def with_name(tensors, name="default"):
    ends = {f".lora_{side}.weight": f".lora_{side}.{name}.weight" for side in "AB"}
    return {key[: -len(end)] + ends[end]: value for key, value in tensors.items() for end in ends if key.endswith(end)}


@pytest.mark.parametrize("name", ["default", "my-adapter", "0"])
def test_the_adapters_name_is_taken_out_of_keys(tmp_path, name):
    tensors = pair(LAYER.format(0, "q_proj"), 4, 8, 8)
    verified, made, _ = convert(tmp_path, with_name(tensors, name), BASE)
    assert verified.conversion.changes == ("keys renamed (1 modules)",)
    assert made.keys() == tensors.keys()
    assert all(np.array_equal(made[key], tensors[key]) for key in tensors)


def test_two_adapters_in_one_file_are_refused(tmp_path):
    one, other = pair(LAYER.format(0, "q_proj"), 4, 8, 8), pair(LAYER.format(1, "q_proj"), 4, 8, 8)
    with pytest.raises(InvalidAdapter, match=r"several adapters in one file .*\(names in their keys: a, b\)"):
        verify_adapter(put(tmp_path, adapter_files(with_name(one, "a") | with_name(other, "b"))), BASE, Settings())


def test_a_name_of_another_transformers_version_is_respelled(tmp_path):
    tensors = pair(LAYER.format(0, "q_proj").replace("self_attn", "attention"), 4, 8, 8)
    respell = (lambda module: module.replace(".attention.", ".self_attn."),)
    base = base_of(MODULES.places, respell)
    verified, made, _ = convert(tmp_path, tensors, base)
    assert list(made) == list(pair(LAYER.format(0, "q_proj"), 4, 8, 8))
    assert verified.conversion.changes == ("keys renamed (1 modules)",)
    with pytest.raises(IncompatibleAdapter):
        verify_adapter(tmp_path / "original", BASE, Settings())


def test_what_lands_is_kept_beside_what_is_converted(tmp_path):
    tensors = pair(LAYER.format(0, "q_proj"), 4, 8, 8) | pair(MLP.format(1, "gate_up_proj"), 4, 8, 24)
    verified, made, _ = convert(tmp_path, tensors, base_of({**MODULES.places, **PARTS}))
    assert {key for key in made if "self_attn" in key} == {key for key in tensors if "self_attn" in key}
    assert all(np.array_equal(made[key], tensors[key]) for key in tensors if "self_attn" in key)
    assert len(verified.conversion.weights.pairs) == 3


def test_no_rule_touches_what_has_no_place(tmp_path):
    tensors = pair(MLP.format(0, "gate_up_proj"), 4, 8, 24) | pair("encoder.q_proj", 4, 8, 8)
    base = base_of({**MODULES.places, **PARTS})
    original = put(tmp_path, adapter_files(tensors))
    with pytest.raises(IncompatibleAdapter, match="1 of 3 modules that the model does not have, such as 'encoder"):
        verify_adapter(original, base, Settings())
    assert verify_adapter(original, base, Settings(unmatched="warn")).notes


def test_scalings_of_joined_parts_hold(tmp_path):
    """With rsLoRA a rank of three times needs an alpha of its root."""
    tensors = pair(LAYER.format(0, "q_proj"), 4, 8, 8) | pair(LAYER.format(0, "k_proj"), 4, 8, 4)
    verified, _, _ = convert(tmp_path, tensors, base_of(FUSED), use_rslora=True)
    config = verified.conversion.config
    assert math.isclose(config.alpha_pattern["qkv_proj"] / math.sqrt(config.rank_pattern["qkv_proj"]), 8 / math.sqrt(4))


def test_several_files_become_one(tmp_path):
    files = sharded(adapter_files())
    verified, made, target = convert(tmp_path, None, BASE, files=files)
    assert verified.conversion.changes == ("2 files of weights joined into one",)
    assert made.keys() == weights().keys()
    assert all(np.array_equal(made[name], array) for name, array in weights().items())
    assert parse_config((target / CONFIG_FILE).read_bytes()) == parse_config(files[CONFIG_FILE])
