"""Names: one spelling per adapter, and none that leaves its root."""

from __future__ import annotations

import os
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_plugins.adapter.names import (
    MAX_CHARACTERS,
    MAX_SEGMENT_BYTES,
    AdapterName,
    adapter_id,
    misspelt,
    near,
    with_base_name,
)
from lora_plugins.errors import AdapterNotFound

# What attacks are made of, so that most drawn names come close to the grammar's edges.
CLOSE = st.text(st.sampled_from("ab.-/@\\ %2e\0\n~é\u0301\u202e\u200b"), max_size=20)
ANY = st.one_of(CLOSE, st.text(max_size=300))


def parsed(text: str) -> AdapterName | None:
    try:
        return AdapterName.parse(text)
    except AdapterNotFound:
        return None


@pytest.mark.parametrize(
    "text",
    [
        "sql",
        "team/sql",
        "a/b/c/d",
        "sql-v2.1_final",
        "größe",
        "模型/中文",
        "naïve+x=1,2",
        "%2e%2e",
        "~",
        "a..",
        "sql (old)",
    ],
)
def test_names_of_the_grammar_are_read_as_they_stand(text):
    name = AdapterName.parse(text)
    assert (name.path, name.revision, str(name)) == (text, None, text)


@pytest.mark.parametrize(
    ("text", "path", "revision"),
    [("sql@v3", "sql", "v3"), ("team/sql@refs/pr/1", "team/sql", "refs/pr/1"), ("a/b@0f3c", "a/b", "0f3c")],
)
def test_a_revision_follows_the_at_sign(text, path, revision):
    name = AdapterName.parse(text)
    assert (name.path, name.revision) == (path, revision)
    assert name.segments == tuple(path.split("/"))


@pytest.mark.parametrize(
    "text",
    [
        *["", "/", "//", "/etc", "sql/", "//sql", "a//b", "a/", " ", " sql", "sql ", "a/ b", "a /b"],
        *[".", "..", "./sql", "../sql", "../adapters/sql", "a/../b", "a/./b", "a/..", "...", ".hidden", "a/.git"],
        *["-rf", "a/-x", "@", "@v1", "sql@", "sql@@", "sql@a@b", "sql@/v", "sql@v/", "sql@../x", "sql@-x", "a@.b"],
        *["a\\b", "..\\sql", "C:\\x", "a\0b", "a\nb", "a\tb", "a\rb", "a\x7fb", "a\x1bb", "a\x85b"],
        *["a\u202eb", "a\u2066b", "a\u200bb", "a\u200db", "\ufeffa", "a\u00adb", "a\u2028b", "a\u00a0b", "a\u3000b"],
        *["a\ufe0fb", "a\u3164b", "a\u034fb", "a\U000e0101b", "a\U000e0041b", "a\ue000b", "a\udc80b", "a\u0378b"],
        *["e\u0301", "a\u030a", "\u212b"],  # decomposed, or with a canonical equivalent
    ],
    ids=ascii,
)
def test_everything_else_is_no_name(text):
    with pytest.raises(AdapterNotFound):
        AdapterName.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *[("cust005@", "nothing after '@'"), ("a/b@", "nothing after '@'"), ("@v1", "nothing before '@'")],
        *[("@", "nothing before '@'"), ("", "an empty name"), ("sql@v//w", "an empty segment")],
    ],
)
def test_what_is_missing_is_named(text, says):
    with pytest.raises(AdapterNotFound, match=says):
        AdapterName.parse(text)


def test_length_is_limited_in_characters_and_per_segment_in_bytes():
    assert parsed("a" * MAX_SEGMENT_BYTES)
    assert not parsed("a" * (MAX_SEGMENT_BYTES + 1))
    assert parsed("é" * (MAX_SEGMENT_BYTES // 2))
    assert not parsed("é" * (MAX_SEGMENT_BYTES // 2 + 1))
    longest = "a" * 200 + "/" + "b" * (MAX_CHARACTERS - 201)
    assert parsed(longest)
    assert not parsed(longest + "b")


@given(ANY)
@example("a/../../b")
def test_a_name_is_spelled_back_as_it_was_read(text):
    name = parsed(text)  # which raises nothing but our error
    if name is not None:
        assert str(name) == text
        assert AdapterName.parse(str(name)) == name


@given(ANY)
@example("a@b/c")
def test_a_joined_name_stays_below_its_root(text):
    name = parsed(text)
    if name is None:
        return
    for part in (str(name), name.path):
        joined = os.path.join("/root/dir", part)
        # Nothing to normalise away: what is opened is what was spelled.
        assert os.path.normpath(joined) == joined
        assert joined.startswith("/root/dir/")
        assert len(joined) > len("/root/dir/")


@given(ANY, ANY)
def test_two_spellings_never_mean_one_place(one, other):
    if parsed(one) and parsed(other) and one != other:
        assert os.path.normpath(one) != os.path.normpath(other)
        assert unicodedata.normalize("NFC", one) != unicodedata.normalize("NFC", other)


@given(CLOSE)
def test_decorating_a_name_gives_no_second_name(text):
    if parsed(text) is None:
        return
    for spelling in (f"{text}/", f"./{text}", f"/{text}", f"x/../{text}", f" {text}", f"{text} ", f"../root/{text}"):
        assert parsed(spelling) is None


def test_adapter_ids_are_stable_distinct_and_fit_vllm():
    # SHA-256, not Python's hash: replicas and restarts must agree.
    assert adapter_id("sql") == 1321714995
    ids = {adapter_id(f"adapter-{number}") for number in range(2000)}
    assert len(ids) == 2000
    assert min(ids) >= 1
    assert max(ids) < 2**31


@pytest.mark.parametrize(("text", "rest"), [("base:sql", "sql"), ("base_a/b", "a/b"), ("other/base@x", "x")])
def test_a_base_models_name_before_a_name_is_seen(text, rest):
    assert f'"model": "{rest}"' in with_base_name(text, ["base", "other/base"]).remedy


@pytest.mark.parametrize("text", ["base", "base:", "baseline"])
def test_a_base_models_name_alone_is_no_start(text):
    assert with_base_name(text, ["base", "other/base"]) is None


@pytest.mark.parametrize(
    ("text", "names", "found"),
    [
        ("cust05", [f"cust{number:03}" for number in range(20)], ["cust005", "cust015", "cust000"]),
        ("acme/slq", ["acme/other", "acme/sql", "ace/sql"], ["acme/sql"]),
        ("Team_A/SQL", ["team-a/sql", "team-b/sql"], ["team-a/sql", "team-b/sql"]),
        ("sqll", ["sql"], ["sql"]),
        ("checkpoint-5", ["checkpoint-500", "checkpoint-5000"], ["checkpoint-500"]),
        ("ab", ["b", "ac", "xy"], []),
        ("sql", ["pirate", "haiku"], []),
        ("aaa", [f"aaa{letter}" for letter in "edcba"], ["aaaa", "aaab", "aaac"]),
        *((text, ["haiku", "pirate"], ["pirate"]) for text in ("lora/pirate", "openai/Pirate", "pirate:latest")),
        ("openai/team/sql:v1", ["team/sql", "sql", "openai/team/sql:v2"], ["team/sql", "openai/team/sql:v2"]),
    ],
)
def test_near_names_differ_in_one_place(text, names, found):
    assert near(text, names) == found


def test_a_misspelt_name_is_answered_with_near_ones():
    assert misspelt("sqk", []) is None
    error = misspelt("sqk", near("sqk", ["sql", "other"]))
    assert error is not None
    assert (error.adapter, "'sql'" in error.expected, "other" in str(error)) == ("sqk", True, False)


@given(st.text("abcXYZ_-/.1", min_size=5, max_size=20), st.integers(0, 19), st.text("abc_9", max_size=2))
def test_a_change_of_one_place_is_always_near(name, place, written):
    place = min(place, len(name) - 2)
    assert near(name[:place] + written + name[place + 2 :], [name.casefold().replace("_", "-")])
