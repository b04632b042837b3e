"""benchmarks/real: its page shows what is kept, its adapters differ, and a part that fails or is late is kept."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.callers import Answer
from benchmarks.real import __main__ as real
from benchmarks.real import answers
from benchmarks.real.bed import OURS, SHIPPED, STOCK, Bed, Figure
from benchmarks.real.cold import cold_figures
from benchmarks.real.many import thousand_figures
from benchmarks.real.speed import decode_figures


def test_the_page_shows_what_was_measured() -> None:
    text = real.PAGE.read_text()
    assert text == real.page(text)


def test_a_share_is_that_of_turns_in_one_round() -> None:
    ours = [(0, 0, 100.0), (0, 1, 98.0), (1, 0, 50.0), (1, 1, 48.0), (2, 0, 80.0)]
    turns = [(at, OURS, count, speed) for at, count, speed in ours] + [(0, STOCK, 0, 102.0), (1, STOCK, 0, 49.0)]
    rows = [dict(zip(("round", "arm", "adapters", "tokens_per_s"), turn, strict=True)) for turn in turns]
    rows = [{"dtype": "float32", **row} for row in rows]
    base, one, of_stock = decode_figures([*rows, {"dtype": "bfloat16", "left_out": "none here"}])[:3]
    assert (base.value, one.value, one.spread, one.is_met) == ("80.0", "0.970", "0.960 to 0.980, n=2", True)
    assert (of_stock.what, of_stock.spread) == (
        "float32, base, share of the base's in stock vLLM",
        "0.980 to 1.020, n=2",
    )
    assert decode_figures([{"dtype": "bfloat16", "left_out": "none here"}])[-1].spread == "none here"


def test_thousand_adapters_are_compared_with_one_and_weighed() -> None:
    memory = {"loaded": 984, "rss_bytes": 984_000_000, "file_bytes": 500_000}
    rows = [
        {"traffic": traffic, "adapters": adapters, "round": 0, "requests_per_s": speed}
        for traffic, adapters, speed in (("all", 1000, 9.0), ("one", 1, 10.0))
    ]
    share, *_, resident = thousand_figures([memory, *rows])
    assert (share.what[:4], share.value, share.is_met, resident.value) == ("1000", "0.900", False, "1.00 MB")


def test_answers_are_judged_by_the_version_that_they_name() -> None:
    versions = [answers.Version("d1", "pirate", 1.0), answers.Version("d2", "french", 2.0)]
    asked = [
        (0.5, 200, "d1", [7]),  # right
        (1.9, 200, "d1", [7]),  # begun before the swap was acknowledged
        (2.1, 200, "d1", [7]),  # after
        (2.1, 200, "d2", [7]),  # the tokens of the version before
        (2.1, 200, "d3", [7]),  # of a version that nobody published
        (2.2, 404, "", []),
        (2.3, 200, "d2", [8]),
    ]
    given = [Answer(at, status, digest, ids) for at, status, digest, ids in asked]
    right = {("pirate", (7,)), ("french", (8,))}
    found = answers.judged(given, versions, lambda source, ids: (source, tuple(ids)) in right)
    assert found == {"right": 4, "of another version": 2, "not answered": 1, "begun after a swap, and old": 1}
    rows = [{"round": 0, "swaps": 2, "swap_s": [0.1, 0.3], "answers_per_s": 9.0}, {"answers": 7, **found}]
    rows.append({"round": 0, "swaps": 0, "swap_s": [], "answers_per_s": 10.0})
    figures = answers.swap_figures(rows)
    assert [one.is_met for one in figures[:3]] == [False, False, False]
    assert (figures[0].spread, figures[3].value, figures[4].value) == ("of 7, 2 swaps", "200 ms", "0.900")


def test_cold_first_tokens_are_compared_block_by_block() -> None:
    gaps = {"quiet_median_ms": 10.0, "quiet_gaps_ms": [10.0], "gaps_ms": [10.0, 20.0]}
    rows = [
        {"arm": arm, "block": block, "kind": kind, "first_token_s": first_s, "size_mb": 313.2, **gaps}
        for arm, first_s in (("ours", 0.2), ("stock, our kernels", 0.5))
        for block in (0, 1)
        for kind in ("cold", "base")
    ]
    ratio, *others = cold_figures(rows)
    assert (ratio.value, ratio.is_met) == ("0.400", True)
    assert "313.2 MB" in ratio.what
    assert [one.value for one in others if one.what.startswith("ours: an arrival's largest gap")] == ["2.00"]


def test_adapters_beyond_the_trained_differ_from_all_others(tmp_path: Path) -> None:
    bed = Bed(tmp_path / "base", tmp_path, 1.0, is_quick=True)
    made = bed.adapters(5, ("pirate", "verdict"))
    weights = [(directory / "adapter_model.safetensors").read_bytes() for directory in made]
    assert [directory.name for directory in made] == ["pirate", "verdict", "pirate-2", "verdict-3", "pirate-4"]
    assert weights[0] == (SHIPPED / "pirate" / "adapter_model.safetensors").read_bytes()
    assert len(set(weights)) == 5
    config = json.loads((made[2] / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


def test_rounds_end_before_the_seconds_have_passed(tmp_path: Path) -> None:
    began = time.monotonic()
    for _ in Bed(tmp_path, tmp_path, 0.5, is_quick=False).rounds():
        time.sleep(0.1)
    assert 0.3 < time.monotonic() - began < 0.6
    assert list(Bed(tmp_path, tmp_path, 60.0, is_quick=True).rounds()) == [0]


def test_a_part_that_is_late_or_fails_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def late(bed: Bed, rows: list[dict]) -> None:
        rows.append({"value": 7})
        try:
            time.sleep(30)
        finally:
            ended.append("servers")

    def failing(bed: Bed, rows: list[dict]) -> None:
        raise RuntimeError("the worker ended")

    monkeypatch.setattr(real, "ROOT", tmp_path)
    monkeypatch.setattr(real, "CACHE", tmp_path / "cache")
    for measure, failure in ((late, "not ended after 1 s"), (failing, "RuntimeError: the worker ended")):
        part = real.Part("title", measure, lambda rows: [Figure("value", str(rows[0]["value"]))], 1.0, 1)
        figures, has_ended = real.run("part", part, tmp_path, is_quick=True)
        kept = json.loads((tmp_path / "cache" / "quick" / "real_part.json").read_text())
        assert (has_ended, kept["failure"]) == (False, failure)
        assert [one.value for one in figures] == [str(row["value"]) for row in kept["rows"]]
    assert ended == ["servers"]
