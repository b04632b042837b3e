"""What the engine says of the three base models of testbed/trainers; a nightly test compares it with the engine's."""

from __future__ import annotations

import dataclasses

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import (
    ExpertFormat,
    Experts,
    ModelModules,
    ModuleKind,
    ModulePlace,
    TokenPlaces,
    Unadapted,
)
from lora_plugins.adapter.trained_token_places import MAX_TOKENS
from testbed.trainers.adapters import (
    ATTENTION,
    EXPERTS,
    HIDDEN,
    LAYERS,
    MLP,
    OF_EXPERT,
    OF_ONE_EXPERT,
    TEXT,
    TOWER,
    VOCABULARY,
    Base,
    Sizes,
)
from tests.make import read_name

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_ROLES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _places(sizes: Sizes, prefix: str) -> dict[str, ModulePlace]:
    places = {}
    for layer in range(LAYERS):
        for module, (inputs, outputs) in sizes.items():
            parent, _, leaf = f"{prefix}.{layer}.{module}".rpartition(".")
            engines = f"{parent}.{_FUSED.get(leaf, leaf)}"
            factor = f"{parent}.up_proj" if leaf == "down_proj" else ""
            places[f"{parent}.{leaf}"] = ModulePlace(engines, ModuleKind.LINEAR, inputs, outputs, factor=factor)
    return places


def _experts() -> tuple[dict[str, ModulePlace], dict[str, Experts]]:
    places, experts = {}, {}
    for layer in range(LAYERS):
        module = f"model.layers.{layer}.mlp.experts"
        names = {role: leaf for leaf, role in _ROLES.items()}
        experts[module] = Experts(EXPERTS, HIDDEN, OF_EXPERT, (ExpertFormat.PER_EXPERT,), names)
        for expert in range(EXPERTS):
            for leaf, (inputs, outputs) in OF_ONE_EXPERT.items():
                place = ModulePlace(module, ModuleKind.EXPERTS, inputs, outputs, part=_ROLES[leaf])
                places[f"{module}.{expert}.{leaf}"] = place
    return places, experts


_WORDS = {
    "model.embed_tokens": ModulePlace("model.embed_tokens", ModuleKind.EMBEDDING, VOCABULARY, HIDDEN),
    "lm_head": ModulePlace("lm_head", ModuleKind.HEAD, HIDDEN, VOCABULARY, max_out_features=True),
}
_PLACES, _OF_MOE = _experts()


def _base(modules: ModelModules) -> BaseModel:
    return BaseModel("tiny", ("tiny",), max_rank=64, model=Model(modules, read_name))


_LLAMA = ModelModules(
    "LlamaForCausalLM",
    "0.32.0",
    {**_places({**ATTENTION, **MLP}, "model.layers"), **_WORDS},
    vocabulary=VOCABULARY,
    tokens=TokenPlaces("model.embed_tokens", "lm_head", VOCABULARY, HIDDEN, MAX_TOKENS, is_tied=False),
    without_vectors="",
)
BASES = {
    Base.LLAMA: _base(_LLAMA),
    Base.EXPERTS: _base(
        dataclasses.replace(
            _LLAMA,
            architecture="Qwen3MoeForCausalLM",
            places={**_places(ATTENTION, "model.layers"), **_PLACES},
            experts=_OF_MOE,
        )
    ),
    Base.WRAPPER: _base(
        dataclasses.replace(
            _LLAMA,
            architecture="Idefics3ForConditionalGeneration",
            places=_places(TEXT, "model.text_model.layers"),
            unadapted={
                f"model.vision_model.encoder.layers.{layer}.{name}": Unadapted.TOWER
                for layer in range(LAYERS)
                for name in TOWER
            },
        )
    ),
}
