"""What the plots of docs/images share: a figure that is a file afterwards, and colours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.record import IMAGES

GOAL, OURS, OTHER, BLUE, GREY = "#c1121f", "#2a6f97", "#c98a1b", "#2f6690", "#b8c4cc"


@contextmanager
def drawing(name: str, title: str, **panels: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, which are docs/images/<name>.svg afterwards; the same rows give the same file."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = name.partition("_")[0]
    figure, axes = plt.subplots(layout="constrained", **panels)
    yield figure, axes
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None, "Title": title})
    plt.close(figure)
