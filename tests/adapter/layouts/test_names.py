"""Where a name lands in the engine's model."""

from __future__ import annotations

import pytest

from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.settings import Settings
from tests.adapter.layouts.converted import MLP, PARTS, base_of, convert
from tests.make import BASE, LAYER, MODULES, adapter_files, pair, put


def test_a_name_of_another_transformers_version_is_respelled(tmp_path):
    tensors = pair(LAYER.format(0, "q_proj").replace("self_attn", "attention"), 4, 8, 8)
    respell = (lambda module: module.replace(".attention.", ".self_attn."),)
    base = base_of(MODULES.places, respell)
    verified, made, _ = convert(tmp_path, tensors, base)
    assert list(made) == list(pair(LAYER.format(0, "q_proj"), 4, 8, 8))
    assert verified.conversion.changes == ("keys renamed (1 modules)",)
    with pytest.raises(IncompatibleAdapter):
        verify_adapter(tmp_path / "original", BASE, Settings())


def test_no_rule_touches_what_has_no_place(tmp_path):
    tensors = pair(MLP.format(0, "gate_up_proj"), 4, 8, 24) | pair("encoder.q_proj", 4, 8, 8)
    base = base_of({**MODULES.places, **PARTS})
    original = put(tmp_path, adapter_files(tensors))
    with pytest.raises(IncompatibleAdapter, match="1 of 3 modules that the model does not have, such as 'encoder"):
        verify_adapter(original, base, Settings())
    assert verify_adapter(original, base, Settings(unmatched="warn")).notes
