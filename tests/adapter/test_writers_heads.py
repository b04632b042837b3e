"""A classifier's head is compared with the engine's before an engine sees it: whether it has one, labels, features."""

from __future__ import annotations

import numpy as np
import pytest

from lora_plugins.adapter.model_modules import ModuleKind, ModulePlace
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.settings import Settings
from tests.adapter.layouts.converted import base_of
from tests.adapter.verdicts import refusal
from tests.make import MODULES, PEFT, adapter_files, put, weights


def classifier(name="score", **fields):
    return base_of({**MODULES.places, name: ModulePlace(name, ModuleKind.CLASSIFIER, 8, 3, **fields)})


def with_head(*shape, bias=None):
    head = {f"{PEFT}score.weight": np.ones(shape, "float32")}
    if bias is not None:
        head[f"{PEFT}score.bias"] = np.ones(bias, "float32")
    return adapter_files(weights() | head, modules_to_save=["classifier", "score"])


@pytest.mark.parametrize("bias", [None, 3])
def test_a_head_like_the_engines_is_served(tmp_path, bias):
    assert verify_adapter(put(tmp_path, with_head(3, 8, bias=bias)), classifier(), Settings()).weights.others


@pytest.mark.parametrize(
    ("shape", "bias", "found", "expected"),
    [
        ((4, 8), None, "4 labels and 8 features", "3 labels and 8 features"),
        ((2, 8), None, "2 labels and 8 features", "3 labels and 8 features"),
        ((3, 16), None, "3 labels and 16 features", "3 labels and 8 features"),
        ((3, 8), 2, "'base_model.model.score.bias' of 2 labels", "3 labels"),
        ((3,), None, "3 labels", "3 labels and 8 features"),
    ],
    ids=["more labels", "fewer labels", "another size", "a bias of fewer labels", "one dimension"],
)
def test_a_head_of_other_sizes_is_refused(tmp_path, shape, bias, found, expected):
    error = refusal(tmp_path, with_head(*shape, bias=bias), classifier())
    assert found in error.found
    assert error.expected == expected
    assert "--max-lora-cls-labels" in error.remedy


def test_other_numbers_of_labels_may_be_left_to_the_engine(tmp_path):
    """With `--max-lora-cls-labels`, vLLM 0.32 answers each adapter with its own labels (lora/layers/classifier.py)."""
    base = classifier(max_out_features=True)
    assert verify_adapter(put(tmp_path, with_head(2, 8)), base, Settings())
    refusal(tmp_path, with_head(2, 16), base, says="16 features")


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (base_of(MODULES.places), "TinyForCausalLM, which has no classifier's head"),
        (classifier("classifier"), "TinyForCausalLM, whose head is 'classifier'"),
    ],
    ids=["a generating server", "a head of another name"],
)
def test_a_classifiers_adapter_needs_a_classifier(tmp_path, base, expected):
    error = refusal(tmp_path, with_head(3, 8), base)
    assert "a classifier's head 'base_model.model.score.weight' of 3 labels" in error.found
    assert expected in error.expected
