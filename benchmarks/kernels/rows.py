"""Figures of docs/explanation/kernels.md, compiled products beside PyTorch's, for R28.

From how many rows of an adapter on PyTorch's products are faster than our compiled ones, by dtype, on this machine.

One layer (`in` 1024, a slice of 1024 and two of 256), one and four adapters of rank 16 and 64, each with 1 to 1024
neighbouring rows, one thread unless `--threads` says otherwise. Compiled and PyTorch's in turn, `--rounds` times; a
figure is that of the fastest run. Prints Markdown, keeps benchmarks/results/kernels_rows.json, or one
named after the processor's bfloat16 instructions. The product's rule: PyTorch computes nothing that our product can.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch

from benchmarks.processors import bfloat16_instructions, description
from benchmarks.record import keep
from lora_plugins.kernels.compiled import build
from lora_plugins.kernels.compiled.panels import SlotPanels
from lora_plugins.kernels.cpu import BatchRows, Buffers, ModulePlan, ModuleSlots
from lora_plugins.kernels.processor import this_processor
from lora_plugins.kernels.slot_ranks import SlotRanks

INN, WIDTHS = 1024, (1024, 256, 256)
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
DTYPES = ("float32", "bfloat16", "float16")


def plans(dtype: str, rank: int, adapters: int, rows: int) -> tuple[dict[str, ModulePlan], torch.Tensor, torch.Tensor]:
    kind = getattr(torch, dtype)
    a = tuple(torch.randn(adapters, 1, rank, INN).to(kind) for _ in WIDTHS)
    b = tuple(torch.randn(adapters, 1, width, rank).to(kind) for width in WIDTHS)
    ranks = SlotRanks(adapters, [rank] * len(WIDTHS))
    batch, buffers = BatchRows(torch.arange(adapters).repeat_interleave(rows)), Buffers()
    panels = SlotPanels(build.product(dtype), a, b, ranks)
    compiled = ModulePlan(ModuleSlots(a, b, ranks, panels), batch, buffers, 1.0)
    by_torch = ModulePlan(ModuleSlots(a, b, ranks), batch, buffers, 1.0)
    n = adapters * rows
    return (
        {"compiled": compiled, "torch": by_torch},
        torch.zeros(n, sum(WIDTHS), dtype=kind),
        torch.randn(n, INN).to(kind),
    )


def seconds(plan: ModulePlan, y: torch.Tensor, x: torch.Tensor, at_least_s: float = 0.002) -> float:
    """Of the fastest run: as many as fill the time."""
    best, passed = float("inf"), 0.0
    while passed < at_least_s:
        started = time.perf_counter()
        plan.run(y, x)
        took = time.perf_counter() - started
        best, passed = min(best, took), passed + took
    return best


def crossing(rows: list[dict]) -> int | None:
    """The number of rows from which on PyTorch's products are the faster ones; None where they never are."""
    found = None
    for row in sorted(rows, key=lambda row: -row["rows"]):
        if row["torch_s"] >= row["compiled_s"]:
            break
        found = row["rows"]
    return found


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--threads", type=int, nargs="*", default=[1])
    arguments.add_argument("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES))
    arguments.add_argument("--dry", action="store_true", help="keep no result")
    options = arguments.parse_args()
    found = []
    for dtype in options.dtypes:
        for threads in options.threads:
            torch.set_num_threads(threads)
            for rank in (16, 64):
                for adapters in (1, 4):
                    for rows in ROWS:
                        both, y, x = plans(dtype, rank, adapters, rows)
                        rounds = [
                            {name: seconds(plan, y, x) for name, plan in both.items()} for _ in range(options.rounds)
                        ]
                        best = {f"{name}_s": min(of[name] for of in rounds) for name in both}
                        case = {"dtype": dtype, "threads": threads, "rank": rank, "adapters": adapters}
                        found.append({**case, "rows": rows, **best, "load": os.getloadavg()[0]})
    print(table(found))
    machine = this_processor()
    print(f"\n{description(machine)}")
    if not options.dry:
        of_bfloat16 = (bfloat16_instructions(machine) or "").lower().replace("-", "").replace(" ", "_")
        name = f"kernels_rows_{of_bfloat16}".rstrip("_")
        print(f"Raw: {keep(name, {'machine': description(machine), 'cases': found}).name}")
    return 0


def table(found: list[dict]) -> str:
    heads = "".join(f" {rows} |" for rows in ROWS)
    lines = [
        f"| dtype | threads | rank | adapters |{heads} PyTorch's from |",
        "|---|---|---|---|" + "---|" * (len(ROWS) + 1),
    ]
    cases = dict.fromkeys((row["dtype"], row["threads"], row["rank"], row["adapters"]) for row in found)
    for case in cases:
        own = [row for row in found if (row["dtype"], row["threads"], row["rank"], row["adapters"]) == case]
        cells = [f"{row['compiled_s'] * 1e6:.0f} / {row['torch_s'] * 1e6:.0f}" for row in own]
        lines.append("| " + " | ".join(map(str, (*case, *cells, crossing(own) or "never"))) + " |")
    return "µs of one run for each number of rows of an adapter, compiled / PyTorch's:\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
