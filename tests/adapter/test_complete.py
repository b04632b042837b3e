"""An adapter has tensors for all that its own `target_modules` names and the model has, or is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from lora_plugins.adapter.complete import lost_modules
from lora_plugins.adapter.config import AdapterConfig, parse_config
from lora_plugins.adapter.model_modules import ModelModules, ModuleKind, ModulePlace
from tests.make import config_bytes

LAYERS = range(3)
PARTS = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "o_proj": "o_proj"}
ATTENTION = {
    f"model.layers.{layer}.self_attn.{part}": ModulePlace(f"model.layers.{layer}.self_attn.{module}")
    for layer in LAYERS
    for part, module in PARTS.items()
}
PLACES = {
    **ATTENTION,
    **{f"model.layers.{layer}.mlp.experts.0.down_proj": ModulePlace("experts", ModuleKind.EXPERTS) for layer in LAYERS},
    **{f"vision.layers.{layer}.self_attn.q_proj": ModulePlace(f"vision.layers.{layer}.qkv") for layer in LAYERS},
    "model.embed_tokens": ModulePlace("model.embed_tokens", ModuleKind.EMBEDDING),
    "lm_head": ModulePlace("lm_head", ModuleKind.HEAD),
}
MODEL = ModelModules("Some", "0.32.0", PLACES)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "lm_head"]
WHOLE = {*ATTENTION, "lm_head"}


def missing(names: set[str], model: ModelModules = MODEL, **config: object) -> tuple[str, ...]:
    return lost_modules(parse_config(config_bytes(**{"target_modules": ALL, **config})), names, model)


def without(pattern: str) -> set[str]:
    return {name for name in WHOLE if not re.search(pattern, name)}


def test_an_adapter_with_all_that_it_names_is_complete() -> None:
    """The experts' `down_proj` is a parameter for PEFT, and the tower has other layers than the text model."""
    assert missing(WHOLE) == ()


@pytest.mark.parametrize(
    ("gone", "found"),
    [
        ("lm_head", ("lm_head",)),
        (r"layers\.1\.", ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj")),
        (r"layers\.2\..*o_proj", ("model.layers.2.self_attn.o_proj",)),
        ("o_proj", tuple(f"model.layers.{layer}.self_attn.o_proj" for layer in LAYERS)),
        ("q_proj", tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in LAYERS)),
        ("v_proj", tuple(f"model.layers.{layer}.self_attn.v_proj" for layer in LAYERS)),
    ],
)
def test_what_was_lost_is_named(gone: str, found: tuple[str, ...]) -> None:
    assert missing(without(gone)) == found


def test_layers_without_keys_and_values_of_their_own_are_complete() -> None:
    assert missing(without(r"layers\.2\..*[kv]_proj")) == ()


def test_a_module_that_peft_knows_whole_is_no_lost_part() -> None:
    """As GLM-4's `gate_up_proj`, with a list of usual names: `gate_proj` is none of its model, and is passed over."""
    assert missing(without("[qkv]_proj")) == ()


def test_a_module_that_the_engine_names_otherwise_is_not_lost() -> None:
    """As Nemotron-H's `embeddings`, which are vLLM's `embed_tokens`: PEFT passes over `embed_tokens`."""
    names = [*ALL, "embed_tokens"]
    renames = {"orig_to_new_substr": {"embeddings": "embed_tokens"}}
    assert missing(WHOLE, target_modules=names) == ("model.embed_tokens",)
    assert missing(WHOLE, dataclasses.replace(MODEL, renames=renames), target_modules=names) == ()


@pytest.mark.parametrize(
    "config",
    [
        {"layers_to_transform": [0, 2]},
        {"exclude_modules": ["model.layers.1.self_attn.q_proj"]},
        {"target_modules": ".*_proj"},
        {"target_modules": None},
        {"target_modules": ["self_attn.q_proj"]},
        {"target_modules": ["k_proj"]},
    ],
)
def test_what_was_left_out_on_purpose_is_complete(config: dict[str, object]) -> None:
    assert missing(without(r"layers\.1\.|lm_head"), **config) == ()


@pytest.mark.parametrize("leave_out", [{"layers_to_transform": 0}, {"exclude_modules": "o_proj"}])
def test_targets_that_more_keys_narrow_stay_open(leave_out: dict[str, object]) -> None:
    config: Callable[..., AdapterConfig] = lambda **more: parse_config(config_bytes(target_modules=ALL, **more))  # noqa: E731
    assert config().targets == frozenset(ALL)
    assert config(**leave_out).targets is None
