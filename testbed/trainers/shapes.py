"""What adapters are of: each in PEFT's form, and why vLLM cannot serve it, where it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from testbed.trainers.adapters import (
    ATTENTION,
    HIDDEN,
    LAYERS,
    MLP,
    PEFT,
    RANK,
    TEXT,
    TOWER,
    VOCABULARY,
    Adapter,
    Base,
    config_of,
    copied,
    layers,
    leaves,
    looked_up,
    pair,
    stacked_experts,
    unstacked,
    values,
)


@dataclass(frozen=True)
class Shape:
    """One kind of adapter.

    Attributes:
        what: in words. make: the adapter, as PEFT writes it.
        refused: our refusal, a pattern of code, finding and remedy; empty where it is served as trained.
    """

    what: str
    make: Callable[[], Adapter]
    base: Base = Base.LLAMA
    refused: str = ""


ALL = {**ATTENTION, **MLP}
PARAMETERS = ("gate_up_proj", "down_proj")
QV = {name: ATTENTION[name] for name in ("self_attn.q_proj", "self_attn.v_proj")}


def _attention(**changes: object) -> Adapter:
    return Adapter(layers(ATTENTION), config_of(leaves(ATTENTION), **changes))


def _patterns() -> Adapter:
    tensors = layers(ATTENTION)
    for layer in range(LAYERS):
        tensors |= pair(f"model.layers.{layer}.self_attn.q_proj", HIDDEN, HIDDEN, 2 * RANK)
    patterns = {"rank_pattern": {"q_proj": 2 * RANK}, "alpha_pattern": {r"1\.self_attn\.o_proj": 4}}
    return Adapter(tensors, config_of(leaves(ATTENTION), **patterns))


def _with_head(*, is_whole: bool) -> Adapter:
    if is_whole:
        one = _attention(modules_to_save=["lm_head", "embed_tokens"])
        one.tensors |= {f"{PEFT}lm_head.weight": values("head", VOCABULARY, HIDDEN)}
        return one
    tensors = layers(ATTENTION) | pair("lm_head", HIDDEN, VOCABULARY) | copied("lm_head")
    return Adapter(tensors, config_of([*leaves(ATTENTION), "lm_head"]))


def _words() -> Adapter:
    tensors = layers(QV) | looked_up("model.embed_tokens")
    return Adapter(tensors, config_of([*leaves(QV), "embed_tokens"]))


def _magnitudes() -> Adapter:
    one = _attention(use_dora=True)
    for name in [name for name in one.tensors if name.endswith(".lora_B.weight")]:
        module = name.removesuffix(".lora_B.weight")
        one.tensors[f"{module}.lora_magnitude_vector"] = values(module, len(one.tensors[name]))
    return one


def _biases() -> Adapter:
    one = _attention(bias="all")
    for name in [name for name in one.tensors if name.endswith(".lora_B.weight")]:
        one.tensors[name.replace(".lora_B.weight", ".base_layer.bias")] = values(name, len(one.tensors[name]))
    return one


def _biases_beside_b() -> Adapter:
    one = _attention(lora_bias=True)
    for name in [name for name in one.tensors if name.endswith(".lora_B.weight")]:
        one.tensors[name.replace(".lora_B.weight", ".lora_B.bias")] = values(f"{name}.bias", len(one.tensors[name]))
    return one


def _factors() -> Adapter:
    """With PEFT's own targets for Llama, of which down_proj's factors are of its inputs."""
    tensors = {}
    for layer in range(LAYERS):
        for module in ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
            inputs, outputs = ALL[module]
            name = f"{PEFT}model.layers.{layer}.{module}.ia3_l"
            tensors[name] = 1 + 5 * values(name, *((1, inputs) if module == "mlp.down_proj" else (outputs, 1)))
    same = ("auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "modules_to_save")
    same += ("peft_version", "revision", "task_type", "exclude_modules")
    of_ia3 = {"peft_type": "IA3", "feedforward_modules": ["down_proj"], "init_ia3_weights": True}
    config = config_of(["k_proj", "v_proj", "down_proj"])
    return Adapter(tensors, {key: config[key] for key in (*same, "target_modules")} | of_ia3)


def _tokens() -> Adapter:
    one = _attention(trainable_token_indices=[3, 17])
    one.tensors[f"{PEFT}model.embed_tokens.token_adapter.trainable_tokens_delta"] = values("tokens", 2, HIDDEN)
    return one


def _grown() -> Adapter:
    one = _attention()
    for module in ("model.embed_tokens", "lm_head"):
        one.tensors[f"{PEFT}{module}.weight"] = values(module, VOCABULARY + 4, HIDDEN)
    return one


def _classifier() -> Adapter:
    one = _attention(task_type="SEQ_CLS", modules_to_save=["classifier", "score"])
    one.tensors[f"{PEFT}score.weight"] = values("score", 3, HIDDEN)
    return one


def _of_experts() -> Adapter:
    tensors = layers(ATTENTION)
    for layer in range(LAYERS):
        tensors |= stacked_experts(layer)
    return Adapter(tensors, config_of(leaves(ATTENTION), target_parameters=[f"experts.{one}" for one in PARAMETERS]))


def _one_by_one() -> Adapter:
    return Adapter(unstacked(_of_experts().tensors), config_of(leaves({**ATTENTION, **MLP})))


def _gate_up() -> Adapter:
    """One parameter alone, which PEFT names as if it were the outer of two."""
    one = _of_experts()
    tensors = {name: its for name, its in one.tensors.items() if not name.endswith(".experts", 0, -14)}
    tensors = {name.replace(".experts.base_layer.", ".experts."): its for name, its in tensors.items()}
    return Adapter(tensors, one.config | {"target_parameters": [f"experts.{PARAMETERS[0]}"]})


def _sharing() -> Adapter:
    """Experts that have A of gate_proj and up_proj, and B of down_proj, in common."""
    one = _one_by_one()
    for name in one.tensors:
        if re.search(r"\.(gate_proj|up_proj)\.lora_A|\.down_proj\.lora_B", name):
            one.tensors[name] = one.tensors[re.sub(r"\.experts\.\d+\.", ".experts.0.", name)]
    return one


def _text(prefix: str) -> Adapter:
    """With the same values under each prefix."""
    tensors = layers(TEXT)
    return Adapter(
        {name.replace("model.layers", prefix): its for name, its in tensors.items()}, config_of(leaves(TEXT))
    )


def _tower() -> Adapter:
    tensors = layers(TOWER, "model.vision_model.encoder.layers")
    return Adapter(tensors, config_of(r".*vision_model.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"))


IN_ATTENTION = Shape("attention", _attention)
IN_QV = Shape("q_proj and v_proj", lambda: Adapter(layers(QV), config_of(leaves(QV))))
ALL_LINEAR = Shape("all linear modules", lambda: Adapter(layers(ALL), config_of(leaves(ALL))))
RSLORA = Shape("rsLoRA", lambda: _attention(use_rslora=True))
PATTERNS = Shape("rank and alpha by pattern", _patterns)
HEAD = Shape("a head", lambda: _with_head(is_whole=False))
WORDS = Shape("embeddings", _words)
LAST_LAYER = Shape(
    "the last layer",
    lambda: Adapter(layers(ATTENTION, only=[1]), config_of(leaves(ATTENTION), layers_to_transform=[1])),
)
DORA = Shape("DoRA", _magnitudes)
SAVED = Shape(
    "a whole head",
    lambda: _with_head(is_whole=True),
    refused=r"L003.* found modules_to_save embed_tokens, lm_head.*merge those modules into the base",
)
PISSA = Shape(
    "PiSSA",
    lambda: _attention(init_lora_weights="pissa"),
    refused=r"L003.*init_lora_weights 'pissa', which changes the base.*path_initial_model_for_weight_conversion",
)
BIAS = Shape("biases", _biases, refused=r"L003.* found a bias of .*as the base model has none.*merge the adapter")
B_BIAS = Shape("biases beside B", _biases_beside_b)
IA3 = Shape("IA3", _factors)
TOKENS = Shape("some tokens' embeddings", _tokens)
GROWN = Shape("words added", _grown, refused=r"L003.*a whole embedding.*merge the adapter into the model with these")
CLASSIFIER = Shape(
    "a classifier's head", _classifier, refused=r"L003.*a classifier's head .*serve it on a server of the classifier"
)
BESIDE_EXPERTS = Shape("attention beside experts", _attention, Base.EXPERTS)
STACKED = Shape("experts, stacked", _of_experts, Base.EXPERTS)
ONE_BY_ONE = Shape("experts, one by one", _one_by_one, Base.EXPERTS)
GATE_UP = Shape("experts' gate_up_proj alone, stacked", _gate_up, Base.EXPERTS)
SHARING = Shape("experts that share a side", _sharing, Base.EXPERTS)
BELOW = Shape("text below a multimodal model", lambda: _text("model.text_model.layers"), Base.WRAPPER)
TEXT_ALONE = Shape("a text model, on the multimodal one", lambda: _text("model.layers"), Base.WRAPPER)
VISION = Shape("a vision tower", _tower, Base.WRAPPER, refused=r"L003.*restart .*--enable-tower-connector-lora")
