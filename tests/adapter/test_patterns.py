"""Patterns: matched as PEFT matches them, and never for longer than their budget."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.adapter import patterns as patterns_module
from lora_plugins.adapter.patterns import MAX_PATTERN_CHARACTERS, PatternBudget, SuffixPatterns
from lora_plugins.errors import InvalidAdapter, LoRAPluginsError

MODULE = "model.layers.10.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (MODULE, True),
        (r".*\.q_proj", True),
        (r".*\.(q|v)_proj", True),
        (r"model\.layers\.1\d\..*", True),
        ("q_proj", False),  # the whole name, not a part of it
        (r".*\.k_proj", False),
        ("model", False),
    ],
)
def test_a_pattern_matches_the_whole_name(pattern, matches):
    assert PatternBudget().matches(pattern, MODULE, field="target_modules") is matches


@pytest.mark.parametrize("pattern", ["(", "[", "*", "a{2,1}", "(?P<a", "(?<=", r"\N{NO SUCH}", "(?1)", "(" * 5000])
def test_what_is_no_pattern_is_refused_by_its_field(pattern):
    with pytest.raises(InvalidAdapter, match="in target_modules, which is not a regular expression"):
        PatternBudget().matches(pattern, MODULE, field="target_modules")


@pytest.mark.parametrize("pattern", [r"(?:a|e|.|..|...)+[A-Z]", r"(.|\w)*(.|\w)*(.|\w)*[A-Z]", "(?R)"])
def test_catastrophic_backtracking_is_refused_within_the_budget(pattern):
    started = time.monotonic()
    with pytest.raises(InvalidAdapter, match=None if pattern == "(?R)" else r"more than 0\.2 s"):
        PatternBudget(0.2).matches(pattern, MODULE * 4, field="target_modules")
    assert time.monotonic() - started < 60


def test_all_matches_together_have_one_budget():
    # Each of these is quick; there are too many of them.
    patterns = {rf"nothing_{number}.*": number for number in range(20_000)}
    started = time.monotonic()
    deadline = PatternBudget(0.2)
    with pytest.raises(InvalidAdapter, match="rank_pattern"):
        [SuffixPatterns(patterns, "rank_pattern", None).value(MODULE, deadline) for _ in range(50)]
    assert time.monotonic() - started < 60


def test_a_rank_for_every_module_takes_none_of_the_budget():
    # What PEFT's EVA and AdaLoRA write: as many patterns as modules, here of a model of 126 layers.
    modules = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(126) for part in "qkvo"]
    patterns = SuffixPatterns({module: number for number, module in enumerate(modules)}, "rank_pattern", None)
    without_time = PatternBudget(0.0)
    assert [patterns.value(module, without_time) for module in modules] == list(range(len(modules)))


def test_a_pattern_too_long_is_refused_before_it_is_compiled(monkeypatch):
    pattern = "|".join(f"ab{number}" for number in range(100_000))
    monkeypatch.setattr(patterns_module.regex, "compile", lambda *_, **__: pytest.fail("it is compiled"))
    with pytest.raises(InvalidAdapter, match=f"at most {MAX_PATTERN_CHARACTERS}"):
        PatternBudget().matches(pattern, MODULE, field="target_modules")


@pytest.mark.parametrize(
    ("patterns", "module", "value"),
    [
        ({"q_proj": 1}, MODULE, 1),
        ({"self_attn.q_proj": 1}, MODULE, 1),
        ({MODULE: 1}, MODULE, 1),
        ({"proj": 1}, MODULE, None),  # a suffix only at a dot
        ({"f_attn.q_proj": 1}, MODULE, None),
        ({"layers.1.self_attn.q_proj": 1}, MODULE, None),
        ({r"layers\.\d+\..*": 1}, MODULE, 1),
        ({"q_proj": 1, ".*": 2}, MODULE, 1),  # the first one wins
        ({".*": 2, "q_proj": 1}, MODULE, 2),
        ({"k_proj|q_proj": 3}, MODULE, 3),  # an alternative is not torn apart
        ({"k_proj|x": 3}, MODULE, None),
        ({}, MODULE, None),
    ],
)
def test_the_first_pattern_that_is_a_suffix_decides(patterns, module, value):
    assert SuffixPatterns(patterns, "rank_pattern", None).value(module, PatternBudget()) == value
    # PEFT's `get_pattern_key`, and vLLM's `_match_pattern`, word for word.
    key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
    assert value == (None if key is None else patterns[key])


@given(st.one_of(st.text(max_size=30), st.text(st.sampled_from("ab.*+?()[]{}|\\^$1,<>=!P:RN&~-"), max_size=25)))
def test_any_text_matches_or_is_refused(pattern):
    try:
        outcome = PatternBudget(0.3).matches(pattern, MODULE, field="the_field")
    except LoRAPluginsError as error:
        outcome = "the_field" in error.found or error.found
    assert outcome in (True, False)


@pytest.mark.parametrize(
    "pattern",
    ["(?:(?:(?:a+){1000}){1000}){1000}", "a{0,200000}", "(?x)(?:a{ 1 0 00 }){1000}", "a{000000000000200000}"],
)
def test_counted_repeats_are_refused_before_they_are_compiled(pattern, monkeypatch):
    monkeypatch.setattr(patterns_module.regex, "compile", lambda *_, **__: pytest.fail("it is compiled"))
    with pytest.raises(InvalidAdapter, match="counted repeats"):
        PatternBudget().matches(pattern, MODULE, field="rank_pattern")


@pytest.mark.parametrize("pattern", [r"model\.layers\.\d{1,3}\..*", r".*\.(?:1\d{1,2}|2)\.(?:.*){0,1}", "a{1,60000}"])
def test_a_few_counted_repeats_are_compiled(pattern):
    assert PatternBudget().matches(pattern, MODULE, field="rank_pattern") in (True, False)


def test_alternatives_of_names_take_none_of_the_budget():
    names = [f"model.layers.{layer}.self_attn.q-proj" for layer in range(100)]
    patterns = SuffixPatterns({"|".join(map(re.escape, names)): 1, "k_proj|v_proj": 2}, "rank_pattern", None)
    found = [patterns.value(name, PatternBudget(0.0)) for name in (*names, "a.v_proj", "a.kv_proj", "xk_proj")]
    assert found == [1] * 100 + [2, None, None]
