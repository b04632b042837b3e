"""A fused module and its parts compute the same, element by element."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter
from tests.adapter.layouts.converted import FUSED, MLP, PARTS, base_of, convert, delta
from tests.adapter.verdicts import refusal
from tests.make import LAYER, MODULES, pair


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
    says = "modules that the model does not have"
    refusal(tmp_path, tensors, base_of(FUSED), says=says, alpha_pattern={"up_proj": 5})


def test_a_joined_rank_above_the_slots_is_refused(tmp_path):
    tensors = pair(LAYER.format(0, "q_proj"), 4, 8, 8) | pair(LAYER.format(0, "v_proj"), 4, 8, 4)
    base = dataclasses.replace(base_of(FUSED), max_rank=7)
    refusal(tmp_path, tensors, base, kind=IncompatibleAdapter, says="rank 8")


@pytest.mark.parametrize(
    ("tensors", "kind", "says"),
    [
        (pair(MLP.format(0, "gate_up_proj"), 4, 8, 20), IncompatibleAdapter, "gate_up_proj"),
        (pair(MLP.format(0, "gate_up_proj"), 4, 8, 12), IncompatibleAdapter, "gate_up_proj"),
        (
            pair(MLP.format(0, "gate_up_proj"), 4, 8, 24) | pair(MLP.format(0, "up_proj"), 4, 8, 12),
            InvalidAdapter,
            "two forms of module",
        ),
    ],
    ids=["less", "half", "fused and in parts"],
)
def test_a_fused_pair_that_is_none_is_not_split(tmp_path, tensors, kind, says):
    refusal(tmp_path, tensors, base_of({**MODULES.places, **PARTS}), kind=kind, says=says)
