"""Labels: so many and no more, whatever names are requested."""

from __future__ import annotations

from lora_plugins.observability.adapter_labels import OTHERS, AdapterLabels, label_of


def test_first_adapters_have_labels_and_all_others_share_one():
    labels = AdapterLabels(2)
    assert [labels.of(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHERS, "a", OTHERS]


def test_freed_label_goes_to_the_next_adapter():
    labels = AdapterLabels(1)
    labels.of("a")
    assert labels.of("b") == OTHERS
    assert labels.forget("b") is None
    assert labels.forget("a") == "a"
    assert labels.of("b") == "b"
    assert labels.of("a") == OTHERS


def test_limit_of_zero_gives_no_adapter_a_label():
    assert AdapterLabels(0).of("a") == OTHERS


def test_any_name_becomes_a_valid_label():
    for name in ("\ud800", "x" * 10_000, "a\nb", "ü", ""):
        assert len(label_of(name).encode()) < 4_000
    assert label_of("team/ü") == "team/ü"
