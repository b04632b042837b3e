"""What a row costs the base model of the admission benchmark on this processor: its matrix products, one thread.

More adapters in a step win where a step costs about the same with more rows. Where each row costs as much as the last
one, they cannot: `python -m benchmarks.base_rows` says which of them this machine is.
"""

from __future__ import annotations

import statistics
import sys
import time

from benchmarks.manager.scenarios import SERVINGS
from benchmarks.record import keep

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
ROUNDS = 15


def step_ms(hidden: int, layers: int, rows: int) -> float:
    """The median time of all products of one step, in milliseconds."""
    import torch

    torch.manual_seed(0)
    kv, inner = hidden // 4, 2 * hidden
    shapes = [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)] * layers
    weights = [torch.randn(shape) for shape in shapes]
    inputs = {inn: torch.randn(rows, inn) for inn in (hidden, inner)}
    times = []
    for _ in range(ROUNDS):
        began_at = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        times.append(time.perf_counter() - began_at)
    return statistics.median(times) * 1e3


def main() -> int:
    import torch

    torch.set_num_threads(1)
    rows = []
    print("| base of | " + " | ".join(f"{count} rows" for count in ROWS) + " |\n|" + "---|" * (len(ROWS) + 1))
    for serving in SERVINGS:
        found = {count: step_ms(serving.hidden, serving.layers, count) for count in ROWS}
        rows.append({"serving": serving.name, "step_ms": {str(count): ms for count, ms in found.items()}})
        print(f"| {serving.name} | " + " | ".join(f"{ms:.1f} ms" for ms in found.values()) + " |")
    print(f"\nRaw: {keep('base_rows', rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
