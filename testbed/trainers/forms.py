"""How writers turn an adapter into files: each function takes one in PEFT's form and returns the files by name."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from testbed.trainers.adapters import (
    EXPERTS,
    LAYERS,
    PEFT,
    RANK,
    Adapter,
    Files,
    json_bytes,
    safetensors,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Form = Callable[[Adapter], Files]
Tensors = dict[str, np.ndarray]


def peft(adapter: Adapter, *, dtype: str = "F32", beside: Mapping[str, bytes] | None = None, **changes: Any) -> Files:
    """As PEFT, with other keys in the configuration (`...` leaves one out) and files beside."""
    keys = {key: value for key, value in {**adapter.config, **changes}.items() if value is not ...}
    return {CONFIG: json_bytes(keys), WEIGHTS: safetensors(adapter.tensors, dtype), **(beside or {})}


def with_(**more: Any) -> Form:
    """`peft`, with its arguments."""
    return functools.partial(peft, **more)


def few_keys(*names: str, **changes: Any) -> Form:
    """PEFT's tensors beside a configuration of a few keys."""
    return lambda one: {
        CONFIG: json_bytes({name: one.config[name] for name in names} | changes),
        WEIGHTS: safetensors(one.tensors),
    }


def renamed(old: str, new: str, **more: Any) -> Form:
    """PEFT's files with a pattern replaced in each name."""
    return changed(lambda tensors: {re.sub(old, new, name): one for name, one in tensors.items()}, **more)


def changed(change: Callable[[Tensors], Tensors], **more: Any) -> Form:
    """PEFT's files with other tensors."""
    return lambda one: peft(Adapter(change(one.tensors), one.config), **more)


def only(names: Mapping[str, bytes | None], keys: Mapping[str, Any] | None = None) -> Form:
    """Other files, where None stands for the tensors in a safetensors file; a configuration of these keys, if any."""

    def files(one: Adapter) -> Files:
        made = {name: safetensors(one.tensors) if data is None else data for name, data in names.items()}
        return made if keys is None else {CONFIG: json_bytes(keys), **made}

    return files


def sharded(one: Adapter) -> Files:
    """In two files with an index."""
    names = sorted(one.tensors)
    files, index = {CONFIG: json_bytes(one.config)}, {}
    for half in range(2):
        file = f"adapter_model-0000{half + 1}-of-00002.safetensors"
        its = {name: one.tensors[name] for name in names[half::2]}
        files[file] = safetensors(its)
        index |= dict.fromkeys(its, file)
    files["adapter_model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": index}).encode()
    return files


def empty(tensors: Tensors) -> Tensors:
    """What ZeRO-3 leaves of each tensor on one process, where nobody gathers them."""
    return {name: np.zeros(0, np.float32) for name in tensors}


def without_weight(tensors: Tensors) -> Tensors:
    """Experts as SkyRL's JAX backend names them: neither PEFT's prefix nor `.weight`."""
    return {
        name.removeprefix(PEFT).removesuffix(".weight") if ".experts." in name else name: one
        for name, one in tensors.items()
    }


# --- experts


def _of_experts(tensors: Tensors, change: Callable[[str, Tensors], Tensors]) -> Tensors:
    """The same tensors, with the stacked pair of each layer's experts replaced."""
    made = {name: one for name, one in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS):
        made |= change(f"{PEFT}model.layers.{layer}.mlp.experts", tensors)
    return made


def turned(tensors: Tensors) -> Tensors:
    """As PEFT before 0.19.1: the parameter is taken for (experts, in, out), so A is what B should be."""
    made = dict(tensors)
    for name in [name for name in tensors if ".experts." in name and name.endswith(".lora_A.weight")]:
        of_b = name.replace(".lora_A.", ".lora_B.")
        a, b = tensors[name], tensors[of_b]
        made[name] = b.reshape(len(b), RANK, EXPERTS).transpose(2, 1, 0).reshape(EXPERTS * RANK, -1)
        made[of_b] = a.reshape(EXPERTS, RANK, -1).transpose(2, 1, 0).reshape(-1, RANK * EXPERTS)
    return made


def grouped(tensors: Tensors) -> Tensors:
    """As Megatron-Bridge: all experts of a layer in three dimensions, under the parameter's own name."""

    def change(module: str, its: Tensors) -> Tensors:
        made: Tensors = {}
        for part, name in ((".base_layer", "gate_up_proj"), ("", "down_proj")):
            a, b = (its[f"{module}{part}.lora_{side}.weight"] for side in "AB")
            made[f"{module}.{name}.lora_A.weight"] = a.reshape(EXPERTS, RANK, -1)
            made[f"{module}.{name}.lora_B.weight"] = b.reshape(len(b), RANK, EXPERTS).transpose(2, 0, 1)
        return made

    return _of_experts(tensors, change)


def shared(tensors: Tensors) -> Tensors:
    """As Tinker: w1, w2, w3 in three dimensions; A of w1 and w3 and B of w2 are one for all experts."""
    roles = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

    def change(module: str, its: Tensors) -> Tensors:
        made: Tensors = {}
        for (role, leaf), side in itertools.product(roles.items(), "AB"):
            of_all = [its[f"{module}.{expert}.{leaf}.lora_{side}.weight"] for expert in range(EXPERTS)]
            one = of_all[:1] if side == ("B" if role == "w2" else "A") else of_all
            made[f"{module}.{role}.lora_{side}.weight"] = np.stack(one)
        return made

    return _of_experts(tensors, change)


# --- programs with a form of their own


def mlx(tensors: Tensors) -> Tensors:
    """`model.layers.0.self_attn.q_proj.lora_a`, and both sides transposed."""
    return {
        re.sub(r"\.lora_([AB])\.weight$", lambda side: f".lora_{side[1].lower()}", name.removeprefix(PEFT)): one.T
        for name, one in tensors.items()
    }


_OF_MISTRAL = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk"}
_OF_MISTRAL |= {"self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo"}


def mistral(tensors: Tensors) -> Tensors:
    """`layers.0.attention.wq.lora_A.weight`."""
    made = {}
    for name, one in tensors.items():
        new = name.removeprefix(f"{PEFT}model.")
        for theirs, its in _OF_MISTRAL.items():
            new = new.replace(theirs, its)
        made[new] = one
    return made


def torchtune(tensors: Tensors) -> Tensors:
    """`layers.0.attn.q_proj.lora_a.weight`."""
    return {
        re.sub(r"\.lora_([AB])\.", lambda side: f".lora_{side[1].lower()}.", name.removeprefix(f"{PEFT}model."))
        .replace("self_attn.", "attn.")
        .replace("o_proj", "output_proj"): one
        for name, one in tensors.items()
    }


def litgpt(tensors: Tensors) -> Tensors:
    """`transformer.h.0.attn.qkv.lora_A`, without `.weight`: queries, keys and values in one."""
    made: Tensors = {}
    for layer in range(LAYERS):
        its = {leaf: [tensors[f"{PEFT}model.layers.{layer}.self_attn.{leaf}_proj.lora_{side}.weight"] for side in "AB"]
               for leaf in "qkvo"}  # fmt: skip
        made[f"transformer.h.{layer}.attn.qkv.lora_A"] = np.concatenate([its[leaf][0] for leaf in "qkv"])
        made[f"transformer.h.{layer}.attn.qkv.lora_B"] = np.concatenate([its[leaf][1] for leaf in "qkv"])
        made[f"transformer.h.{layer}.attn.proj.lora_A"], made[f"transformer.h.{layer}.attn.proj.lora_B"] = its["o"]
    return made
