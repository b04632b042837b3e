"""Figures of docs/benchmarks/manager.md: `make bench-manager`.

`python -m benchmarks.manager [admission|stall|activation|memory]`, all of them by default.

Each prints Markdown and keeps its raw rows in benchmarks/results/. A part can be run by itself (`stall --sizes 40`):
its rows then replace those of the same sizes in the kept file, so that a long benchmark can be taken up again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys

from benchmarks import plots
from benchmarks.record import RESULTS, keep


def merged(name: str, rows: list[dict], same: tuple[str, ...]) -> list[dict]:
    """Keep `rows` together with earlier ones that differ from all of them in one of the `same` fields."""
    path = RESULTS / f"{name}.json"
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {tuple(row.get(field) for field in same) for row in rows}
    rows = [row for row in earlier if tuple(row.get(field) for field in same) not in new] + rows
    keep(name, rows)
    return rows


def stall(options: argparse.Namespace) -> None:
    from benchmarks.manager.stall import measure, table

    for size_mb in options.sizes:
        rows: list[dict] = []
        try:
            measure(
                size_mb,
                options.arms,
                rows,
                blocks=options.blocks,
                arrivals=options.arrivals,
            )
        finally:  # a time limit leaves what has been measured
            if rows:
                print(table(rows), flush=True)
                rows = merged("stall", rows, ("arm", "size_mb"))
    print(table(rows))
    plots.stall(rows)


def activation(options: argparse.Namespace) -> None:
    from benchmarks.manager.activation import measure, table

    rows = merged("activation", measure(options.pairs), ("rank", "max_rank"))
    print(table(rows))


def admission(options: argparse.Namespace) -> None:
    from benchmarks.manager.admission import RESULT, measure
    from benchmarks.manager.admission_table import table

    rows = measure(
        options.servings,
        options.slots,
        options.traffic,
        stretches=options.stretches,
        stretch_s=options.stretch_s,
    )
    print(table(merged(RESULT, rows, ("serving", "slots", "traffic"))))


def memory(options: argparse.Namespace) -> None:
    from benchmarks.manager.memory import measure, table

    print(table(merged("memory", measure(options.cycles), ("arm", "what"))))


def _pair(text: str) -> tuple[int, int]:
    rank, max_rank = text.split("/")
    return int(rank), int(max_rank)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part")
    part = parts.add_parser("stall")
    part.add_argument("--sizes", type=int, nargs="*", default=[40, 150, 600])
    part.add_argument("--arms", nargs="*", default=["vllm", "vllm+kernels", "ours+kernels"])
    part.add_argument("--blocks", type=int, default=3)
    part.add_argument("--arrivals", type=int, default=3)
    part.set_defaults(run=stall)
    part = parts.add_parser("activation")
    pairs = [(16, 16), (64, 64), (256, 256), (16, 64), (16, 256), (64, 256)]
    part.add_argument("--pairs", type=_pair, nargs="*", default=pairs, metavar="RANK/MAX_LORA_RANK")
    part.set_defaults(run=activation)
    part = parts.add_parser("admission")
    part.add_argument("--servings", nargs="*", default=["12/3", "16/4", "40/3"], metavar="ADAPTERS/SLOTS")
    part.add_argument("--slots", nargs="*", default=["pointers", "copies"])
    part.add_argument("--traffic", default="", help="only what has this in its name, as in `Zipf, 12`")
    part.add_argument("--stretches", type=int, default=2)
    part.add_argument("--stretch-s", type=float, default=5.0)
    part.set_defaults(run=admission)
    part = parts.add_parser("memory")
    part.add_argument("--cycles", type=int, default=10_000)
    part.set_defaults(run=memory)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the servers would outlive a time limit
    for name in [options.part] if options.part else list(parts.choices):
        chosen = options if options.part else parser.parse_args([name])
        chosen.run(chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
