"""Decoys: stable, of the name's shape, nobody's, and made of the name and one's own patterns alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.adapter.names import AdapterName
from lora_plugins.api.access.decoys import Decoys
from lora_plugins.api.access.name_patterns import NamePattern
from lora_plugins.api.access.policy import Principal
from lora_plugins.errors import AdapterNotFound


def principal(*patterns: str) -> Principal:
    return Principal("t", tuple(map(NamePattern, patterns)))


NOBODY = principal()
NAMES = st.one_of(
    st.text(st.sampled_from("abz/@.- é~9"), min_size=1, max_size=30),
    st.text(max_size=20),
    st.builds("{}/{}@{}".format, st.text("ab", max_size=9), st.text("ab", max_size=250), st.text("0f", max_size=250)),
)


def is_name(text: str) -> bool:
    try:
        AdapterName.parse(text)
    except AdapterNotFound:
        return False
    return True


@given(name=NAMES, pattern=st.sampled_from(["*", "a/*", "ab/b/*", "a", "a/b/é*"]))
def test_a_decoy_is_a_name_where_the_asked_one_is_and_never_the_same(name, pattern):
    decoys = Decoys()
    decoy = decoys.of(name, principal(pattern))
    assert decoy == decoys.of(name, principal(pattern))
    assert is_name(decoy) == is_name(name)
    assert decoy != name
    assert decoy != Decoys().of(name, principal(pattern)), "another process, another decoy"
    if is_name(name):
        asked, given_ = AdapterName.parse(name), AdapterName.parse(decoy)
        assert len(given_.segments) == len(asked.segments)
        assert [len(segment) for segment in given_.segments[:-1]] == [len(segment) for segment in asked.segments[:-1]]
        assert (given_.revision is None) == (asked.revision is None)


@given(name=NAMES.filter(is_name))
def test_no_part_of_a_path_that_is_not_ones_own_is_kept(name):
    decoy = AdapterName.parse(Decoys().of(name, NOBODY))
    long = [(mine, other) for mine, other in zip(decoy.segments, AdapterName.parse(name).segments, strict=True)]
    assert all(mine != other for mine, other in long if len(other) > 5)
    assert decoy.path.replace("/", "").isalpha()
    assert len(decoy.path.replace("/", "")) >= 16


@pytest.mark.parametrize(
    ("patterns", "name", "kept"),
    [
        (("acme/pub-*",), "acme/secret", "acme/"),
        (("acme/pub-*",), "other/secret", ""),
        (("acme/loras/team-b/*",), "acme/loras/team-a/x", "acme/loras/"),
        (("acme/*", "acme/loras/team-b/*"), "acme/loras/team-a/x", "acme/loras/"),
        (("acme/loras/team-b/*",), "acme/loras", "acme/"),
        (("*",), "acme/secret", ""),
        (("a/home/*",), "a/home/secret", "a/"),  # vLLM takes paths out of its texts
        (("a/v1.2/*",), "a/v1.2/secret", "a/"),
    ],
)
def test_folders_that_ones_own_patterns_spell_out_are_kept(patterns, name, kept):
    decoy = Decoys().of(name, principal(*patterns))
    assert decoy.startswith(kept)
    rest, asked = decoy.removeprefix(kept).split("/"), name.removeprefix(kept).split("/")
    assert len(rest) == len(asked)
    assert not set(rest) & set(asked)


def test_a_revision_stays_of_its_kind():
    decoy = Decoys().of("team/sql@0123456789abcdef-v1.x/y", NOBODY)
    revision = AdapterName.parse(decoy).revision
    assert revision is not None
    digest, rest = revision[:16], revision[16:]
    assert digest[:10].isdigit()
    assert all(character in "abcdef" for character in digest[10:])
    assert digest != "0123456789abcdef"
    assert len(rest) == len("-v1.x/y")
    assert rest.index("/") == 5


def test_names_do_not_share_decoys():
    decoys = Decoys()
    made = {decoys.of(f"a{number}", NOBODY) for number in range(2000)}
    assert len(made) == 2000


def test_a_very_long_name_costs_no_more():
    decoy = Decoys().of("x" * 1_000_000, NOBODY)
    assert len(decoy) == 257
    assert not is_name(decoy)
