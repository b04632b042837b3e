"""Every move takes whole elements to where the engine reads them, and computes none."""

from __future__ import annotations

import numpy as np
import pytest

from lora_plugins.adapter.layouts.moves import (
    ColumnsOfExpert,
    Move,
    OnDiagonal,
    Rows,
    Same,
    Stacked,
    StackedA,
    StackedB,
    Zeros,
)

ONE, TWO = np.array([[1, 2], [3, 4]], np.uint16), np.array([[5, 6], [7, 8]], np.uint16)


@pytest.mark.parametrize(
    ("move", "sources", "expected"),
    [
        (Same(), [ONE], [[1, 2], [3, 4]]),
        (Rows(1, 1), [ONE], [[3, 4]]),
        (Stacked(), [ONE, TWO], [[1, 2], [3, 4], [5, 6], [7, 8]]),
        (OnDiagonal((3, 4), ((0, 2, 0, 2), (2, 1, 2, 2))), [ONE, TWO[:1]], [[1, 2, 0, 0], [3, 4, 0, 0], [0, 0, 5, 6]]),
        (Zeros((1, 2)), [ONE], [[0, 0]]),
        (ColumnsOfExpert(1, 2, (0, 2, 1)), [np.arange(8).reshape(2, 4)], [[1, 3], [5, 7]]),
        (StackedA((2, 1, 2), ((1, 0), (0, 0)), 1), [ONE[:1], TWO[:1]], [[5, 6], [1, 2]]),
        (StackedB((2, 1, 2), ((1, 0, (0, 2, 1)), (0, 0, (0, 2, 1))), 1), [ONE[:, :1], TWO[:, :1]], [[5, 1], [7, 3]]),
    ],
    ids=lambda it: type(it).__name__ if callable(it) else "",
)
def test_elements_lie_where_the_move_says(move: Move, sources: list[np.ndarray], expected: list[list[int]]) -> None:
    made = move(sources)
    assert made.tolist() == expected
    assert made.dtype == sources[0].dtype
