"""adapter_config.json: read, refused by name, and never a parser's own error."""

from __future__ import annotations

import codecs
import dataclasses
import json
from importlib import metadata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_plugins.adapter.config import CONFIG_FILE, MAX_CONFIG_BYTES, MAX_RANK, AdapterConfig, parse_config
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter, LoRAPluginsError
from tests.make import config, config_bytes
from tests.repetitions import times

# PEFT feature: what switches it on. Each changes what an adapter computes, and vLLM does not compute it.
UNSUPPORTED = {
    "alora_invocation_tokens": [1, 2],
    "layer_replication": [[0, 2], [1, 3]],
    "use_bdlora": {"target_modules_bd_a": []},
    "use_qalora": True,
    "arrow_config": {"top_k": 1},
    "kasa_config": {"beta": 1},
    "monteclora_config": {"sample": 1},
}
INITS_THAT_CHANGE_THE_BASE = ["pissa", "PiSSA", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "unheard_of"]
PLAIN_INITS = [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica", "lora_ga"]
READ = {
    *("r", "lora_alpha", "target_modules", "base_model_name_or_path", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("modules_to_save", "peft_type", "peft_version", "bias", "init_lora_weights", "trainable_token_indices"),
    *("use_dora", "lora_bias", "exclude_modules", "layers_to_transform"),  # targets then say nothing about lost modules
}
# Keys of PEFT's LoraConfig that change no answer beside the tensors, and why.
WITHOUT_EFFECT = {
    **dict.fromkeys(("auto_mapping", "inference_mode", "revision", "task_type"), "how PEFT loads the base model"),
    **dict.fromkeys(("lora_dropout", "runtime_config", "megatron_config", "megatron_core"), "how PEFT trains"),
    **dict.fromkeys(("corda_config", "eva_config", "loftq_config", "lora_ga_config"), "see init_lora_weights"),
    **dict.fromkeys(("layers_pattern", "target_parameters"), "the names of the tensors say as much"),
    "ensure_weight_tying": "PEFT saves the pairs of both modules",
    "fan_in_fan_out": "the base model's weight is transposed, A and B are not",
    "qalora_group_size": "see use_qalora",
    "velora_config": "A is computed otherwise in training alone; its tensor is refused (test_weights.py)",
}


def test_what_peft_saves_is_read():
    parsed = parse_config(config_bytes(use_rslora=True, rank_pattern={"q_proj": 8}, alpha_pattern={"q_proj": 1.5}))
    assert parsed == AdapterConfig(
        rank=4,
        alpha=8.0,
        targets=frozenset({"q_proj", "v_proj"}),
        base_model="org/tiny",
        use_rslora=True,
        rank_pattern={"q_proj": 8},
        alpha_pattern={"q_proj": 1.5},
        trained=frozenset({"q_proj", "v_proj"}),
    )
    assert parsed.max_rank == 8


@pytest.mark.parametrize(("is_rslora", "scaling"), [(False, 0.5), (True, 2.0)])
def test_rslora_divides_alpha_by_the_ranks_root(is_rslora, scaling):
    assert parse_config(config_bytes(use_rslora=is_rslora)).scaling(16, 8.0) == scaling


def test_a_config_as_peft_itself_writes_it_is_read(tmp_path):
    """So that what is off is not taken for a feature."""
    from peft import LoraConfig

    of_peft = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], base_model_name_or_path="org/tiny")
    of_peft.save_pretrained(tmp_path)
    as_read = parse_config(config_bytes(paramwrapper_layout=metadata.version("peft")))
    assert parse_config((tmp_path / CONFIG_FILE).read_bytes()) == as_read


def test_each_field_of_pefts_configuration_has_been_judged():
    """A field that a new PEFT brings may change an adapter's computation: judge the field, then put it into a list."""
    from peft import LoraConfig

    judged = READ | {*UNSUPPORTED} | {*WITHOUT_EFFECT}
    assert {field.name for field in dataclasses.fields(LoraConfig)} == judged


@pytest.mark.parametrize("key", ["r", "lora_alpha", "target_modules"])
def test_a_missing_key_is_named(key):
    with pytest.raises(InvalidAdapter, match=f"no key '{key}'"):
        parse_config(config_bytes(**{key: ...}))


@pytest.mark.parametrize("key", ["base_model_name_or_path", "rank_pattern", "alpha_pattern", "modules_to_save"])
def test_a_key_that_may_be_missing_may_be_null(key):
    assert parse_config(config_bytes(**{key: ...})) == parse_config(config_bytes(**{key: None}))


@pytest.mark.parametrize(("key", "value"), UNSUPPORTED.items())
def test_a_feature_that_vllm_lacks_is_refused_by_name(key, value):
    with pytest.raises(IncompatibleAdapter, match=key):
        parse_config(config_bytes(**{key: value}))
    for off in (None, False, [], {}):
        assert parse_config(config_bytes(**{key: off})).rank == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_bdlora", {"nblocks": 2, "target_modules_bd_a": ["q_proj"]}), ("alora_invocation_tokens", [1])],
)
def test_the_remedy_is_to_merge_only_where_peft_merges(key, value):
    from peft import LoraConfig, inject_adapter_in_model
    from torch import nn

    model = nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False)})
    settings = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **{key: value})
    layer = inject_adapter_in_model(settings, model)["q_proj"]
    try:
        layer.merge()
    except (NotImplementedError, RuntimeError):
        remedy = f"train it again without {key}"
    else:
        remedy = "merge it into the base model"
    with pytest.raises(IncompatibleAdapter) as caught:
        parse_config(config_bytes(**{key: value}))
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("bias", bias) for bias in ("some", True, 1)],
        *[("init_lora_weights", init) for init in INITS_THAT_CHANGE_THE_BASE],
        *[("peft_type", kind) for kind in ("LOHA", "PROMPT_TUNING", 1, ["LORA"], {"a": 1})],
        *[("modules_to_save", modules) for modules in (["embed_tokens"], ["classifier", "lm_head"], ["score", ""])],
    ],
)
def test_what_vllm_does_not_compute_is_refused_by_name(key, value):
    with pytest.raises(IncompatibleAdapter, match=key):
        parse_config(config_bytes(**{key: value}))


@pytest.mark.parametrize(
    "changes",
    [
        *[{"init_lora_weights": init} for init in PLAIN_INITS],
        *[{"peft_type": kind} for kind in ("LORA", "lora", "Lora", "", None, ...)],
        {"r": 4.0},
    ],
    ids=str,
)
def test_what_changes_no_answer_is_not_looked_at(changes):
    assert parse_config(config_bytes(**changes)) == parse_config(config_bytes())


def test_classifier_heads_and_an_empty_base_model_are_read():
    heads = parse_config(config_bytes(modules_to_save=["classifier", "score"], base_model_name_or_path=""))
    assert (heads.modules_to_save, heads.base_model) == ({"classifier", "score"}, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("r", value) for value in (0, -1, 1.5, 0.0, "4", True, None, [4], MAX_RANK + 1, 10**400)],
        *[("lora_alpha", value) for value in (0, "8", True, None, [8], 10**400, float("nan"), float("inf"), -0.0)],
        *[("target_modules", value) for value in (1, True, {"q_proj": 1}, [1], ["q_proj", None])],
        *[("rank_pattern", value) for value in ([], "x", 1, {"q_proj": 0}, {"q_proj": "4"}, {"q_proj": 10**6})],
        *[("alpha_pattern", value) for value in ([8], "x", {"q_proj": None}, {"q_proj": float("nan")})],
        *[("modules_to_save", value) for value in ("score", {"score": 1}, [1], 1)],
        *[("base_model_name_or_path", value) for value in (1, ["a"], {}, True)],
        *[("use_rslora", value) for value in ("false", 1, [], 0.0)],
        *[("base_model_name_or_path", name) for name in ("/a\0b", "a\nb", "\ud800", "\x1b[2J", "x" * 5000)],
    ],
)
def test_a_value_of_the_wrong_kind_is_named(key, value):
    assert parse_config(config_bytes(r=MAX_RANK)).max_rank == MAX_RANK
    with pytest.raises(InvalidAdapter, match=key):
        parse_config(config_bytes(**{key: value}))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "line 1, column 1"),
        (b'{"r": 4,\n "x" 1}', "line 2, column 6"),
        (config_bytes()[:-1], "stops being JSON"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"[" * 100_000, "nests too deep"),
        (b'{"r": ' + b"9" * 10_000 + b"}", "number too long"),
        (b"[]", "a JSON array"),
        (b"null", "a JSON null"),
        (b"7", "a JSON number"),
        (b'"x"', "a JSON string"),
        (b"true", "a JSON boolean"),
        (codecs.BOM_UTF8 + b"<!DOCTYPE html>", "a web page"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else None,
)
def test_what_is_no_json_object_is_said_in_our_words(data, says):
    with pytest.raises(InvalidAdapter, match=says):
        parse_config(data)


def test_a_byte_order_mark_is_read_over():
    assert parse_config(codecs.BOM_UTF8 + config_bytes()) == parse_config(config_bytes())


def test_size_is_limited():
    padded = config_bytes() + b" " * (MAX_CONFIG_BYTES - len(config_bytes()))
    assert parse_config(padded).rank == 4
    with pytest.raises(InvalidAdapter, match=f"at most {MAX_CONFIG_BYTES}"):
        parse_config(padded + b" ")


def test_a_float_in_rank_pattern_is_refused_as_vllm_does():
    from vllm.lora.peft_helper import PEFTHelper

    data = config_bytes(rank_pattern={"q_proj": 8.0})
    with pytest.raises(ValueError, match="positive integer"):
        PEFTHelper.from_dict(json.loads(data))
    with pytest.raises(InvalidAdapter, match=r"rank_pattern\['q_proj'\] 8.0"):
        parse_config(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = [*config(), *UNSUPPORTED, "bias", "init_lora_weights", "modules_to_save", "rank_pattern", "alpha_pattern"]
KEYS += ["use_rslora", "target_parameters"]


ANY = st.one_of(
    st.dictionaries(st.sampled_from(KEYS), JSON).map(lambda changes: json.dumps({**config(), **changes}).encode()),
    st.binary(max_size=200),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.builds(
        lambda at, byte: config_bytes()[:at] + bytes([byte]) + config_bytes()[at + 1 :],
        st.integers(0, len(config_bytes()) - 1),
        st.integers(0, 255),
    ),
)


def assert_read_or_refused(data):
    try:
        parsed = parse_config(data)
    except LoRAPluginsError as error:
        str(error).encode()  # what is refused is said in text that a response can carry
    else:
        assert 1 <= parsed.rank <= parsed.max_rank <= MAX_RANK
        assert parsed.alpha or any(parsed.alpha_pattern.values())


@settings(max_examples=times(450, short=120))
@given(ANY)
def test_any_bytes_are_read_or_refused(data):
    assert_read_or_refused(data)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("depth", [100, 900, 980])
def test_deep_nesting_is_read_or_refused(key, depth):
    # Close to Python's own recursion limit, where printing a value can fail although parsing it did not.
    text = json.dumps({**config(), key: "@"}).replace('"@"', "[" * depth + "]" * depth)
    assert_read_or_refused(text.encode())
