"""The life of an adapter, as its picture reads the kept events."""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks import life_plot
from benchmarks.record import RESULTS


@pytest.fixture(scope="module")
def story() -> life_plot.Story:
    return life_plot.Story(json.loads((RESULTS / "life.json").read_text())["rows"])


def test_the_kept_events_are_a_whole_life_in_order(story: life_plot.Story) -> None:
    marks = [at for of_stage in story.marks().values() for at, _ in of_stage]
    assert len(marks) == 18
    assert marks == sorted(marks)


def test_no_two_bars_of_a_row_lie_on_each_other(story: life_plot.Story) -> None:
    bars = sorted((bar for bar in story.bars() if bar.lane != "S3"), key=lambda bar: (bar.lane, bar.row, bar.begin))
    for one, other in itertools.pairwise(bars):
        assert (one.lane, one.row) != (other.lane, other.row) or one.end <= other.begin


def test_numbers_keep_their_distance_and_their_end() -> None:
    assert life_plot.spread([0, 1, 1.5, 9.5, 10], gap=1, end=10) == [0, 1, 2, 9, 10]
