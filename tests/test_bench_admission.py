"""What the benchmark of admission asks for and makes of the answers; it needs servers for all else."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.manager.admission import PAIRS, Answered
from benchmarks.manager.admission_table import cases_of, table
from benchmarks.manager.scenarios import ALONE, DRAWN, FLOOD, SERVINGS, traffic_of

UNIFORM, ZIPF = DRAWN[0], DRAWN[-1]


def row(slots: str, arm: str, traffic: str, rate: float, whole_ms: float) -> dict[str, object]:
    return {
        "serving": "16/4", "slots": slots, "traffic": traffic, "arm": arm, "stretch": 0, "requests_per_s": rate,
        "worker_memory": {"pss_bytes": 10**9}, "adapter": "0 1 15", "first_ms": "10 20 30",
        "whole_ms": f"{whole_ms} {whole_ms} {whole_ms}",
    }  # fmt: skip


def test_both_arms_are_asked_for_the_same() -> None:
    for traffic in (UNIFORM, ZIPF, FLOOD):
        first, second = (list(islice(traffic.draws(16, 8, 3, 2), 100)) for _ in range(2))
        assert first == second
        assert {tokens for _, tokens in first} <= set(range(4, 13))
    assert {adapter for adapter, _ in islice(FLOOD.draws(16, 8, 3, 24), 9)} == {1}


def test_the_least_asked_get_about_a_tenth() -> None:
    assert ZIPF.least_asked(16) == {11, 12, 13, 14, 15}
    assert UNIFORM.least_asked(16) == set(range(16))
    assert FLOOD.least_asked(16) == ALONE.least_asked(16) == set(range(1, 10))
    assert [traffic.most_asked() for traffic in (UNIFORM, ZIPF, ALONE, FLOOD)] == [set(), {0}, set(), {0}]


@pytest.mark.parametrize(("first", "end", "share"), [(2, 4, 1.0), (0, 2, 0.5), (4, 6, 0.5), (5, 7, 0.0), (3, 3, 1.0)])
def test_a_request_counts_by_its_part_in_the_window(first: float, end: float, share: float) -> None:
    assert Answered(0, 0.0, first, end).share(1.0, 5.0) == share


def test_goals_are_met_or_missed() -> None:
    rows = []
    for slots, arms in PAIRS.items():
        for traffic in traffic_of(SERVINGS[1]):
            for arm, rate, whole_ms in zip(arms, (10.0, 12.0), (100.0, 104.0), strict=True):
                rows.append(row(slots, arm, traffic.name, rate, whole_ms))
    assert {case.gain for case in cases_of(rows)} == {1.2}
    said = {line.split(" | ")[0].removeprefix("| "): line for line in table(rows).splitlines() if line[-2:] == " |"}
    assert said["pointers: requests/s, mean of 6 ≥ 1.3×"].endswith("| **missed** |")
    assert said["pointers: requests/s of each ≥ 1.05×"].endswith("| met |")
    assert said["copies: p99 of the nine's whole requests beside a flood ≤ 1.0× vLLM's"].endswith("| **missed** |")
    assert said["pointers: p99 of the nine's whole requests beside a flood ≤ 1.3× theirs alone"].endswith("| met |")
