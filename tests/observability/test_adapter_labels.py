"""Labels: so many and no more, whatever names are requested."""

from __future__ import annotations

import time

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


def test_file_names_the_labels_and_is_read_again(tmp_path, monkeypatch, logged):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    (file := tmp_path / "customers.txt").write_text("# ours\ncust001\n\n  cust002  \n")
    labels = AdapterLabels(file)
    assert [labels.of(name) for name in ("cust001", "cust002", "cust003", "# ours", "")] == [
        "cust001", "cust002", OTHERS, OTHERS, OTHERS,
    ]  # fmt: skip
    assert (labels.of("cust001@v2"), labels.at(9, "cust002")) == ("cust001", "cust002")
    assert labels.of("cust001@v2*0.5+cust002*1") == OTHERS, "a mixture is no version of its first part"
    assert labels.forget("cust001") is None, "what is billed outlives an unload"

    file.write_text("cust003\ncust001\n")
    assert labels.of("cust003") == OTHERS, "looked at a moment ago"
    now_s[0] += 1.0
    assert [labels.of(name) for name in ("cust002", "cust003")] == [OTHERS, "cust003"]

    file.unlink()
    for _ in range(3):
        now_s[0] += 1.0
        assert labels.of("cust003") == "cust003", "the names read before"
    assert len(logged.records) == 1, "not a line each second"
