"""A pair of a module whose weight the engine gives a second module too is given to both (Gemma 4's values)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lora_plugins.adapter.complete import ReadPair
from lora_plugins.adapter.landing import check_pairs
from lora_plugins.adapter.model_modules import ModelModules, ModuleKind, ModulePlace
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.settings import Settings
from tests.adapter.layouts.converted import base_of, convert
from tests.make import LAYER, MODULES, PEFT, adapter_files, pair, put

SIZES = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
PLACES = {
    LAYER.format(layer, part): ModulePlace(LAYER.format(layer, "qkv_proj"), ModuleKind.LINEAR, 8, size)
    for layer in range(2)
    for part, size in SIZES.items()
}
COPIES = {LAYER.format(1, "k_proj"): LAYER.format(1, "v_proj")}
BASE = base_of(PLACES, copies=COPIES)


def tensors_of(*parts: str, layers: tuple[int, ...] = (0, 1)) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for layer in layers:
        for part in parts:
            found |= pair(LAYER.format(layer, part), 4, 8, SIZES[part])
    return found


@pytest.mark.parametrize("changes", [{}, {"alpha_pattern": {"layers.1.self_attn.k_proj": 3}}], ids=str)
def test_keys_are_given_to_values_where_the_weight_is_one(tmp_path, changes):
    tensors = tensors_of("q_proj", "k_proj")
    verified, made, _ = convert(tmp_path, tensors, BASE, **changes)
    assert verified.conversion.changes == ("pairs given as well to the module that has the same weight (1 modules)",)
    for side in "AB":
        key, value = (f"{PEFT}{LAYER.format(1, part)}.lora_{side}.weight" for part in ("k_proj", "v_proj"))
        assert np.array_equal(made[value], tensors[key])
        assert np.array_equal(made[key], tensors[key])
    assert not any(LAYER.format(0, "v_proj") in name for name in made)


def test_a_renamed_pair_is_given_to_both_too(tmp_path):
    tensors = {name.replace(PEFT, f"{PEFT}_orig_mod."): array for name, array in tensors_of("q_proj", "k_proj").items()}
    _, made, _ = convert(tmp_path, tensors, BASE)
    assert f"{PEFT}{LAYER.format(1, 'v_proj')}.lora_A.weight" in made


def test_values_of_their_own_stay(tmp_path):
    tensors = tensors_of("k_proj", "v_proj")
    original = put(tmp_path, adapter_files(tensors, target_modules="all-linear"))
    assert verify_adapter(original, BASE, Settings()).conversion is None


def test_a_worker_refuses_half_of_a_shared_weight():
    modules = dataclasses.replace(MODULES, places=PLACES, copies=COPIES)
    keys = [ReadPair(name, name, (4, 8), (4, 4), 4) for name in (LAYER.format(0, "k_proj"), LAYER.format(1, "k_proj"))]
    with pytest.raises(IncompatibleAdapter, match=r"layers\.1\.self_attn\.k_proj' and none for .*layers\.1.*v_proj"):
        check_pairs(keys, modules)
    name = LAYER.format(1, "v_proj")
    assert check_pairs([*keys, ReadPair(name, name, (4, 8), (4, 4), 4)], modules) == ()


def test_stages_of_a_pipeline_know_their_own_copies():
    first = ModelModules("Some", "0.32.0", {}, copies={"a": "b"})
    assert first.joined(ModelModules("Some", "0.32.0", {}, copies={"c": "d"})).copies == {"a": "b", "c": "d"}
