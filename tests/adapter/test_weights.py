"""Tensors: every A with its B, and the ranks of the configuration."""

from __future__ import annotations

import pytest

from lora_plugins.adapter.config import parse_config
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.weights import Weights, pair_weights
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter
from tests.make import PEFT, config_bytes

Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.0.self_attn.v_proj"


def tensor(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, "F32", shape, 0, 0)


def both(module: str = Q, rank: int = 4, prefix: str = "base_model.model.") -> list[TensorInfo]:
    return [
        tensor(f"{prefix}{module}.lora_A.weight", rank, 8),
        tensor(f"{prefix}{module}.lora_B.weight", 8, rank),
    ]


def paired(*tensors: TensorInfo, **changes: object) -> Weights:
    return pair_weights(tensors, parse_config(config_bytes(**changes)))


def test_a_and_b_are_paired_under_their_modules_name():
    weights = paired(*both(Q), *reversed(both(V)))
    assert [pair.module for pair in weights.pairs] == [Q, V]
    assert [(pair.a.shape, pair.b.shape) for pair in weights.pairs] == [((4, 8), (8, 4))] * 2


@pytest.mark.parametrize("times", [0, 1, 2])
def test_pefts_prefix_may_be_missing_or_stand_twice(times):
    assert paired(*both(prefix="base_model.model." * times)).pairs[0].module == Q


def test_embeddings_are_paired():
    a, b = tensor("base_model.model.model.wte.lora_embedding_A", 4, 32), tensor("model.wte.lora_embedding_B", 8, 4)
    (pair,) = paired(a, b, target_modules=["wte"]).pairs
    assert (pair.module, pair.a, pair.b) == ("model.wte", a, b)


@pytest.mark.parametrize("side", [0, 1])
def test_one_side_alone_is_refused(side):
    with pytest.raises(InvalidAdapter, match=f"lora_{'AB'[side]} of module '{Q}' alone"):
        paired(*both(V), both(Q)[side])


def test_one_side_twice_and_no_pair_are_refused():
    with pytest.raises(InvalidAdapter, match="two A tensors"):
        paired(*both(Q), *both(Q, prefix=""))
    with pytest.raises(InvalidAdapter, match="no pair"):
        paired()


@pytest.mark.parametrize(
    "name",
    [
        f"base_model.model.{Q}.weight",
        f"base_model.model.{Q}.bias",
        f"base_model.model.{Q}.lora_magnitude_vector",  # DoRA's, without its key
        f"base_model.model.{Q}.lora_B.bias",
        f"base_model.model.{Q}.lora_A.a.b.weight",
        "base_model.model.lora_A.weight.x",
        "base_model.model..lora_A.weight",
        ".lora_A.weight",
        "lm_head.weight",
    ],
)
def test_a_tensor_without_lora_in_its_name_is_refused(name):
    with pytest.raises((IncompatibleAdapter, InvalidAdapter)) as caught:
        paired(*both(), tensor(name, 8, 8))
    assert name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") in caught.value.found


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", (2, 8),
         "trained token embeddings.*trainable_token_indices again"),
        (f"{Q}.lora_velora_embed", (8,), "of VeLoRA.*remove the tensors named lora_velora_embed"),
        ("score.weight", (2, 8), r"score\.weight"),
    ],
)  # fmt: skip
def test_tensors_beside_pairs_are_named_with_what_to_do(name, shape, says):
    with pytest.raises(IncompatibleAdapter, match=says):
        paired(*both(), tensor(PEFT + name, *shape))


def test_the_adapters_name_in_keys_is_read():
    """A state dict that was saved without PEFT's own function."""
    weights = paired(
        tensor(f"base_model.model.{Q}.lora_A.default.weight", 4, 8),
        tensor(f"base_model.model.{Q}.lora_B.default.weight", 8, 4),
        tensor("base_model.model.model.wte.lora_embedding_A.default", 4, 32),
        tensor("base_model.model.model.wte.lora_embedding_B.default", 8, 4),
    )
    assert [pair.module for pair in weights.pairs] == [Q, "model.wte"]
    assert weights.name_in_keys == "default"


@pytest.mark.parametrize("shape", [(4,), (4, 8, 1, 1), (4, 8, 3)])
def test_convolutions_are_refused(shape):
    with pytest.raises(IncompatibleAdapter, match="two dimensions"):
        paired(tensor(f"{Q}.lora_A.weight", *shape), tensor(f"{Q}.lora_B.weight", 8, 4))


@pytest.mark.parametrize(("rank_a", "rank_b"), [(4, 8), (8, 4), (8, 8), (1, 4)])
def test_ranks_must_be_those_of_the_configuration(rank_a, rank_b):
    with pytest.raises(InvalidAdapter, match=f"rank {rank_a} in .* and {rank_b} in .*expected rank 4"):
        paired(tensor(f"{Q}.lora_A.weight", rank_a, 8), tensor(f"{Q}.lora_B.weight", 8, rank_b))


def test_rank_pattern_decides_where_it_matches():
    pattern = {"q_proj": 8}
    assert paired(*both(), alpha_pattern={"q_proj": 64}).pairs, "an alpha changes no rank"
    assert len(paired(*both(Q, 8), *both(V, 4), rank_pattern=pattern).pairs) == 2
    with pytest.raises(InvalidAdapter, match="expected rank 8"):
        paired(*both(Q, 4), rank_pattern=pattern)
    with pytest.raises(InvalidAdapter, match="expected rank 4"):
        paired(*both(V, 8), rank_pattern=pattern)
    with pytest.raises(InvalidAdapter, match="rank_pattern"):
        paired(*both(Q), rank_pattern={"(?R)": 8})


@pytest.mark.parametrize("targets", [["v_proj"], r".*\.v_proj", ["query_key_value"], [], "(?R)", ["q_proj"], None])
def test_what_targets_say_is_not_compared_with_weights(targets):
    """VLLM reads the weights: Megatron's names, an empty list, an expression for a renamed tree are served."""
    assert paired(*both(Q), target_modules=targets).pairs[0].module == Q


def test_a_configured_classifier_head_is_accepted():
    head = [tensor("base_model.model.score.weight", 2, 8), tensor("base_model.model.score.bias", 2)]
    assert len(paired(*both(), *head, modules_to_save=["score"]).pairs) == 1


def test_copies_of_the_base_models_embeddings_are_set_aside():
    copied = tensor("base_model.model.model.embed_tokens.base_layer.weight", 32, 8)
    weights = paired(*both(), copied)
    assert weights.others == (copied,)
    assert len(weights.pairs) == 1


def test_fused_experts_keep_their_own_layout():
    module = "model.layers.0.mlp.experts"
    weights = paired(
        tensor(f"{module}.lora_A.weight", 16, 8),
        tensor(f"{module}.lora_B.weight", 8, 16, 1),
        target_parameters=["mlp.experts.down_proj"],
    )
    assert weights.pairs[0].is_experts
