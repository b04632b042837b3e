"""The configuration that engines read: known keys only, by which every module has what the adapter's own says."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.adapter.canonical import canonical_bytes, with_exact_patterns
from lora_plugins.adapter.config import AdapterConfig, parse_config
from lora_plugins.adapter.patterns import MAX_PATTERN_CHARACTERS, PatternBudget
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.weights import LoraPair, parameter_of
from tests.make import config_bytes

KNOWN = {
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules", "bias", "use_rslora"),
    *("rank_pattern", "alpha_pattern", "modules_to_save"),
}


def pairs(config: AdapterConfig, modules: list[str]) -> list[LoraPair]:
    deadline, rank_of, alpha_of = PatternBudget(), config.ranks(), config.alphas()
    info = TensorInfo("a", "F32", (1, 1), 0, 4)
    names = {module: parameter_of(module) for module in modules}
    return [
        LoraPair(module, info, info, rank_of(name, deadline), alpha_of(name, deadline))
        for module, name in names.items()
    ]


def canonical(config: AdapterConfig, modules: list[str]) -> AdapterConfig:
    """What is read of what was written."""
    return parse_config(canonical_bytes(with_exact_patterns(config, pairs(config, modules))))


def as_vllm_reads(config: AdapterConfig, module: str) -> tuple[int, float]:
    """`PEFTHelper.get_rank_and_scaling`'s rule, word for word (vllm/lora/peft_helper.py, 0.32)."""

    def match(patterns, usual):
        found = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", parameter_of(module))), None)
        return usual if found is None else patterns[found]

    return match(config.rank_pattern, config.rank), match(config.alpha_pattern, config.alpha)


def test_only_known_keys_are_written():
    original = config_bytes(unknown=[[]] * 1000, revision="x", loftq_config={"a": 1}, init_lora_weights="eva")
    text = canonical_bytes(parse_config(original))
    assert set(json.loads(text)) == KNOWN
    assert parse_config(text) == parse_config(original)


@pytest.mark.parametrize(
    "changes",
    [
        {"r": 4.0, "lora_alpha": 1.5},
        {"target_modules": ".*_proj", "use_rslora": True},
        {"target_modules": None, "base_model_name_or_path": ...},
        {"modules_to_save": ["score", "classifier"]},
        {"trainable_token_indices": [7, 3]},
        {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [0]}},
    ],
    ids=str,
)
def test_what_is_known_is_read_back(changes):
    config = parse_config(config_bytes(**changes))
    assert parse_config(canonical_bytes(config)) == config


def test_a_very_long_list_of_targets_is_left_open():
    config = parse_config(config_bytes(target_modules=[f"model.layers.{n}.q_proj" for n in range(10_000)]))
    assert parse_config(canonical_bytes(config)).targets is None


LAYERS = [f"model.layers.{n}.self_attn.{part}_proj" for n in range(12) for part in "qkvo"]


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        ({"q_proj": 8}, {"q_proj": 8}),
        ({".*q_proj|.*v_proj": 8}, {"q_proj|v_proj": 8}),
        ({r"layers\.\d+\..*": 4}, {}),  # the usual one
        ({"no_such": 99}, {}),
        ({r"model\.layers\.1\.self_attn\.q_proj": 8}, {r"model\.layers\.1\.self_attn\.q_proj": 8}),
    ],
)
def test_patterns_become_few_of_names_alone(patterns, wanted):
    config = parse_config(config_bytes(rank_pattern=patterns))
    found = canonical(config, LAYERS)
    for module in LAYERS:
        assert as_vllm_reads(found, module) == as_vllm_reads(config, module)
    assert dict(found.rank_pattern) == wanted


def test_ranks_of_every_module_are_a_pattern_for_each_rank():
    modules = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(40) for e in range(32)]
    config = parse_config(config_bytes(rank_pattern={module: 1 + n % 3 for n, module in enumerate(modules)}))
    found = canonical(config, modules)
    assert len(found.rank_pattern) < 15
    assert max(map(len, found.rank_pattern)) <= MAX_PATTERN_CHARACTERS
    of_module, no_time = found.ranks(), PatternBudget(0.0)
    assert [of_module(module, no_time) for module in modules] == [1 + n % 3 for n in range(len(modules))]


PARTS = st.sampled_from(["a", "b", "q_proj", "x-y", "(a+)+", "1", "experts", "base_layer", "é", "a|b", "\\"])
MODULES = st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=8, unique=True)


@given(MODULES, st.data())
def test_every_module_keeps_its_rank_and_alpha(modules, data):
    info = TensorInfo("a", "F32", (1, 1), 0, 4)
    modules = list({parameter_of(module): module for module in modules}.values())
    wanted = {
        module: (data.draw(st.sampled_from([4, 8, 16])), data.draw(st.sampled_from([8.0, 0.5]))) for module in modules
    }
    given_pairs = [LoraPair(module, info, info, *wanted[module]) for module in modules]
    written = canonical_bytes(with_exact_patterns(AdapterConfig(4, 8.0, None), given_pairs))
    found, deadline = parse_config(written), PatternBudget(30)
    for module, (rank, alpha) in wanted.items():
        assert as_vllm_reads(found, module) == (rank, alpha)
        assert found.ranks()(parameter_of(module), deadline) == rank
        assert found.alphas()(parameter_of(module), deadline) == alpha


@pytest.mark.parametrize(
    "ranks",
    [
        {"a.c.c.a": 8, "c.a": 16, "a": 8},
        {"b": 16, "a.a.b": 16, "a.b": 4},
        {"c": 8, "c.c": 16, "b.b.c.c": 8, "a.c.a.c": 8},
    ],
)
@pytest.mark.parametrize("usual", [4, 8, 16])
def test_names_that_end_with_others_keep_their_ranks(ranks, usual):
    info = TensorInfo("a", "F32", (1, 1), 0, 4)
    pairs_of = [LoraPair(module, info, info, rank, 8.0) for module, rank in ranks.items()]
    found = parse_config(canonical_bytes(with_exact_patterns(AdapterConfig(usual, 8.0, None), pairs_of)))
    assert {module: as_vllm_reads(found, module)[0] for module in ranks} == ranks


CHANGES = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"layers.1.*": 2}, "use_rslora": True}


@pytest.mark.parametrize("is_canonical", [True, False])
def test_vllms_own_helper_reads_it(tmp_path, is_canonical):
    helper = pytest.importorskip("vllm.lora.peft_helper").PEFTHelper
    if not hasattr(helper, "get_rank_and_scaling"):
        pytest.skip("a vLLM that reads no patterns")
    config = parse_config(config_bytes(**CHANGES))
    text = canonical_bytes(with_exact_patterns(config, pairs(config, LAYERS)))
    (tmp_path / "adapter_config.json").write_bytes(text if is_canonical else config_bytes(**CHANGES))
    read = helper.from_local_dir(str(tmp_path), None)
    for module in LAYERS:
        rank, alpha = as_vllm_reads(config, module)
        assert read.get_rank_and_scaling(module) == (rank, config.scaling(rank, alpha))
