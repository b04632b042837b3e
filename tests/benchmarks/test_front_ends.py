"""What the measure of swaps counts: `benchmarks/front_ends/measure.py`."""

from __future__ import annotations

from benchmarks.front_ends.caller import Answer
from benchmarks.front_ends.measure import judged

MADE = [("a" * 64, "sql", 1.0), ("b" * 64, "chat", 2.0), ("c" * 64, "sql", 3.0)]
RIGHT = {"sql": [1], "chat": [2]}


def answer(began_at: float, version: int, ids: list[int], status: int = 200) -> Answer:
    return Answer(began_at, 0.1, status, MADE[version][0], "1", "policy", ids)


def test_answers_of_another_version_than_they_say_are_counted() -> None:
    found, _ = judged([answer(1.5, 0, [1]), answer(1.5, 0, [2]), answer(1.5, 1, [1])], MADE, RIGHT)
    assert found == {"right": 1, "of another version": 2}


def test_old_answers_begun_after_a_swap_are_counted() -> None:
    found, stale_s = judged([answer(1.9, 0, [1]), answer(2.5, 0, [1]), answer(9.0, 2, [1])], MADE, RIGHT)
    assert found == {"right": 3, "begun after a swap, and old": 1}
    assert stale_s == [0.5]


def test_refused_answers_are_counted() -> None:
    found, _ = judged([Answer(1.0, 0.1, 503, "", "1", "policy", [])], MADE, RIGHT)
    assert found == {"not answered": 1}
