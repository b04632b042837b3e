"""Names of wrappers, of `AutoModel` and of a text model alone are converted where all of them then fit, or refused."""

from __future__ import annotations

import msgspec
import pytest

from lora_plugins.adapter.model_modules import ModuleKind, ModulePlace, Unadapted
from tests.adapter.layouts.converted import FUSED, MLP, PARTS, base_of, convert, delta
from tests.adapter.verdicts import refusal
from tests.make import BASE, LAYER, MODULES, PEFT, pair, weights

COMPILED = "'_orig_mod.' of torch.compile taken out of keys"


def renamed(tensors, old, new):
    return {name.replace(old, new, 1): array for name, array in tensors.items()}


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        (PEFT, f"_orig_mod.{PEFT}", COMPILED),
        (PEFT, f"{PEFT}_orig_mod.", COMPILED),
        ("self_attn.", "self_attn._orig_mod.", COMPILED),
        (
            "self_attn.",
            "_checkpoint_wrapped_module.self_attn.",
            "'_checkpoint_wrapped_module.' of checkpoint_wrapper taken out of keys",
        ),
        (
            f"{PEFT}model.layers.",
            f"_fsdp_wrapped_module.{PEFT}_fsdp_wrapped_module.model.layers.",
            "'_fsdp_wrapped_module.' of FSDP taken out of keys",
        ),
        (PEFT, f"module.{PEFT}", "'module.' of DistributedDataParallel or DeepSpeed taken out of keys"),
        (PEFT, "module.", "'module.' of DistributedDataParallel or DeepSpeed taken out of keys"),
        (f"{PEFT}model.", PEFT, "'model.' put before keys"),
        (f"{PEFT}model.", f"_orig_mod.{PEFT}", f"{COMPILED}, 'model.' put before keys"),
    ],
)
def test_names_of_wrappers_and_of_automodel_are_converted(tmp_path, old, new, change):
    """torch 2.10: `OptimizedModule._orig_mod` (_dynamo/eval_frame.py), `checkpoint_wrapper.py`, `fully_shard`'s
    `FSDP_WRAPPED_MODULE`, `DistributedDataParallel.module`. Each was refused as trained on another base model.
    """
    verified, made, target = convert(tmp_path, renamed(weights(), old, new), BASE)
    assert verified.conversion.changes == (f"{change} (4 modules)",)
    assert made.keys() == weights().keys()
    module = LAYER.format(1, "v_proj")
    assert (delta(made, module, target / "adapter_config.json") == product(weights(), module)).all()


def product(tensors, module):
    a, b = (tensors[f"{PEFT}{module}.lora_{side}.weight"].astype("float64") for side in "AB")
    return b @ a * 2


def test_a_wrapper_around_some_layers_only_is_converted(tmp_path):
    tensors = renamed(weights(), "layers.1.", "layers.1._orig_mod.")
    verified, made, _ = convert(tmp_path, tensors, BASE)
    assert verified.conversion.changes == (f"{COMPILED} (2 modules)",)
    assert made.keys() == weights().keys()


def test_fused_modules_under_a_wrapper_are_split_too(tmp_path):
    module = MLP.format(0, "gate_up_proj")
    tensors = renamed(pair(module, 4, 8, 24), PEFT, f"_orig_mod.{PEFT}")
    verified, made, _ = convert(tmp_path, tensors, base_of({**MODULES.places, **PARTS}))
    assert set(verified.conversion.changes) == {
        f"{COMPILED} (1 modules)",
        "gate_up_proj split into gate_proj, up_proj (2 modules)",
    }
    assert len(made) == 4


def test_a_wrapper_whose_modules_do_not_fit_is_named(tmp_path):
    tensors = renamed(pair(LAYER.format(0, "q_proj"), 4, 16, 8), PEFT, f"_orig_mod.{PEFT}")
    error = refusal(tmp_path, tensors)
    assert "with '_orig_mod.' of torch.compile" in error.found
    assert "save it again from the model that the wrapper holds" in error.remedy
    assert "take these out of its keys" in error.remedy


def test_a_module_beside_the_wrapped_ones_keeps_all_refused(tmp_path):
    tensors = renamed(weights(), PEFT, f"{PEFT}_orig_mod.") | pair("encoder.q_proj", 4, 8, 8)
    assert "'_orig_mod.' of torch.compile" in refusal(tmp_path, tensors).found


def test_one_module_wrapped_and_bare_is_refused(tmp_path):
    tensors = weights() | renamed(pair(LAYER.format(0, "q_proj"), 4, 8, 8), PEFT, f"_orig_mod.{PEFT}")
    assert "'_orig_mod.' of torch.compile" in refusal(tmp_path, tensors).found


def test_a_pattern_that_only_the_bare_name_matches_is_refused(tmp_path):
    """Whether it matched in training depends on which came first, PEFT or the wrapper."""
    tensors = renamed(weights(), "self_attn.", "self_attn._orig_mod.")
    error = refusal(tmp_path, tensors, alpha_pattern={"self_attn.q_proj": 2})
    assert "does not match" in error.found
    tensors = renamed(weights(), PEFT, f"_orig_mod.{PEFT}")
    verified, _, _ = convert(tmp_path, tensors, BASE, alpha_pattern={"self_attn.q_proj": 2})
    assert {pair.alpha for pair in verified.conversion.weights.pairs} == {2, 8}


def below(prefix, places=MODULES.places, **changes):
    """The text model's modules where a multimodal model has them, under vLLM before 0.33."""
    return {
        prefix + name.removeprefix("model."): msgspec.structs.replace(place, **changes)
        for name, place in places.items()
    }


HEAD = {"lm_head": ModulePlace("lm_head", ModuleKind.HEAD, 8, 32)}
TOWER = below("model.vision_model.encoder.", in_features=6, out_features=6)


@pytest.mark.parametrize("prefix", ["model.text_model.", "language_model.model.", "language_model."])
def test_a_text_models_adapter_lands_in_the_model_around_it(tmp_path, prefix):
    """Idefics3 has `model.text_model.`, LLaVA and Qwen3-VL `language_model.model.` in vLLM 0.32."""
    tensors = weights() | pair("lm_head", 4, 8, 32)
    verified, made, _ = convert(tmp_path, tensors, base_of({**below(prefix), **TOWER, **HEAD}))
    assert verified.conversion.changes == (f"'model.' in keys is now '{prefix}' (4 modules)",)
    assert made.keys() == {*renamed(weights(), f"{PEFT}model.", PEFT + prefix), *pair("lm_head", 4, 8, 32)}


def test_a_text_models_head_goes_beside_its_layers(tmp_path):
    places = {**below("language_model.model."), "language_model.lm_head": HEAD["lm_head"]}
    _, made, _ = convert(tmp_path, weights() | pair("lm_head", 4, 8, 32), base_of(places))
    assert f"{PEFT}language_model.lm_head.lora_A.weight" in made


@pytest.mark.parametrize(
    "places",
    [
        below("thinker.model.") | below("talker.model."),
        below("language_model.model.", out_features=9),
        {name: place for name, place in below("language_model.model.").items() if ".1." not in name},
    ],
    ids=["two prefixes", "other sizes", "fewer layers"],
)
def test_no_prefix_or_two_that_fit_are_refused(tmp_path, places):
    assert "4 of 4 modules that the model does not have" in refusal(tmp_path, weights(), base_of(places)).found


def test_a_layer_too_many_is_not_moved_elsewhere(tmp_path):
    places = {**MODULES.places, "draft.layers.2.self_attn.q_proj": MODULES.places[LAYER.format(0, "q_proj")]}
    tensors = weights() | pair(LAYER.format(2, "q_proj"), 4, 8, 8)
    assert "1 of 5 modules" in refusal(tmp_path, tensors, base_of(places)).found


def test_a_module_that_the_engine_leaves_out_is_not_moved(tmp_path):
    unadapted = {LAYER.format(0, "q_proj"): Unadapted.TARGET}
    base = base_of(below("draft."), unadapted=unadapted)
    error = refusal(tmp_path, pair(LAYER.format(0, "q_proj"), 4, 8, 8), base)
    assert "--lora-target-modules" in error.found


def test_parts_join_under_another_prefix(tmp_path):
    places = {name.replace("model.", "model.text_model.", 1): place for name, place in FUSED.items()}
    tensors = pair(LAYER.format(0, "q_proj"), 4, 8, 8) | pair(LAYER.format(0, "v_proj"), 4, 8, 4)
    _, made, _ = convert(tmp_path, tensors, base_of(places))
    assert list(made) == [f"{PEFT}model.text_model.layers.0.self_attn.qkv_proj.lora_{side}.weight" for side in "AB"]
