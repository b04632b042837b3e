"""Tinker's raw adapters: converted where that is exact, else refused with the conversion to run.

What they are like: tinker_cookbook/weights/_adapter.py (`_expand_expert_weights`), _merge.py
(`expand_expert_lora_tensors`) and _merge_utils.py (`build_name_remaps`) of
thinking-machines-lab/tinker-cookbook, commit 9dfcc3a2.
"""

from __future__ import annotations

import numpy as np
import pytest

from lora_plugins.adapter.model_modules import ExpertFormat, ModuleKind, ModulePlace
from tests.adapter.expert_models import BLOCK, NAMES, sizes_of, with_experts
from tests.adapter.layouts.converted import base_of, convert, delta
from tests.adapter.verdicts import refusal
from tests.make import MODULES, PEFT, pair, weights

HEAD = {"lm_head": ModulePlace("lm_head", ModuleKind.HEAD, 8, 32)}
COUNT, RANK = 3, 4
SIZES = sizes_of()


def base_with_experts(*formats):
    modules = with_experts(*formats, count=COUNT)
    return base_of(modules.places, experts=modules.experts)


def raw(*roles, count=COUNT):
    """Experts as Tinker saves them: A of w1 and w3, and B of w2, are one for all experts."""
    values = np.random.default_rng(1)
    tensors = {}
    for role in roles:
        inputs, outputs = SIZES[role]
        of_a, of_b = (count, 1) if role == "w2" else (1, count)
        tensors[f"{PEFT}{BLOCK}.{role}.lora_A.weight"] = values.normal(size=(of_a, RANK, inputs)).astype("float32")
        tensors[f"{PEFT}{BLOCK}.{role}.lora_B.weight"] = values.normal(size=(of_b, outputs, RANK)).astype("float32")
    return tensors


def test_a_head_of_tinker_becomes_lm_head(tmp_path):
    base = base_of({**MODULES.places, **HEAD})
    verified, made, _ = convert(tmp_path, weights() | pair("model.unembed_tokens", 4, 8, 32), base)
    assert verified.conversion.changes == ("Tinker's 'unembed_tokens' is now 'lm_head' (1 modules)",)
    assert made.keys() == {*weights(), *pair("lm_head", 4, 8, 32)}


def test_experts_of_tinker_become_a_pair_each(tmp_path):
    tensors = raw("w1", "w2", "w3")
    verified, made, target = convert(tmp_path, tensors, base_with_experts(ExpertFormat.PER_EXPERT))
    assert verified.conversion.changes == ("Tinker's experts split into a pair each (9 modules)",)
    for expert in range(COUNT):
        for role, name in NAMES.items():
            a, b = (tensors[f"{PEFT}{BLOCK}.{role}.lora_{side}.weight"].astype("float64") for side in "AB")
            expected = b[expert if len(b) > 1 else 0] @ a[expert if len(a) > 1 else 0] * 2
            found = delta(made, f"{BLOCK}.{expert}.{name}", target / "adapter_config.json")
            assert np.array_equal(found, expected)


def test_a_part_that_tinker_left_out_adds_nothing(tmp_path):
    _, made, target = convert(tmp_path, raw("w2"), base_with_experts(ExpertFormat.PER_EXPERT))
    assert not delta(made, f"{BLOCK}.1.gate_proj", target / "adapter_config.json").any()
    assert delta(made, f"{BLOCK}.1.down_proj", target / "adapter_config.json").any()


@pytest.mark.parametrize(
    ("tensors", "base"),
    [
        (weights() | pair("model.unembed_tokens", 4, 8, 32), base_of(MODULES.places)),
        (weights() | pair("model.unembed_tokens", 4, 8, 40), base_of({**MODULES.places, **HEAD})),
        (raw("w1", "w2", "w3"), base_with_experts(ExpertFormat.STACKED)),
        (raw("w1", "w2", "w3", count=5), base_with_experts(ExpertFormat.PER_EXPERT)),
    ],
    ids=["no head", "another vocabulary", "stacked experts", "more experts"],
)
def test_what_cannot_be_exact_is_refused_with_tinkers_own_conversion(tmp_path, tensors, base):
    error = refusal(tmp_path, tensors, base)
    assert "in Tinker's own names" in error.found
    assert "tinker_cookbook.weights.build_lora_adapter" in error.remedy
    assert "--enable-moe-shared-loras" in error.remedy
