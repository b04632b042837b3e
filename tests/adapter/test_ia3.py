"""IA3's factors, judged before an engine has them, and in layouts that fuse or split modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.config import IA3, parse_config
from lora_plugins.adapter.model_modules import ModuleKind, ModulePlace
from lora_plugins.adapter.vector_places import vectors_of
from lora_plugins.adapter.verify import VerifiedAdapter, verify_adapter
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter, LoRAPluginsError
from lora_plugins.settings import Settings
from tests.adapter.layouts.converted import FUSED, MLP, PARTS, base_of, convert
from tests.adapter.verdicts import refusal
from tests.make import LAYER, MODULES, PEFT, adapter_files, config_bytes, pair, put, sharded, weights

FIRST, UP, DOWN = (MLP.format(0, name) for name in ("gate_proj", "up_proj", "down_proj"))
K, V = (LAYER.format(0, name) for name in ("k_proj", "v_proj"))
QKV, BOTH = LAYER.format(0, "qkv_proj"), MLP.format(0, "gate_up_proj")
GATED = {name: place for name, place in MODULES.places.items() if ".1." not in name} | {
    FIRST: PARTS[FIRST],
    UP: PARTS[UP],
    DOWN: ModulePlace(DOWN, ModuleKind.LINEAR, 12, 8, factor=UP),
}
# As PEFT's IA3Config has them; nothing of a LoRA.
CONFIG = {
    "peft_type": "IA3",
    "r": ...,
    "lora_alpha": ...,
    "fan_in_fan_out": False,
    "init_ia3_weights": True,
    "target_modules": ["k_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}


def factors(*sizes: tuple[str, int], inputs: tuple[str, int] | None = None, dtype: str = "float32") -> dict[str, Any]:
    """Factors of outputs of modules, and of inputs of another."""
    values = np.random.default_rng(3)
    made = {f"{PEFT}{name}.ia3_l": values.normal(size=(size, 1)).astype(dtype) for name, size in sizes}
    if inputs is not None:
        made[f"{PEFT}{inputs[0]}.ia3_l"] = values.normal(size=(1, inputs[1])).astype(dtype)
    return made


USUAL = factors((K, 4), (V, 4), inputs=(DOWN, 12))  # PEFT's own targets of Llama


def serving(places: Any) -> Any:
    return base_of(places, without_vectors="")


SERVES = serving(GATED)


def judged(directory: Path, tensors: dict[str, Any], base: Any = SERVES, **config: object) -> VerifiedAdapter:
    return verify_adapter(put(directory, adapter_files(tensors, **{**CONFIG, **config})), base, Settings())


def keys_of(verified: VerifiedAdapter) -> list[str]:
    return [key for _, key in vectors_of(verified.weights.beside, SERVES.model.modules, SERVES.model.read)]


def test_factors_of_outputs_and_inputs_are_taken(tmp_path: Path) -> None:
    verified = judged(tmp_path, USUAL)
    assert verified.conversion is None
    assert verified.weights.pairs == ()
    assert keys_of(verified) == [K, V, UP]


def test_two_tensors_may_be_factors_of_one_module(tmp_path: Path) -> None:
    tensors = factors((UP, 12), (DOWN, 8)) | {f"{PEFT}model.layers.0.mlp.down_proj.ia3_l": np.ones((1, 12), "float32")}
    assert keys_of(judged(tmp_path, tensors, target_modules="all-linear")) == [UP, UP]


def test_two_factors_of_outputs_for_one_module_are_refused(tmp_path: Path) -> None:
    beside = judged(tmp_path, USUAL).weights.beside
    with pytest.raises(InvalidAdapter, match=f"k_proj.ia3_l' and .*v_proj.ia3_l' for module '{K}'"):
        list(vectors_of(beside, SERVES.model.modules, lambda _: K))


def test_the_canonical_configuration_is_of_a_lora_that_vllm_takes() -> None:
    from vllm.lora.peft_helper import PEFTHelper

    parsed = parse_config(config_bytes(**CONFIG, use_dora=True, rank_pattern={"q": 3}, bias="all"))
    text = canonical_bytes(parsed)
    assert parse_config(text) == parsed
    assert parsed.beside == {IA3}, "PEFT's IA3 reads no other key"
    assert parsed.max_rank == 1
    PEFTHelper.from_dict(json.loads(text)).validate_legal(type("Lora", (), {"max_lora_rank": 1}))


ONE = {f"{PEFT}{K}.ia3_l": np.ones((4, 1), "float32")}


@pytest.mark.parametrize(
    ("tensors", "config", "kind", "says"),
    [
        (weights() | ONE, {"peft_type": "LORA", "r": 4, "lora_alpha": 8}, IncompatibleAdapter,
         "ia3_l', without peft_type IA3 in adapter_config.json"),
        (ONE | pair(V, 1, 8, 4), {}, InvalidAdapter, "lora_A.weight' with peft_type IA3; expected tensors ia3_l alone"),
        ({f"{PEFT}model.embed_tokens.base_layer.weight": np.ones((32, 8), "float32")}, {}, InvalidAdapter, "no tensor"),
        (ONE | {f"{PEFT}{K}.lora_magnitude_vector": np.ones(4, "float32")}, {"use_dora": True}, IncompatibleAdapter,
         "without use_dora"),
        (USUAL | {f"{PEFT}{K}.ia3_l.default": np.ones((4, 1), "float32")}, {}, InvalidAdapter, "two tensors 'ia3_l'"),
        (USUAL | {f"{PEFT}{K}.ia3_l.default": np.ones((1, 8), "float32")}, {}, InvalidAdapter, "two tensors 'ia3_l of"),
        ({f"{PEFT}{K}.ia3_l": np.ones(4, "float32")}, {}, InvalidAdapter, r"shape \[4\]; expected shape \[4, 1\]"),
        ({f"{PEFT}{K}.ia3_l": np.ones((4, 2), "float32")}, {}, InvalidAdapter, r"\[4, 2\]; expected shape \[4, 1\]"),
        ({f"{PEFT}{K}.ia3_l": np.ones((1, 4, 1), "float32")}, {}, InvalidAdapter, r"expected shape \[1, 1\]"),
        (factors((K, 5), (V, 4), inputs=(DOWN, 12)), {}, IncompatibleAdapter, "of 5 values; expected 4"),
        (factors((K, 4), (V, 4), inputs=(DOWN, 8)), {}, IncompatibleAdapter, "of 8 values; expected 12"),
        (factors((V, 4), inputs=(K, 8)), {}, IncompatibleAdapter, "k_proj.ia3_l'.*inputs of a gated MLP's down_p"),
        (factors(("model.embed_tokens", 8)), {}, IncompatibleAdapter, "embed_tokens.ia3_l'.*linear layers"),
        (factors((K, 4), inputs=(DOWN, 12)), {}, IncompatibleAdapter, "no tensors for 1 modules.*v_proj"),
        (USUAL | {f"{PEFT}{K}.ia3_l": np.full((4, 1), 1e6, "float32")}, {}, InvalidAdapter, "numbers up to 1e[+]06"),
        (USUAL, {"target_modules": ...}, InvalidAdapter, "no key 'target_modules'"),
        (USUAL, {"modules_to_save": ["lm_head"]}, IncompatibleAdapter, "modules_to_save lm_head"),
    ],
    ids=[
        *("LORA", "pair", "none", "DoRA", "two", "two sides", "1D", "2 columns", "3D", "size", "size of inputs"),
        *("inputs elsewhere", "embedding", "lost", "large", "no targets", "saved"),
    ],
)  # fmt: skip
def test_what_no_engine_computes_as_peft_is_refused(
    tmp_path: Path, tensors: dict[str, Any], config: dict[str, object], kind: type[LoRAPluginsError], says: str
) -> None:
    refusal(tmp_path, tensors, SERVES, kind=kind, says=says, **{**CONFIG, **config})


@pytest.mark.parametrize("factor", ["", "model.layers.0.mlp.gone"], ids=["not gated", "up_proj left out"])
def test_inputs_of_another_mlp_are_refused(tmp_path: Path, factor: str) -> None:
    base = serving(GATED | {DOWN: ModulePlace(DOWN, ModuleKind.LINEAR, 12, 8, factor=factor)})
    refusal(tmp_path, USUAL, base, says=r"down_proj.ia3_l'.*gated MLP's down_proj.*merge the adapter", **CONFIG)


def test_an_engine_without_vectors_says_why_before_a_load(tmp_path: Path) -> None:
    base = base_of(GATED, without_vectors="as the kernels of vLLM compute no more")
    refusal(tmp_path, USUAL, base, says=r"peft_type IA3.*as the kernels of vLLM compute no more", **CONFIG)


def test_a_classifiers_whole_head_goes_with_the_factors(tmp_path: Path) -> None:
    places = GATED | {"score": ModulePlace("score", ModuleKind.CLASSIFIER, 8, 3)}
    head = {f"{PEFT}score.weight": np.ones((3, 8), "float32")}
    verified = judged(tmp_path, USUAL | head, serving(places), modules_to_save=["classifier", "score"])
    assert [one.name for one in verified.weights.others] == list(head)


def converted(tmp_path: Path, tensors: dict[str, Any], places: Any) -> dict[str, np.ndarray]:
    _, made, _ = convert(tmp_path, tensors, serving(places), **{**CONFIG, "target_modules": ".*"})
    return made


def test_factors_of_a_fused_module_are_split(tmp_path: Path) -> None:
    tensors = factors((BOTH, 24), (QKV, 16))
    made = converted(tmp_path, tensors, GATED)
    assert made.keys() == {f"{PEFT}{name}.ia3_l" for name in (FIRST, UP, LAYER.format(0, "q_proj"), K, V)}
    assert np.array_equal(made[f"{PEFT}{UP}.ia3_l"], tensors[f"{PEFT}{BOTH}.ia3_l"][12:])
    assert np.array_equal(made[f"{PEFT}{V}.ia3_l"], tensors[f"{PEFT}{QKV}.ia3_l"][12:])


def test_factors_of_all_parts_are_joined(tmp_path: Path) -> None:
    tensors = factors((FIRST, 12), (UP, 12))
    made = converted(tmp_path, tensors, FUSED)
    assert made.keys() == {f"{PEFT}{BOTH}.ia3_l"}
    assert np.array_equal(made[f"{PEFT}{BOTH}.ia3_l"], np.concatenate([*tensors.values()]))
    with pytest.raises(IncompatibleAdapter, match=r"up_proj.ia3_l'.*in another layout.*vectors of all parts"):
        converted(tmp_path / "some", factors((UP, 12)), FUSED)


def test_names_in_keys_are_taken_out_of_split_modules(tmp_path: Path) -> None:
    """`.ia3_l.default`, as a state dict has it; a tensor in its place keeps its name."""
    tensors = {f"{name}.default": one for name, one in factors((BOTH, 24), inputs=(DOWN, 12)).items()}
    made = converted(tmp_path, tensors, GATED)
    assert made.keys() == {f"{PEFT}{FIRST}.ia3_l", f"{PEFT}{UP}.ia3_l", f"{PEFT}{DOWN}.ia3_l.default"}
    assert made[f"{PEFT}{DOWN}.ia3_l.default"].shape == (1, 12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (PEFT, f"{PEFT}_orig_mod."),
        (PEFT, f"_orig_mod.{PEFT}"),
        ("self_attn.", "self_attn._orig_mod."),
        (f"{PEFT}model.", PEFT),
    ],
)
def test_factors_under_wrappers_and_of_automodel_are_renamed(tmp_path: Path, old: str, new: str) -> None:
    tensors = {name.replace(old, new): one for name, one in USUAL.items()}
    made = converted(tmp_path, tensors, GATED)
    assert made.keys() == USUAL.keys() != tensors.keys()
    assert all(np.array_equal(made[name], one) for name, one in USUAL.items())
    other_size = {name.replace(old, new): one for name, one in factors((K, 5)).items()}
    refusal(tmp_path, other_size, SERVES, kind=IncompatibleAdapter, **CONFIG)


def test_factors_in_two_files_are_joined_into_one(tmp_path: Path) -> None:
    _, made, _ = convert(tmp_path, {}, SERVES, files=sharded(adapter_files(USUAL, **CONFIG), USUAL))
    assert made.keys() == USUAL.keys()
    assert all(np.array_equal(made[name], one) for name, one in USUAL.items())


def test_experts_factors_are_refused_by_name(tmp_path: Path) -> None:
    tensors = factors(("model.layers.0.mlp.experts.0.w2", 8))
    one = adapter_files(tensors, **CONFIG)
    for name, files in (("one", one), ("two", sharded(one, tensors))):
        refusal(tmp_path / name, files, SERVES, says=r"experts.0.w2.ia3_l' \(peft_type IA3\).*linear layers")
