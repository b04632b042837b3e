"""Draw the plots of docs/images again from what is kept in benchmarks/results: `python -m benchmarks.plots`."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import kernels_cpu, kernels_plot, rl, routing
from benchmarks.manager import plot
from benchmarks.record import RESULTS


def rows(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def main() -> None:
    drawn = (
        kernels_plot.plot([row for row in kernels_cpu.kept() if "case" in row]),
        rl.plot(rows("rl")),
        plot.stall(rows("stall")),
        routing.plot([routing.Outcome(**of_one) for of_one in rows("routing")["policies"]]),
    )
    print(*(path.name for path in drawn))


if __name__ == "__main__":
    main()
