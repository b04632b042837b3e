"""Make a tuning table for the GPU at hand: `python -m benchmarks.tune_kernels [--seconds 400] [--out DIR]`.

For each size of batch it begins with the default table's plan and takes, one part after the other (chunk and shrink,
then expand, then fused), what makes the geometric mean over some cases smallest. It writes sm_XX.json under --out,
$OUT, or the package; there, and in LORA_PLUGINS_TUNING_DIR, it is found from then on. Hold the result to
`python -m benchmarks.kernels_gpu --check --table FILE` before it is used.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.gpu_cases import Case
from benchmarks.record import circumstances
from lora_plugins.kernels import tuning
from lora_plugins.kernels.tuning import ExpandTile, FusedTile, Plan, ShrinkTile

Score = Callable[[Plan], float]


def cases_of(plan: Plan) -> list[Case]:
    """What a plan is judged by: the largest batch within its limits, few and many adapters, wide and narrow layers."""
    rows = min(plan.max_rows, 8192)
    return [
        Case("Llama-8B", layer, rows, min(adapters, rows), rank, 64)
        for layer, adapters, rank in (("qkv", 1, 16), ("qkv", 16, 16), ("down", 4, 64), ("o", 64, 16))
    ]


def shrinks(plan: Plan) -> Iterator[Plan]:
    """Other ways to cut the shrink, with chunks that suit the size of the batch."""
    sizes = (16,) if plan.max_rows <= 64 else (16, 32, 64) if plan.max_rows <= 2048 else (64, 128)
    splits = (1, 2, 4, 8, 16) if plan.max_rows <= 512 else (1, 2, 4)
    for size, rank, columns, parts in product(sizes, (16, 32), (64, 128, 256), splits):
        stages = 4 if columns <= 64 else 3
        tile = ShrinkTile(rank, columns, parts, plan.shrink.rank_programs, 4, stages)
        yield replace(plan, chunk=size, shrink=tile, fused=None)


def expands(plan: Plan) -> Iterator[Plan]:
    """Other ways to cut the expand."""
    for rank, columns, warps in product((16, 32), (64, 128, 256), (4, 8)):
        yield replace(plan, expand=ExpandTile(rank, columns, warps, 1))


def fusions(plan: Plan) -> Iterator[Plan]:
    """One launch in the place of two, for the smallest batches."""
    if plan.max_rows <= 64 and plan.chunk == tuning.CHUNK_SIZES[0]:
        for rank, columns_in, columns_out in product((16,), (128, 256), (64, 128)):
            yield replace(plan, fused=FusedTile(rank, columns_in, columns_out, 4, 3))


def best(plan: Plan, candidates: Iterable[Plan], score: Score, until: float) -> tuple[Plan, float]:
    """The plan of the smallest score among `plan` and the candidates that the time suffices for."""
    found, least = plan, score(plan)
    for candidate in candidates:
        if time.monotonic() > until:
            break
        figure = score(candidate)
        if figure < least:
            found, least = candidate, figure
    return found, least


def tune(table: tuning.Table, score_of: Callable[[Plan], Score], seconds: float) -> tuning.Table:
    """A table with the same limits and the best plans found; each gets an even share of the time."""
    plans = []
    limits = sorted({plan.max_rows for plan in table.plans})
    for number, most in enumerate(limits):
        plan = replace(
            next(plan for plan in table.plans if plan.max_rows == most), max_in=tuning.ANY, max_out=tuning.ANY
        )
        until = time.monotonic() + seconds / len(limits)
        score = score_of(plan)
        for candidates in (shrinks, expands, fusions):
            plan, least = best(plan, candidates(plan), score, until)
        print(f"up to {most if number < len(limits) - 1 else 'any number of'} rows: {least:.2f} us, {plan}", flush=True)
        plans.append(plan)
    return tuning.Table("tuned", tuple(plans), table.dense_min_rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_kernels")
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or tuning.PACKAGED))
    options = parser.parse_args(argv)
    import torch

    major, minor = torch.cuda.get_device_capability()
    table = tune(tuning.read_table(tuning.PACKAGED / "default.json"), _score_on_device, options.seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"sm_{major}{minor}.json"
    made = {**circumstances(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    path.write_text(json.dumps({"made": made, **tuning.as_json(table)}, indent=1) + "\n")
    print(path)
    return 0


def _score_on_device(first: Plan) -> Score:
    """Geometric mean of microseconds in CUDA graphs over the plan's cases; infinite for what cannot be compiled."""
    import torch
    import triton

    from benchmarks import gpu_weights
    from benchmarks.kernels_gpu import MEMORY_BUDGET_BYTES, in_graph
    from lora_plugins.kernels.triton_ops import operators

    operators.use(made := operators.Operators(tuning.Table("candidate", (first,))))
    calls: list[tuple[Any, int]] = []
    for case in cases_of(first):
        copies = gpu_weights.copies_for(case, MEMORY_BUDGET_BYTES // 4)
        stacks = gpu_weights.make_stacks(case, copies, torch.bfloat16, "cuda")
        x = torch.randn(case.rows, case.n_in, dtype=torch.bfloat16, device="cuda")
        y = torch.zeros(case.rows, sum(case.widths), dtype=torch.bfloat16, device="cuda")
        calls.append((gpu_weights.ours(made, case, stacks, x, y, case.slot_of_row()), copies))

    def score(plan: Plan) -> float:
        made.table = tuning.Table("candidate", (replace(plan, max_rows=tuning.ANY),))
        try:
            took = [in_graph(torch, {"ours": call}, copies)["ours"] for call, copies in calls]
        except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError):
            return math.inf
        return math.exp(sum(map(math.log, took)) / len(took))

    return score


if __name__ == "__main__":
    sys.exit(main())
