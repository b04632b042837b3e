"""Labels: so many and no more, whatever is asked for."""

from __future__ import annotations

from lora_plugins.observability.adapter_labels import OTHERS, AdapterLabels, label_of


def test_the_first_have_their_own_and_all_others_share_one():
    labels = AdapterLabels(2)
    assert [labels.of(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHERS, "a", OTHERS]


def test_a_label_goes_to_the_next_when_its_adapter_is_gone():
    labels = AdapterLabels(1)
    labels.of("a")
    assert labels.of("b") == OTHERS
    assert labels.forget("b") is None
    assert labels.forget("a") == "a"
    assert labels.of("b") == "b"
    assert labels.of("a") == OTHERS


def test_none_has_one_of_its_own_where_none_may():
    assert AdapterLabels(0).of("a") == OTHERS


def test_a_label_can_be_written_whatever_the_name():
    for name in ("\ud800", "x" * 10_000, "a\nb", "ü", ""):
        assert len(label_of(name).encode()) < 4_000
    assert label_of("team/ü") == "team/ü"
