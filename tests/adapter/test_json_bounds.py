"""JSON of too many values, or too deep, is refused before a parser sees it; no real file is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.adapter import files
from lora_plugins.adapter.config import parse_config
from lora_plugins.adapter.files import MAX_DEPTH, MAX_VALUES, check_json
from lora_plugins.adapter.weight_files import read_index
from lora_plugins.errors import InvalidAdapter
from tests.make import config


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"[" + b"[]," * MAX_VALUES + b"1]", "more than"),
        (b"[" * (MAX_DEPTH + 1), "nests too deep"),
        (b'{"a":' * (MAX_DEPTH + 1), "nests too deep"),
        (b'["\\"", ' * (MAX_DEPTH + 1), "nests too deep"),
    ],
)
def test_it_is_refused_unparsed(data, says, monkeypatch):
    with pytest.raises(ValueError, match=says):
        check_json(data)
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("it is parsed"))
    for parse in (parse_config, read_index):
        with pytest.raises(InvalidAdapter):
            parse(data)


@pytest.mark.parametrize(
    "data",
    [
        b'"' + b"[" * 1000 + b'"',
        b'"\\\\" ' + b'"\\"' + b"[" * 1000 + b'"',
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b"[]" * 1000,
        b"",
    ],
)
def test_brackets_in_texts_and_side_by_side_pass(data):
    check_json(data)


def test_a_list_of_every_expert_is_read():
    experts = [
        f"model.layers.{n}.mlp.experts.{e}.{p}_proj" for n in range(60) for e in range(384) for p in ("up", "down", "x")
    ]
    raw = config(target_modules=["q_proj"], rank_pattern=dict.fromkeys(experts, 8), alpha_pattern={})
    assert len(parse_config(json.dumps(raw).encode()).rank_pattern) == len(experts)


@given(st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_depth_is_that_of_the_parsed(value):
    def depth(one):
        inner = one if isinstance(one, list) else one.values() if isinstance(one, dict) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    found = depth(value)
    text = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "MAX_DEPTH", found)
        check_json(text)
        if found:
            patch.setattr(files, "MAX_DEPTH", found - 1)
            with pytest.raises(ValueError, match="deep"):
                check_json(text)
