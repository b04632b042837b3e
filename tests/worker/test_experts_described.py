"""What a worker says of the mixtures of experts in vLLM's own models: formats, names, and sizes of the whole layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from lora_plugins.adapter.model_modules import ExpertFormat, Experts, ModelModules, ModuleKind, ModulePlace
from lora_plugins.worker.model_description import describe
from tests.worker.real_models import EXPERTS, HIDDEN, INNER, PER_EXPERT
from tests.worker.small_model import Make

BLOCKS = {"mixtral": "model.layers.0.block_sparse_moe.experts"}
NAMES = {"mixtral": {"w1": "w1", "w2": "w2", "w3": "w3"}, "gpt-oss": {"w1": "w1", "w2": "w2", "w3": "w3"}}
SIZES = {"w1": (HIDDEN, INNER), "w2": (INNER, HIDDEN), "w3": (HIDDEN, INNER), "w13": (HIDDEN, 2 * INNER)}


@pytest.fixture
def described(make_real_manager: Make) -> Callable[..., ModelModules]:
    def describe_model(name: str, **lora: Any) -> ModelModules:
        found = describe(make_real_manager(name, LRUCacheWorkerLoRAManager, **lora)._adapter_manager)
        assert ModelModules.of_plain(json.loads(json.dumps(found.plain()))) == found
        return found

    return describe_model


def expected(name: str, *formats: ExpertFormat) -> tuple[dict[str, ModulePlace], Experts]:
    block = BLOCKS.get(name, "model.layers.0.mlp.experts")
    names = NAMES.get(name, {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})
    places = {}
    if ExpertFormat.PER_EXPERT in formats:
        for expert in range(EXPERTS):
            for part, last in names.items():
                places[f"{block}.{expert}.{last}"] = ModulePlace(block, ModuleKind.EXPERTS, *SIZES[part], part=part)
    if ExpertFormat.STACKED in formats:
        for module, part in ((block, "w2"), (f"{block}.base_layer", "w13")):
            places[module] = ModulePlace(block, ModuleKind.EXPERTS, *SIZES[part], part=part, stacked=EXPERTS)
    if ExpertFormat.SHARED in formats:
        for part in names:
            places[f"{block}.{part}"] = ModulePlace(block, ModuleKind.EXPERTS, *SIZES[part], part=part)
        names = {part: part for part in names}
    return places, Experts(EXPERTS, HIDDEN, INNER, formats, names, name == "gpt-oss")


def check(found: ModelModules, places: dict[str, ModulePlace], experts: Experts) -> None:
    assert {name: place for name, place in found.places.items() if place.kind is ModuleKind.EXPERTS} == places
    assert list(found.experts.values()) == [experts]
    assert {place.module for place in places.values()} == set(found.experts)


@pytest.mark.parametrize("name", PER_EXPERT)
def test_experts_of_pairs_are_described_with_names_and_sizes(described: Any, name: str) -> None:
    found = described(name)
    check(found, *expected(name, ExpertFormat.PER_EXPERT))
    router = next(place for name, place in found.places.items() if name.endswith(".gate"))
    assert (router.kind, router.in_features, router.out_features) == (ModuleKind.LINEAR, HIDDEN, EXPERTS)


def test_stacked_experts_are_described_by_what_peft_stacks(described: Any) -> None:
    check(described("gpt-oss"), *expected("gpt-oss", ExpertFormat.STACKED))


def test_an_engine_of_both_formats_describes_both(described: Any) -> None:
    both = ExpertFormat.PER_EXPERT, ExpertFormat.STACKED
    check(described("gpt-oss", enable_mixed_moe_lora_format=True), *expected("gpt-oss", *both))
    check(described("qwen3-moe", enable_mixed_moe_lora_format=True), *expected("qwen3-moe", *both))


def test_an_engine_of_shared_factors_describes_one_pair_a_part(described: Any) -> None:
    check(described("qwen3-moe", enable_moe_shared_loras=True), *expected("qwen3-moe", ExpertFormat.SHARED))


def test_experts_without_gate_proj_have_two_parts(described: Any) -> None:
    found = described("nemotron-h")
    block = "model.layers.0.mixer.experts"
    assert found.experts == {
        block: Experts(EXPERTS, HIDDEN, INNER, (ExpertFormat.PER_EXPERT,), {"w1": "up_proj", "w2": "down_proj"})
    }
    experts = [(name, place.part) for name, place in found.places.items() if place.kind is ModuleKind.EXPERTS]
    assert experts == [
        (f"{block}.{expert}.{last}", part)
        for expert in range(EXPERTS)
        for part, last in (("w1", "up_proj"), ("w2", "down_proj"))
    ]
