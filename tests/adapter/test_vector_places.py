"""Vectors of modules (DoRA, biases), judged before an engine has them, and in layouts that fuse or split modules."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.config import OUR_KEY, parse_config
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import ModelModules
from lora_plugins.adapter.vector_places import vectors_of
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter, LoRAPluginsError
from lora_plugins.settings import Settings
from tests.adapter.layouts.converted import FUSED, MLP, PARTS, base_of, convert
from tests.adapter.verdicts import refusal
from tests.make import BASE, LAYER, MODULES, PEFT, adapter_files, config_bytes, pair, put, read_name, weights

Q, K, V = (LAYER.format(0, part) for part in ("q_proj", "k_proj", "v_proj"))
QKV, FIRST, SECOND, BOTH = (
    LAYER.format(0, "qkv_proj"),
    *(MLP.format(0, x) for x in ("gate_proj", "up_proj", "gate_up_proj")),
)
NO_REASON = replace(MODULES, without_vectors="")
SERVES = replace(BASE, model=Model(NO_REASON, read_name))
MAGNITUDE, B_BIAS, BIAS = "lora_magnitude_vector", "lora_B.bias", "bias"


def numbers(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed + count).normal(size=count).astype("float32") + 2


def vectors(kind: str, sizes: dict[str, int], start: str = PEFT) -> dict[str, np.ndarray]:
    return {f"{start}{module}.{kind}": numbers(size, seed) for seed, (module, size) in enumerate(sizes.items())}


def of_weights(kind: str) -> dict[str, np.ndarray]:
    """For every pair of `weights()`."""
    return vectors(
        kind, {LAYER.format(layer, part): size for layer in range(2) for part, size in (("q_proj", 8), ("v_proj", 4))}
    )


def judged(directory: Path, tensors: dict[str, Any], base: Any = SERVES, **config: object) -> Any:
    files = adapter_files({name: one for name, one in (weights() | tensors).items() if one is not None}, **config)
    return verify_adapter(put(directory / "adapter", files), base, Settings())


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (of_weights(MAGNITUDE), {"use_dora": True}),
        (of_weights(MAGNITUDE + ".weight"), {"use_dora": True}),
        (of_weights(B_BIAS), {"lora_bias": True}),
        (vectors(BIAS, {K: 4}) | vectors("base_layer.bias", {Q: 8}), {"bias": "all"}),
        (vectors("base_layer.bias", {Q: 8}), {"bias": "lora_only"}),
        (of_weights(MAGNITUDE) | vectors(BIAS, {K: 4}), {"use_dora": True, "bias": "all"}),
        ({}, {"bias": "all"}),  # no layer of the base model has one
    ],
    ids=["DoRA", "DoRA of PEFT before 0.12", "lora_bias", "all", "lora_only", "both", "none"],
)
def test_what_linear_layers_compute_is_taken(
    tmp_path: Path, tensors: dict[str, np.ndarray], config: dict[str, object]
) -> None:
    verified = judged(tmp_path, tensors, **config)
    assert {one.tensor.name for one in verified.weights.beside} == set(tensors)
    assert len(list(vectors_of(verified.weights.beside, NO_REASON, SERVES.model.read))) == len(tensors)
    assert verified.conversion is None


HALF = dict([*of_weights(MAGNITUDE).items()][:-1])
DORA, MERGE = {"use_dora": True}, "merge the adapter into the base model"


@pytest.mark.parametrize(
    ("tensors", "config", "kind", "says"),
    [
        (of_weights(MAGNITUDE), {}, IncompatibleAdapter, "magnitude_vector', without use_dora in adapter_config.json"),
        (of_weights(B_BIAS), {"bias": "all"}, IncompatibleAdapter, "lora_B.bias', without lora_bias"),
        (vectors(BIAS, {K: 4}), {}, IncompatibleAdapter, "bias', without bias in adapter_config.json"),
        (HALF, DORA, InvalidAdapter, "no tensor 'lora_magnitude_vector' of module .*1.self_attn.v_proj"),
        (of_weights(MAGNITUDE) | vectors(MAGNITUDE, {Q: 7}), DORA, InvalidAdapter, r"\[7\]; expected shape \[8\]"),
        (of_weights(MAGNITUDE) | vectors(MAGNITUDE, {K: 4}), DORA, InvalidAdapter, "expected none, without A and B"),
        (vectors(BIAS, {K: 5}), {"bias": "all"}, IncompatibleAdapter, "of 5 values; expected 4"),
        (vectors(BIAS, {"model.norm": 8}), {"bias": "all"}, IncompatibleAdapter, f"linear layers.*{MERGE}"),
        ({f"{PEFT}{K}.bias": np.ones((4, 1), "float32")}, {"bias": "all"}, InvalidAdapter, r"expected shape \[4\]"),
        (of_weights(MAGNITUDE) | of_weights(B_BIAS), {**DORA, "lora_bias": True}, InvalidAdapter, "one of both"),
        ({}, {"use_dora": "yes"}, InvalidAdapter, "use_dora 'yes'"),
        ({}, {OUR_KEY: {"a": 1}}, InvalidAdapter, OUR_KEY),
    ],
    ids=["no flag", "other flag", "bias", "lost", "size", "no pair", "model's", "norm", "2D", "both", "text", "own"],
)  # fmt: skip
def test_what_no_engine_could_compute_is_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], config: dict[str, object], kind: type[LoRAPluginsError], says: str
) -> None:
    refusal(tmp_path, weights() | tensors, SERVES, kind=kind, says=says, **config)


def test_an_engine_without_vectors_says_why_before_a_load(tmp_path: Path) -> None:
    modules = replace(MODULES, without_vectors="as the kernels of vLLM compute no more")
    base = replace(BASE, model=Model(ModelModules.of_plain(modules.plain()), read_name))
    says = r"use_dora.*A and B alone, as the kernels of vLLM compute no more"
    refusal(tmp_path, weights() | of_weights(MAGNITUDE), base, says=says, use_dora=True)


@pytest.mark.parametrize(
    ("of_embedding", "says"),
    [
        (vectors(MAGNITUDE, {"model.embed_tokens": 8}), ""),
        (vectors(MAGNITUDE, {"model.embed_tokens": 32}), r"\[32\]; expected shape \[8\]"),
        (
            vectors(MAGNITUDE, {"model.embed_tokens": 8}) | vectors(BIAS, {"model.embed_tokens": 8}),
            "magnitudes of an embedding",
        ),
    ],
    ids=["magnitudes", "a number for each word", "bias"],
)
def test_an_embeddings_magnitudes_alone_are_taken(
    tmp_path: Path, of_embedding: dict[str, np.ndarray], says: str
) -> None:
    embedding = {
        f"{PEFT}model.embed_tokens.lora_embedding_{side}": one
        for side, one in (("A", np.ones((4, 32), "float32")), ("B", np.ones((8, 4), "float32")))
    }
    expected = pytest.raises((IncompatibleAdapter, InvalidAdapter), match=says) if says else nullcontext()
    with expected:
        judged(tmp_path, of_weights(MAGNITUDE) | embedding | of_embedding, use_dora=True, bias="all")


@pytest.mark.parametrize(
    "keys", [DORA, {"lora_bias": True}, {"bias": "all"}, {"use_dora": True, "bias": "lora_only"}], ids=str
)
def test_the_canonical_configuration_keeps_what_vllm_would_refuse(keys: dict[str, object]) -> None:
    from vllm.lora.peft_helper import PEFTHelper

    parsed = parse_config(config_bytes(**keys))
    text = canonical_bytes(parsed)
    assert parse_config(text) == parsed
    assert parsed.beside == set(keys)
    PEFTHelper.from_dict(json.loads(text)).validate_legal(type("Lora", (), {"max_lora_rank": 16}))


def test_names_in_keys_and_renamings_take_vectors_along(tmp_path: Path) -> None:
    """`.lora_A.default.weight`, as a state dict has it."""
    tensors = pair(Q, 4, 8, 8)
    named = {name.replace(".weight", ".default.weight"): one for name, one in tensors.items()}
    beside = {f"{PEFT}{Q}.{MAGNITUDE}.default.weight": numbers(8), f"{PEFT}{Q}.base_layer.bias": numbers(8, 5)}
    _, made, _ = convert(tmp_path, named | beside, SERVES, use_dora=True, bias="lora_only")
    assert np.array_equal(made[f"{PEFT}{Q}.{MAGNITUDE}"], numbers(8))
    assert np.array_equal(made[f"{PEFT}{Q}.bias"], numbers(8, 5))
    assert len(made) == 4


def serving(places: dict[str, Any]) -> Any:
    return base_of(places, without_vectors="")


@pytest.mark.parametrize(
    ("kind", "config"), [(MAGNITUDE, DORA), (B_BIAS, {"lora_bias": True}), (BIAS, {"bias": "all"})]
)
def test_vectors_are_split_and_joined_as_rows(tmp_path: Path, kind: str, config: dict[str, object]) -> None:
    fused = pair(BOTH, 4, 8, 24) | vectors(kind, {BOTH: 24})
    _, made, _ = convert(tmp_path / "split", fused, serving(PARTS), **config)
    parts = [made[f"{PEFT}{part}.{kind}"] for part in (FIRST, SECOND)]
    assert [len(part) for part in parts] == [12, 12]
    assert np.array_equal(np.concatenate(parts), fused[f"{PEFT}{BOTH}.{kind}"])
    _, joined, _ = convert(tmp_path / "join", made, serving(FUSED), **config)
    assert np.array_equal(joined[f"{PEFT}{BOTH}.{kind}"], fused[f"{PEFT}{BOTH}.{kind}"])


def test_vectors_of_some_parts_are_joined_where_0_is_none(tmp_path: Path) -> None:
    tensors = pair(SECOND, 4, 8, 12) | vectors(B_BIAS, {SECOND: 12})
    _, made, _ = convert(tmp_path, tensors, serving(FUSED), lora_bias=True)
    joined = made[f"{PEFT}{BOTH}.{B_BIAS}"]
    assert np.array_equal(joined, np.concatenate([np.zeros(12, "float32"), tensors[f"{PEFT}{SECOND}.{B_BIAS}"]]))
    of_dora = pair(SECOND, 4, 8, 12) | vectors(MAGNITUDE, {SECOND: 12})
    refusal(tmp_path, of_dora, serving(FUSED), says=r"in another layout.*all parts", **DORA, target_modules=".*")


def test_vectors_of_two_dtypes_are_not_joined(tmp_path: Path) -> None:
    """Elements are moved as bits."""
    wide = vectors(MAGNITUDE, {FIRST: 12})
    narrow = {name: one.astype("float16") for name, one in vectors(MAGNITUDE, {SECOND: 12}).items()}
    tensors = pair(FIRST, 4, 8, 12) | pair(SECOND, 4, 8, 12) | wide | narrow
    refusal(tmp_path, tensors, serving(FUSED), says="in another layout than the engine's", **DORA)
