"""What a worker says of its model is what it then takes: each place with its sizes loads, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_plugins.adapter.model_modules import ModelModules, ModuleKind
from lora_plugins.scheduler.messages import Failed
from lora_plugins.worker.model_description import _copies, describe
from tests.worker import small_model
from tests.worker.small_model import ATTENTION, LAYERS, MLP, MORE, Make, bring, make_adapter
from tests.worker.test_fits import FUSED, WORDS, linear, model_with_words, on_two_devices


@pytest.fixture
def manager(make_manager: Make, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(small_model, "small_model", model_with_words)
    return make_manager(slots=1, max_adapters=64)


def test_every_module_of_a_model_is_described_with_its_sizes(manager: Any) -> None:
    found = describe(manager._adapter_manager)
    sizes = {name: (place.in_features, place.out_features) for name, place in found.places.items()}
    expected = {
        f"layers.{layer}.{name}": size for layer in range(LAYERS) for name, size in (ATTENTION | MLP | MORE).items()
    }
    words = {"embed_tokens": (WORDS, small_model.WIDTH), "lm_head": (small_model.WIDTH, WORDS)}
    assert sizes == expected | words | {"fused": (small_model.WIDTH, sum(FUSED))}
    assert {name for name, place in found.places.items() if place.kind is not ModuleKind.LINEAR} == set(words)
    assert found.places["layers.0.k_proj"].module == "layers.0.qkv_proj"
    assert (found.architecture, found.vocabulary) == ("SmallModel", WORDS)
    assert ModelModules.of_plain(json.loads(json.dumps(found.plain()))) == found


def test_a_fused_module_without_parts_says_its_matrices(manager: Any) -> None:
    found = describe(manager._adapter_manager).places
    assert found["fused"].matrices == tuple(FUSED)
    assert {place.matrices for name, place in found.items() if name != "fused"} == {()}


def test_what_is_described_loads_and_other_sizes_do_not(manager: Any, tmp_path: Path) -> None:
    found = describe(manager._adapter_manager)
    numbers = iter(range(1, 100))
    for name, place in found.places.items():
        if place.kind is ModuleKind.EMBEDDING or name.startswith("layers.1"):
            continue
        for inputs, outputs, fits in (
            (place.in_features, place.out_features, True),
            (place.in_features + 1, place.out_features, False),
            (place.in_features, place.out_features + 1, False),
        ):
            number = next(numbers)
            change = linear(name, 4, inputs, outputs)
            adapter = make_adapter(tmp_path / str(number), number, modules={}, change=change)
            assert isinstance(bring(manager, adapter), Failed) is not fits, (name, inputs, outputs)


def test_sizes_are_those_of_the_whole_model_on_several_devices(manager: Any) -> None:
    layer = on_two_devices(manager._adapter_manager.modules["fused"])
    layer.tp_size = 2
    place = describe(manager._adapter_manager).places["fused"]
    assert (place.in_features, place.out_features) == (small_model.WIDTH, sum(FUSED))


@pytest.mark.parametrize(
    ("activation", "more", "factor"),
    [
        ("SiluAndMul", {}, "mlp.up_proj"),
        ("GeluAndMul", {}, "mlp.up_proj"),
        ("SwigluStepAndMul", {}, ""),  # clamps what up_proj gives
        ("SiluAndMul", {"norm": torch.nn.LayerNorm(MLP["down_proj"][0])}, ""),
    ],
    ids=["SiLU", "GELU", "clamped", "norm between"],
)
def test_inputs_of_down_proj_have_up_proj_as_a_factor(
    make_manager: Make, monkeypatch: pytest.MonkeyPatch, activation: str, more: dict[str, Any], factor: str
) -> None:
    from vllm.model_executor.layers import activation as activations

    make = small_model.small_model

    def model() -> Any:
        made = make()
        of_layer = made.layers[0]
        made.mlp = torch.nn.ModuleDict(
            {"gate_up_proj": of_layer.gate_up_proj, "act_fn": getattr(activations, activation)(), **more}
        )
        made.mlp["down_proj"] = of_layer.down_proj
        del of_layer.gate_up_proj, of_layer.down_proj
        return made

    monkeypatch.setattr(small_model, "small_model", model)
    places = describe(make_manager()._adapter_manager).places
    assert places["mlp.down_proj"].factor == factor
    assert {place.factor for name, place in places.items() if name != "mlp.down_proj"} == {""}


def test_layers_without_values_of_their_own_name_the_copy() -> None:
    """Gemma 4's 26B and 31B; layers that share the keys of others have no `k_proj`."""
    from transformers import Gemma4Config, Gemma4TextConfig

    layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    names = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(3) for part in "qkvo"]
    for is_shared in (True, False):
        text = Gemma4TextConfig(layer_types=layers, num_hidden_layers=4, attention_k_eq_v=is_shared)
        found = {"model.layers.1.self_attn.k_proj": "model.layers.1.self_attn.v_proj"} if is_shared else {}
        for config in (text, Gemma4Config(text_config=text)):
            assert _copies(SimpleNamespace(config=config), names) == found
