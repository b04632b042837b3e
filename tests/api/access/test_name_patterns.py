"""Patterns of names: what they cover, against Python's own fnmatch, and that none takes long."""

from __future__ import annotations

import fnmatch
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.api.access.policy import NamePattern


@pytest.mark.parametrize(
    ("pattern", "covered", "not_covered"),
    [
        ("*", ["a", "a/b", "a@v1", "a/b/c@x", ""], []),
        ("team-a/*", ["team-a/x", "team-a/x/y", "team-a/x@v1", "team-a/"], ["team-a", "team-ab/x", "x/team-a/x"]),
        ("sql", ["sql", "sql@v1", "sql@refs/pr/1"], ["sql2", "SQL", "a/sql", "sql/x", "sq", ""]),
        ("sql@v1", ["sql@v1"], ["sql", "sql@v10", "sql@v1/x"]),
        ("sql@v*", ["sql@v1", "sql@v1/x"], ["sql", "sql@w1"]),
        ("*@*", ["a@b"], ["a"]),
        ("v?", ["v1", "v2@x"], ["v", "v12"]),
        ("a*b*c", ["abc", "axbxc", "a/b/c"], ["ab", "abcd", "bac"]),
        ("[ab]*", ["[ab]", "[ab]c"], ["a", "b"]),
        ("**", ["", "a/b"], []),
    ],
)
def test_what_a_pattern_covers(pattern, covered, not_covered):
    fits = NamePattern(pattern).matches
    assert [name for name in covered if not fits(name)] == []
    assert [name for name in not_covered if fits(name)] == []


TEXT = st.text(st.sampled_from("ab/.é-"), max_size=12)


@given(pattern=st.text(st.sampled_from("ab/.é-*?"), min_size=1, max_size=10), name=TEXT)
def test_it_agrees_with_fnmatch(pattern, name):
    assert NamePattern(pattern).matches(name) == fnmatch.fnmatchcase(name, pattern)


@given(pattern=st.text(st.sampled_from("ab*?"), min_size=1, max_size=8), name=TEXT, revision=TEXT)
def test_a_pattern_without_a_revision_covers_every_revision(pattern, name, revision):
    fits = NamePattern(pattern).matches
    assert fits(f"{name}@{revision}") == fits(name)


def test_no_name_takes_long_however_many_stars():
    """The event loop compares a name of a request before anything else is known of the name."""
    patterns = [NamePattern(text) for text in ("*/common", "*a" * 100 + "b", "team/" + "?*" * 50 + "b")]
    names = ["team/" + "a" * 10_000_000, *(f"team/{number:03}" + "a" * 240 for number in range(100))]
    began = time.thread_time()
    assert not any(pattern.matches(name) for pattern in patterns for name in names)
    assert time.thread_time() - began < 2, "a backtracking match would not end"


def test_a_text_too_long_for_a_name_is_not_covered():
    assert NamePattern("*").matches("a" * 256)
    assert not NamePattern("*").matches("a" * 257)
