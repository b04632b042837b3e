"""The weights that are written in the engine's form."""

from __future__ import annotations

import numpy as np

from lora_plugins.adapter.config import CONFIG_FILE, parse_config
from tests.adapter.layouts.converted import MLP, PARTS, base_of, convert
from tests.make import BASE, LAYER, MODULES, adapter_files, pair, sharded, weights


def test_what_lands_is_kept_beside_what_is_converted(tmp_path):
    tensors = pair(LAYER.format(0, "q_proj"), 4, 8, 8) | pair(MLP.format(1, "gate_up_proj"), 4, 8, 24)
    verified, made, _ = convert(tmp_path, tensors, base_of({**MODULES.places, **PARTS}))
    assert {key for key in made if "self_attn" in key} == {key for key in tensors if "self_attn" in key}
    assert all(np.array_equal(made[key], tensors[key]) for key in tensors if "self_attn" in key)
    assert len(verified.conversion.weights.pairs) == 3


def test_several_files_become_one(tmp_path):
    files = sharded(adapter_files())
    verified, made, target = convert(tmp_path, None, BASE, files=files)
    assert verified.conversion.changes == ("2 files of weights joined into one",)
    assert made.keys() == weights().keys()
    assert all(np.array_equal(made[name], array) for name, array in weights().items())
    assert parse_config((target / CONFIG_FILE).read_bytes()) == parse_config(files[CONFIG_FILE])
