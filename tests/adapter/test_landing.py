"""Every tensor of an adapter lands in a module of the engine's model, with its sizes, or the adapter is refused."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.adapter.complete import ReadPair
from lora_plugins.adapter.landing import Model, check_landing, check_pairs
from lora_plugins.adapter.model_modules import ModelModules, ModuleKind, ModulePlace, Unadapted
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.weights import LoraPair, Weights
from lora_plugins.errors import IncompatibleAdapter
from tests.adapter.test_fit import lora
from tests.make import LAYER, MODULES, read_name

Q, V = LAYER.format(0, "q_proj"), LAYER.format(0, "v_proj")
ABOUT = "base model a, served is b"


def modules(**places: ModulePlace) -> ModelModules:
    return dataclasses.replace(MODULES, places={**MODULES.places, **places})


def check(*pairs: LoraPair, of: ModelModules = MODULES, refuse_unmatched: bool = True) -> tuple[str, ...]:
    return check_landing(Weights(pairs), Model(of, read_name), ABOUT, refuse_unmatched=refuse_unmatched)


def test_parts_of_a_packed_module_land():
    assert check(lora(Q), lora(LAYER.format(1, "k_proj"), 8, 4), lora(V, 8, 4)) == ()


@pytest.mark.parametrize("pair", [lora(Q, 16, 8), lora(Q, 8, 16), lora(V, 8, 8), lora(V, 4, 4)])
def test_other_sizes_than_the_modules_are_refused(pair):
    with pytest.raises(IncompatibleAdapter, match=pair.module) as caught:
        check(lora(), pair)
    assert ABOUT in caught.value.found
    assert "inputs and" in caught.value.expected


@pytest.mark.parametrize(
    "prefix", ["language_model.", "encoder.", "_orig_mod.", "model.", "base_model.model."], ids=lambda prefix: prefix
)
def test_another_prefix_is_another_module(prefix):
    """Before, names were compared from the first layer number on: served, and answered by the base model alone."""
    with pytest.raises(IncompatibleAdapter) as caught:
        check(lora(prefix + Q))
    assert caught.value.found.startswith("1 of 1 modules that the model does not have, such as '")
    assert f"'{Q}'" in caught.value.expected


def test_two_pairs_for_one_module_are_refused():
    """As OPT has it, whose `decoder.` is `model.decoder.` in vLLM, which takes the last."""

    def read(name: str) -> tuple[str, bool]:
        module, is_a = read_name(name)
        return module.removeprefix("decoder."), is_a

    twice = Weights((lora(Q), lora("decoder." + Q)))
    with pytest.raises(IncompatibleAdapter, match=f"two pairs for module '{Q}'"):
        check_landing(twice, Model(MODULES, read), ABOUT)


def test_an_embeddings_tensors_land_in_no_other_module():
    """VLLM compares an embedding's A with the vocabulary, whatever module it is for."""
    looked_up = dataclasses.replace(lora(Q), is_looked_up=True)
    with pytest.raises(IncompatibleAdapter, match=f"an embedding's tensors for module '{Q}'"):
        check(looked_up)
    assert check(dataclasses.replace(lora("model.embed_tokens", 32, 8), is_looked_up=True)) == ()
    assert check(looked_up, of=dataclasses.replace(MODULES, vocabulary=8)) == ()


def test_half_an_adapter_is_refused_or_served_with_a_note():
    half = lora(), lora("encoder." + V, 8, 4)
    with pytest.raises(IncompatibleAdapter, match="1 of 2 modules") as caught:
        check(*half)
    assert "LORA_PLUGINS_UNMATCHED=warn" in caught.value.remedy
    (note,) = check(*half, refuse_unmatched=False)
    assert note.startswith("served without 1 of 2 modules")
    with pytest.raises(IncompatibleAdapter, match="1 of 1"):
        check(half[1], refuse_unmatched=False)


@pytest.mark.parametrize(
    ("why", "found", "remedy"),
    [
        (Unadapted.TOWER, "need --enable-tower-connector-lora", "server with --enable-tower-connector-lora"),
        (Unadapted.TARGET, "--lora-target-modules leaves out", "server with these in --lora-target-modules"),
        (Unadapted.KIND, "vLLM cannot adapt in this model", "train it without these modules"),
        (Unadapted.UNCALLED, "never computes with an adapter", "merge the adapter into the model"),
        (None, "the model does not have", "the base model that it was trained on"),
    ],
)
def test_what_does_not_land_is_named_with_the_reason(why, found, remedy):
    name = "visual.blocks.0.attn.qkv"
    of = dataclasses.replace(MODULES, unadapted={name: why} if why else {})
    with pytest.raises(IncompatibleAdapter) as caught:
        check(lora(), lora(name), of=of)
    assert caught.value.found.startswith("1 of 2 modules ")
    assert f"{found}, such as '{name}'" in caught.value.found
    assert remedy in caught.value.remedy
    assert "LORA_PLUGINS_UNMATCHED=warn" in caught.value.remedy
    (note,) = check(lora(), lora(name), of=of, refuse_unmatched=False)
    assert note.startswith("served without 1 of 2 modules ")


def test_a_stage_of_a_pipeline_knows_what_it_never_computes():
    of = dataclasses.replace(MODULES, unadapted={"kv_b_proj": Unadapted.UNCALLED, "tower": Unadapted.TOWER})
    here, later, tower, uncalled = (
        ReadPair(name, name, (4, 8), (8, 4), 4) for name in (Q, "later", "tower", "kv_b_proj")
    )
    assert check_pairs([here, later, tower], of, is_whole_model=False) == ()
    with pytest.raises(IncompatibleAdapter, match=r"^.*1 of 3 modules that this engine never computes.*'kv_b_proj'"):
        check_pairs([here, later, uncalled], of, is_whole_model=False)
    (note,) = check_pairs([here, later, uncalled], of, is_whole_model=False, refuse_unmatched=False)
    assert "'kv_b_proj'" in note


def test_each_reason_is_named_once_with_its_remedy():
    towers = [f"visual.{n}" for n in range(4)]
    of = dataclasses.replace(MODULES, unadapted=dict.fromkeys(towers, Unadapted.TOWER) | {"mlp.experts": "target"})
    names = [*towers, "mlp.experts.7.gate_proj", "mlp.experts.base_layer", "layers.99.x"]
    with pytest.raises(IncompatibleAdapter) as caught:
        check(*map(lora, names), of=of)
    assert [part.split(" modules ")[0] for part in caught.value.found.split(" and ")[:3]] == [
        "4 of 7", "2 of 7", "1 of 7"
    ]  # fmt: skip
    assert caught.value.remedy.count(";") == 2


def test_a_text_models_adapter_lands_in_the_multimodal_model():
    """From 0.33 on; `LoRAModelManager._get_text_lora_names` has the rule, the other way round."""
    place = ModulePlace("language_model.model.layers.0.q_proj", ModuleKind.LINEAR, 8, 8)
    of = modules(
        **{place.module: place, "language_model.lm_head": ModulePlace("language_model.lm_head", ModuleKind.HEAD, 8, 64)}
    )
    names = ["model.layers.0.q_proj", "lm_head"]
    with pytest.raises(IncompatibleAdapter, match="2 of 2"):
        check(lora(names[0]), lora(names[1], 8, 64), of=of)
    of = dataclasses.replace(of, text_prefix="language_model")
    assert check(lora(names[0]), lora(names[1], 8, 64), of=of) == ()
    bare = modules(**{"text.layers.0.q_proj": msgspec.structs.replace(place, module="text.layers.0.q_proj")})
    bare = dataclasses.replace(bare, text_prefix="text")
    assert check(lora("model.layers.0.q_proj"), of=bare) == check(lora("layers.0.q_proj"), of=bare) == ()
    with pytest.raises(IncompatibleAdapter, match=r"'model\.model\.layers"):
        check(lora("model.model.layers.0.q_proj"), of=of)


def test_a_head_may_know_fewer_words_and_no_more():
    of = modules(lm_head=ModulePlace("lm_head", ModuleKind.HEAD, 8, 64, max_out_features=True))
    assert check(lora("lm_head", 8, 64), of=of) == check(lora("lm_head", 8, 60), of=of) == ()
    with pytest.raises(IncompatibleAdapter, match="65 outputs"):
        check(lora("lm_head", 8, 65), of=of)


@pytest.mark.parametrize(
    ("pair", "place"),
    [
        (lora(prefix=""), None),
        (lora("in_proj", 7, 9), ModulePlace("in_proj_qkvz")),  # sizes that only the engine knows are left to it
        (lora("mlp.gate", 8, 4), ModulePlace("mlp.gate", ModuleKind.LINEAR, 8, 4)),  # a router, like any linear module
    ],
)
def test_these_land_too(pair, place):
    assert check(pair, of=modules(**{pair.module: place} if place else {})) == ()


def test_what_vllm_skips_is_not_looked_for():
    of = dataclasses.replace(MODULES, skipped=("mtp.",))
    assert check(lora(), lora("mtp.layers.0.q_proj"), of=of) == ()
    with pytest.raises(IncompatibleAdapter, match="0 of 0"):
        check(lora("mtp.layers.0.q_proj"), of=of)


def test_pooling_models_are_also_known_without_their_first_prefix():
    name = Q.removeprefix("model.")
    assert check(lora(name), of=dataclasses.replace(MODULES, without_model_prefix=True)) == ()
    with pytest.raises(IncompatibleAdapter):
        check(lora(name))


def test_a_resized_vocabulary_is_refused():
    def copied(*shape: int) -> Weights:
        return Weights((lora(),), (TensorInfo("model.embed_tokens.base_layer.weight", "F32", shape, 0, 0),))

    model = Model(MODULES, read_name)
    assert check_landing(copied(32, 8), model, ABOUT) == ()
    with pytest.raises(IncompatibleAdapter, match="resized vocabulary"):
        check_landing(copied(33, 8), model, ABOUT)


@given(st.text(max_size=40), st.integers(1, 64), st.integers(1, 64))
def test_any_module_lands_with_its_sizes_or_is_refused(module, wide, high):
    place = MODULES.place(module)
    if place is not None and (wide, high) == (place.in_features, place.out_features):
        assert check(lora(module, wide, high)) == ()
    else:
        with pytest.raises(IncompatibleAdapter):
            check(lora(module, wide, high))
