"""The grammar of mixtures: which texts are mixtures, of which parts; one name for equal sums; and the faults."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lora_plugins.adapter.mixture import MAX_PARTS, canonical, terms_of
from lora_plugins.adapter.names import AdapterName, covering, why_absent
from lora_plugins.errors import AdapterNotFound

names = st.from_regex(r"[a-z][a-z+*/.0-9-]{0,9}[a-z](@[a-z0-9]{1,9})?", fullmatch=True)
weights = st.builds(
    lambda number, places: f"{Decimal(number).scaleb(-places):f}",
    st.integers(-999_999, 999_999).filter(bool),
    st.integers(3, 6),
)


@given(st.dictionaries(names, weights, min_size=1, max_size=MAX_PARTS), st.randoms(), st.sampled_from(["", "0"]))
def test_spellings_and_orders_of_a_sum_are_one(parts: dict[str, str], order, zeros: str) -> None:
    assume(not any(name[0] == "-" or "*" in name for name in parts))
    name = canonical("+".join(f"{name}*{weight}" for name, weight in parts.items()))
    spelt = [f"{it}*{'-' * (of[0] == '-')}{zeros}{of.removeprefix('-')}{zeros}" for it, of in parts.items()]
    order.shuffle(spelt)
    padded = "+".join(spelt)
    assert canonical(padded) == canonical(name) == name
    terms = terms_of(padded)
    assert terms is not None
    assert terms == terms_of(name)
    assert {term.name: Decimal(term.weight) for term in terms} == {it: Decimal(of) for it, of in parts.items()}


@given(st.text(st.sampled_from("ab*+@.-/01"), max_size=12))
def test_any_text_is_a_name_or_a_mixture_of_names(text: str) -> None:
    terms = terms_of(text)
    assert terms is None or all(terms_of(term.name) is None for term in terms)
    if terms:
        assert terms_of(canonical(text)) == terms
        assert {term.name for term in terms} <= covering(text)
        assert all("*" in text and f"{term.name}*" in text for term in terms)
    try:
        name = AdapterName.parse(text)
    except AdapterNotFound:
        return
    assert str(name) == canonical(text)
    assert name.revision is None or terms_of(name.path) is None, "no revision of a mixture: patterns see the path"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("sql*0.7+style*0.3", "sql*0.7+style*0.3"),
        ("style*0.30+sql*00.70", "sql*0.7+style*0.3"),
        ("style*-0.5+sql@v3*1.0", "sql@v3*1+style*-0.5"),
        ("sql*0.50", "sql*0.5"),
        ("c++*0.5+a+b*2", "a+b*2+c++*0.5"),
        ("team-a/x*100+team-b/y*1", "team-a/x*100+team-b/y*1"),
    ],
)
def test_mixtures_have_canonical_names(text: str, name: str) -> None:
    assert str(AdapterName.parse(text)) == canonical(text) == name
    assert AdapterName.parse(text) == AdapterName.parse(name)


@pytest.mark.parametrize("text", ["sql", "a+b", "sql*1+", "sql*.5", "sql*1.", "sql*1e3", "sql*1+style", "a*b", "a*٣"])
def test_other_texts_are_names(text: str) -> None:
    assert terms_of(text) is None
    assert str(AdapterName.parse(text)) == canonical(text) == text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sql*0+style*1", "the weight 0 of 'sql'"),
        ("sql*-0.00", "the weight 0 of 'sql'"),
        ("sql*1+sql*2", "'sql' twice"),
        ("sql*1*2", "'sql*1' as a part"),
        ("sql*1@v2*2", "'sql*1@v2' as a part"),
        ("sql*1+style*1@v2", "a revision of a mixture"),
        ("*1", "'' as a part"),
        ("sql*12345", "5 digits"),
        ("sql*0.1234567", "7 digits"),
        ("+".join(f"a{i}*1" for i in range(MAX_PARTS + 1)), "a mixture of 9 parts"),
    ],
)
def test_faults_of_mixtures_are_named(text: str, found: str) -> None:
    assert terms_of(text) == ()
    with pytest.raises(AdapterNotFound, match=r"(?s)no adapter can have") as caught:
        AdapterName.parse(text)
    assert found in caught.value.found


@pytest.mark.parametrize("text", ["/x*1", "../x*1+sql*2", "x\\*1", "sql*1+ y*1", "a" * 250 + "*0.12345"])
def test_each_part_and_the_whole_is_a_name(text: str) -> None:
    with pytest.raises(AdapterNotFound):
        AdapterName.parse(text)


def test_a_weight_forgotten_is_explained() -> None:
    for text in ("sql*0.7+style", "sql*.5", "sql*1e-3"):
        assert "NAME*0.7" in why_absent(text).expected
    assert why_absent("sql*0.7+style*0.3") is None


def test_hostile_texts_take_no_time() -> None:
    for text in ("a" + "*1" * 100_000, "a" + "*1@" * 100_000, "a*1+" * 100_000, "a*" + "9" * 400_000 + "x"):
        assert not terms_of(text)
        assert canonical(text) == text


def test_blocks_cover_mixtures_with_the_name() -> None:
    assert covering("sql@v3*1+style*-0.5") == {"sql@v3*1+style*-0.5", "sql@v3", "sql", "style"}
    assert covering("team/sql@v3") == {"team/sql", "team/sql@v3"}
