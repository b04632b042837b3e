"""Adapters of random values in PEFT's form, for three tiny base models, from which each trainer's files are made.

Values are exact in bfloat16, so that a trainer's dtype changes none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

RANK, LAYERS = 8, 2
HIDDEN, KEYS, INNER, VOCABULARY = 128, 64, 256, 512  # of `testbed.models.build_base(hidden=128)`
EXPERTS, OF_EXPERT = 4, 64  # of Qwen3MoeForCausalLM in testbed/architectures.py
OF_TEXT, OF_TEXT_KEYS, OF_TEXT_INNER = 64, 32, 96  # of `testbed.multimodal`
PEFT = "base_model.model."
Files = dict[str, bytes]


class Base(StrEnum):
    """What an adapter was trained on."""

    LLAMA = "Llama"
    EXPERTS = "Qwen3 MoE"
    WRAPPER = "Idefics3"


# Inputs and outputs of each module of a layer.
Sizes = Mapping[str, tuple[int, int]]
ATTENTION: Sizes = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KEYS),
    "self_attn.v_proj": (HIDDEN, KEYS),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
}
MLP: Sizes = {"mlp.gate_proj": (HIDDEN, INNER), "mlp.up_proj": (HIDDEN, INNER), "mlp.down_proj": (INNER, HIDDEN)}
TEXT: Sizes = {
    "self_attn.q_proj": (OF_TEXT, OF_TEXT),
    "self_attn.v_proj": (OF_TEXT, OF_TEXT_KEYS),
    "self_attn.o_proj": (OF_TEXT, OF_TEXT),
}
TOWER: Sizes = {
    **{f"self_attn.{name}": (OF_TEXT, OF_TEXT) for name in ("q_proj", "k_proj", "v_proj", "out_proj")},
    "mlp.fc1": (OF_TEXT, OF_TEXT_INNER),
    "mlp.fc2": (OF_TEXT_INNER, OF_TEXT),
}
OF_ONE_EXPERT: Sizes = {
    "gate_proj": (HIDDEN, OF_EXPERT),
    "up_proj": (HIDDEN, OF_EXPERT),
    "down_proj": (OF_EXPERT, HIDDEN),
}
# The keys that LoraConfig of PEFT 0.21.2 saves, where their value is None.
_NONE = (
    *("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config", "exclude_modules"),
    *("kasa_config", "layer_replication", "layers_pattern", "layers_to_transform", "lora_ga_config"),
    *("megatron_config", "modules_to_save", "monteclora_config", "revision", "target_parameters"),
    *("trainable_token_indices", "use_bdlora", "velora_config"),
)


@dataclass
class Adapter:
    """The tensors by their names in PEFT's file, and the keys of `adapter_config.json`."""

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def config_of(targets: Any, **changes: Any) -> dict[str, Any]:
    """The configuration as PEFT 0.21.2 saves it."""
    return {
        **dict.fromkeys(_NONE),
        "alpha_pattern": {},
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "ensure_weight_tying": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "loftq_config": {},
        "lora_alpha": 2 * RANK,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "megatron_core": "megatron.core",
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": RANK,
        "rank_pattern": {},
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
        **changes,
    }


def values(name: str, *shape: int) -> np.ndarray:
    """Values that the name decides; the low half of a float32's bits is zero, as in bfloat16."""
    # At the size at which an adapter's effect is far from rounding, and its answers are far from random.
    made = np.random.default_rng(sum(name.encode())).normal(0.0, 0.06, shape).astype(np.float32)
    return (made.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def pair(module: str, inputs: int, outputs: int, rank: int = RANK) -> dict[str, np.ndarray]:
    """A and B of one module, as PEFT names them."""
    a, b = (f"{PEFT}{module}.lora_{side}.weight" for side in "AB")
    return {a: values(a, rank, inputs), b: values(b, outputs, rank)}


def looked_up(module: str) -> dict[str, np.ndarray]:
    """A and B of the embeddings, and the copy of the base model's that PEFT saves beside."""
    a, b = (f"{PEFT}{module}.lora_embedding_{side}" for side in "AB")
    return {a: values(a, RANK, VOCABULARY), b: values(b, HIDDEN, RANK)} | copied(module)


def copied(module: str, words: int = VOCABULARY) -> dict[str, np.ndarray]:
    """The base model's embeddings or head, as PEFT saves them beside an adapter of them."""
    name = f"{PEFT}{module}.base_layer.weight"
    return {name: values(name, words, HIDDEN)}


def layers(
    sizes: Sizes, prefix: str = "model.layers", only: Iterable[int] = range(LAYERS), rank: int = RANK
) -> dict[str, np.ndarray]:
    """Pairs of these modules of each layer."""
    tensors: dict[str, np.ndarray] = {}
    for layer in only:
        for module, (inputs, outputs) in sizes.items():
            tensors |= pair(f"{prefix}.{layer}.{module}", inputs, outputs, rank)
    return tensors


def leaves(sizes: Sizes) -> list[str]:
    """The last parts of names, which recipes give as targets."""
    return [name.rpartition(".")[2] for name in sizes]


def stacked_experts(layer: int) -> dict[str, np.ndarray]:
    """All experts of a layer in two pairs, as PEFT from 0.19.1 saves `target_parameters`."""
    module = f"model.layers.{layer}.mlp.experts"
    rank = RANK * EXPERTS
    return pair(f"{module}.base_layer", HIDDEN, 2 * OF_EXPERT, rank) | pair(module, OF_EXPERT, HIDDEN, rank)


def unstacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same, with a pair for each matrix of each expert in the place of stacked ones."""
    made = {name: one for name, one in tensors.items() if not name.endswith(("experts", "base_layer"), 0, -14)}
    for name in [name for name in tensors if name not in made and name.endswith(".lora_A.weight")]:
        a, b = tensors[name], tensors[name.replace(".lora_A.", ".lora_B.")]
        module = name.removesuffix(".lora_A.weight").removesuffix(".base_layer")
        for expert in range(EXPERTS):
            its_a = a.reshape(EXPERTS, RANK, -1)[expert]
            its_b = np.ascontiguousarray(b.reshape(len(b), RANK, EXPERTS)[:, :, expert])
            halves = {"gate_proj": its_b[:OF_EXPERT], "up_proj": its_b[OF_EXPERT:]}
            # By A's inputs: PEFT names a parameter alone as if it were down_proj.
            for leaf, one in ({"down_proj": its_b} if a.shape[1] == OF_EXPERT else halves).items():
                prefix = f"{module}.{expert}.{leaf}.lora_"
                made |= {f"{prefix}A.weight": its_a, f"{prefix}B.weight": one}
    return made


def safetensors(tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> bytes:
    """The file; in BF16 the halves of the values that are not zero."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data, begin = [], 0
    for name, array in sorted(tensors.items()):
        raw = np.ascontiguousarray(array, np.float32)
        if dtype == "F16":
            raw = raw.astype(np.float16)
        elif dtype == "BF16":
            raw = (raw.view(np.uint32) >> 16).astype(np.uint16)
        data.append(raw.tobytes())
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, begin + raw.nbytes]}
        begin += raw.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data)


def json_bytes(keys: Mapping[str, Any]) -> bytes:
    return json.dumps(keys, indent=2).encode()
