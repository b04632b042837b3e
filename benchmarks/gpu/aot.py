"""Goal of R27 without a GPU, and the figures of docs/explanation/kernels-gpu.md: `make bench-kernels-aot`.

What the Triton kernels compile to, without a GPU: registers, spills, shared memory, width of loads.

    python -m benchmarks.gpu.aot            # prints, and keeps benchmarks/results/kernels_aot.json
    python -m benchmarks.gpu.aot --print    # one JSON object per line, keeps nothing (for the tests)

Every plan of the default table is launched for the shapes below, recorded, and compiled for each architecture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby

import torch

from benchmarks.record import keep
from lora_plugins.kernels import tuning
from lora_plugins.kernels.triton_ops import chunks, expand, shrink
from lora_plugins.kernels.triton_ops.packed import Operands, PackedModule
from testbed.ahead_of_time import compile_launches

KERNELS = (chunks._cut_kernel, shrink._shrink_kernel, expand._expand_kernel)
SLOTS, MAX_RANK, MAX_ROWS = 4, 64, 8192
MANY_SLOTS = 512
# Llama-3-8B's packed q, k, v; and sizes of which nothing is a multiple of anything.
SHAPES = {"qkv": (4096, (4096, 1024, 1024)), "odd": (1023, (515, 77))}
# (shape, dtype): architectures. bfloat16 is what people serve with; the others must not spill either.
COMPILED = {
    ("qkv", torch.bfloat16): (80, 90, 100),
    ("qkv", torch.float16): (90,),
    ("qkv", torch.float32): (80,),
    ("odd", torch.bfloat16): (90,),
}


def launch(plan: tuning.Plan, shape: str, dtype: torch.dtype) -> None:
    """What one batch of the plan's size runs, on empty tensors."""
    n_in, widths = SHAPES[shape]
    rows = min(plan.max_rows, MAX_ROWS)
    a = [torch.empty(SLOTS, 1, MAX_RANK, n_in, dtype=dtype) for _ in widths]
    b = [torch.empty(SLOTS, 1, width, MAX_RANK, dtype=dtype) for width in widths]
    module = PackedModule(a, b, widths)
    x, y = torch.empty(rows, n_in, dtype=dtype), torch.empty(rows, sum(widths), dtype=dtype)
    ranks = torch.zeros(len(widths) + 1, SLOTS, dtype=torch.int32)
    vectors = torch.empty(SLOTS, 2, sum(widths))
    batch = chunks.Chunks(MAX_ROWS, SLOTS, "cpu")
    batch.cut(torch.zeros(rows, dtype=torch.int64))
    t = shrink.partials(plan.shrink, module, rows, "cpu")
    operands = Operands(module, ranks, vectors, batch, plan.chunk)
    shrink.shrink(t, x, operands, plan.shrink, 1.0)
    expand.expand(y, t, operands, plan.expand)
    if plan.fused:
        expand.fused(y, x, operands, plan.fused, 1.0)


def cut_many_slots() -> None:
    """What grouping a batch runs in an engine of many slots."""
    chunks.Chunks(MAX_ROWS, MANY_SLOTS, "cpu").cut(torch.zeros(MAX_ROWS, dtype=torch.int64))


def results(table: tuning.Table) -> Iterator[dict[str, object]]:
    for compiled in compile_launches((chunks._cut_kernel,), cut_many_slots, (80, 90, 100)):
        yield {"shape": f"{MANY_SLOTS} slots", "dtype": "int64", "max_rows": MAX_ROWS, **asdict(compiled)}
    for plan in table.plans:
        for (shape, dtype), architectures in COMPILED.items():
            for compiled in compile_launches(KERNELS, lambda: launch(plan, shape, dtype), architectures):  # noqa: B023
                yield {
                    "shape": shape,
                    "dtype": str(dtype).removeprefix("torch."),
                    "max_rows": min(plan.max_rows, MAX_ROWS),
                    **asdict(compiled),
                }


def main() -> None:
    table = tuning.read_table(tuning.PACKAGED / "default.json")
    rows = []
    for row in results(table):
        rows.append(row)
        if "--print" in sys.argv[1:]:
            print(json.dumps(row), flush=True)
    if "--print" in sys.argv[1:]:
        return
    rows.sort(key=lambda row: (row["kernel"], row["architecture"], row["dtype"], row["shape"], row["max_rows"]))
    print(f"{'kernel':15} sm_  {'dtype':9} shape      rows  registers  spilled  shared  element-wise loads")
    for _, group in groupby(rows, key=lambda row: (row["kernel"], row["architecture"])):
        for row in group:
            print(
                f"{row['kernel']:15} {row['architecture']:<4} {row['dtype']:9} {row['shape']:9} {row['max_rows']:5}"
                f"  {row['registers']:9}  {row['spilled_bytes']:7}  {row['shared_bytes']:6}  {row['narrow']:5}"
            )
    print(keep("kernels_aot", rows))


if __name__ == "__main__":
    main()
