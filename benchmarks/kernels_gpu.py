"""Our Triton operators, vLLM's, and the memory floor, on one GPU: `python -m benchmarks.kernels_gpu [--seconds 330]`.

Needs `.cache/gpu` (benchmarks/gpu_prepare.py); docs/explanation/kernels-gpu.md has the whole way. A few checks against
float64 come first, and only then times, in a CUDA graph and eager, ours and vLLM's in turn, vLLM's also with its
`specialize_active_lora`. Cases come in order of what matters; those that the seconds do not suffice for are counted.
`--table FILE` takes another tuning table; else one for this GPU in `.cache/gpu` is taken before the package's.

Writes kernels_gpu.json under --out or $OUT, row by row.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_cases, gpu_check, gpu_compile, gpu_result, gpu_vllm
from benchmarks.gpu_cases import Case
from benchmarks.gpu_device import ROUNDS, Gpu, device

GRAPH_CALLS = 8  # at least this many calls in one graph
MEMORY_BUDGET_BYTES = 44 << 30
EAGER_ROWS = (1, 64, 2048)  # eager times are the host's; a few sizes show them
MOST_DIFFERENCE = 2e-2  # between ours and vLLM's, relative to vLLM's; both round t and y to bfloat16


def main(argv: Sequence[str] | None = None) -> int:
    parser = gpu_result.options("kernels_gpu", 330.0)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args(argv)
    until = time.monotonic() + options.seconds
    gpu_compile.use_cache_of_one_run()
    gpu = device(rehearse=options.rehearse)
    vllm = gpu_vllm.load(rehearse=gpu.rehearsal)
    from lora_plugins.kernels.triton_ops import operators

    table = gpu.table(options.table)
    operators.use(made := operators.Operators(table))
    facts = {**gpu.facts(), "table": Path(table.origin).name, "vllm": vllm.version}
    result = gpu_result.Result(options.out, "kernels_gpu", facts, rehearsal=gpu.rehearsal)
    print(f"{facts['gpu']}, table {facts['table']}, vLLM {vllm.version}", flush=True)
    if gpu.rehearsal:
        gpu_cases.MODELS["Llama-8B"] = gpu_cases.TINY

    wanted = gpu_cases.rehearsed() if gpu.rehearsal else list(gpu_cases.cases())
    with gpu_compile.Compilers(gpu.capability) as compilers:
        began = time.monotonic()
        problems = compilers.compile(compile_jobs(wanted, gpu, table), began + (until - began) / 4)
        result.note(compile_s=round(time.monotonic() - began, 1), compiled=compilers.compiled, not_compiled=problems)
    some = [check for check in gpu_check.checks(small=gpu.rehearsal) if check.dtype == "bfloat16"]
    some = [check for check in some if check.operator == gpu_check.LINEAR][:: 4 if gpu.rehearsal else 1]
    worst, wrong, _ = gpu_check.all_right(made, gpu, result.add, until, some)
    result.note(error_per_allowed=worst, wrong=wrong)
    if wrong:
        result.finish(timed="nothing: the results are not right")
        return 1
    bytes_per_s = copy_bandwidth(gpu)
    result.note(copy_bytes_per_s=round(bytes_per_s), batch_us=grouping(gpu, vllm), cases=len(wanted))
    for row in timed(wanted, made, gpu, vllm, bytes_per_s, until):
        result.add(row)
    rows = result.content["rows"]
    result.finish(left_out=len(wanted) - len(rows), goals=gpu_cases.goals(rows))
    for goal in result.content["goals"]:
        print(goal, flush=True)
    return int(any(row.get("wrong") for row in rows))


def compile_jobs(wanted: Sequence[Case], gpu: Gpu, table: Any) -> list[gpu_compile.Job]:
    """One job for each set of our kernels that the cases launch, in their order."""
    from benchmarks import gpu_weights

    first: dict[object, tuple[Case, Any]] = {}
    for case in wanted:
        plan = table.plan(case.rows, case.n_in, max(case.widths))
        rank_programs = min(plan.shrink.rank_programs, -(-case.slot_rank // plan.shrink.rank))
        kind = (plan, len(case.widths), case.n_slots % 4, rank_programs)
        first.setdefault(kind, (case, table))
    return [(gpu_weights.compile_case, arguments) for arguments in first.values()]


def timed(
    wanted: Sequence[Case], made: Any, gpu: Gpu, vllm: gpu_vllm.Vllm, bytes_per_s: float, until: float
) -> Iterator[dict[str, object]]:
    """Time the cases until the clock says `until`; cases that share weights one after the other."""
    import torch

    from benchmarks import gpu_weights

    for group in gpu_cases.by_weights(wanted):
        if time.monotonic() > until:
            return
        largest = max(group, key=lambda case: case.n_slots)
        few = min(group, key=lambda case: case.adapters)
        copies = min(gpu_weights.copies_for(few), gpu_weights.copies_that_fit(largest, MEMORY_BUDGET_BYTES))
        copies = 1 if gpu.rehearsal else copies
        stacks = gpu_weights.make_stacks(largest, copies, gpu.dtype, gpu.device)
        for case in group:
            if time.monotonic() > until:
                return
            mine = stacks.first(case.n_slots)
            x = torch.randn(case.rows, case.n_in, dtype=gpu.dtype, device=gpu.device)
            y = torch.zeros(case.rows, sum(case.widths), dtype=gpu.dtype, device=gpu.device)
            calls = {
                name: bound(call, y, x)
                for name, call in gpu_weights.all_ways(made, vllm, case, mine, gpu.device).items()
            }
            made.captured_rows = case.rows  # a captured size takes no dense path, also not when it is warmed up
            differ = differences(calls, y)
            enough = min(copies, gpu_weights.copies_for(case))
            us = {f"{name} graph": value for name, value in in_graph(gpu, calls, enough).items()}
            made.captured_rows = 0
            if case.rows in EAGER_ROWS:
                us |= {f"{name} eager": value for name, value in eagerly(gpu, calls, min(enough, 32)).items()}
            row = gpu_cases.row(case, us, case.floor_us(bytes_per_s))
            wrong = {} if max(differ.values()) <= MOST_DIFFERENCE else {"wrong": "ours and vLLM's differ"}
            yield {**row, "copies": enough, "differs": round(max(differ.values()), 5), **wrong}
            if not case.slots:  # the same addresses come with other slots
                made.forget()
                vllm.forget()
        made.forget()
        vllm.forget()
        del stacks, mine, calls
        gpu.empty_cache()


def bound(call: Callable[[int, Any, Any], None], y: Any, x: Any) -> Callable[[int], None]:
    """The call on these, of whichever copy of the weights."""
    return lambda copy: call(copy, y, x)


def differences(calls: dict[str, Callable[[int], None]], y: Any) -> dict[str, float]:
    """How far each result on the first copy is from vLLM's, relative to that."""
    made = {}
    for name, call in calls.items():
        y.zero_()
        call(0)
        made[name] = y.double()
    y.zero_()
    norm = made["vllm"].norm().clamp_min(1e-30)
    return {name: float((value - made["vllm"]).norm() / norm) for name, value in made.items()}


def in_graph(gpu: Gpu, calls: dict[str, Callable[[int], None]], copies: int, rounds: int = ROUNDS) -> dict[str, float]:
    """Microseconds of one call among many in a CUDA graph, each on other weights; medians of rounds taken in turn."""
    number = 1 if gpu.rehearsal else max(GRAPH_CALLS, copies)
    graphs = {}
    for name, call in calls.items():
        for copy in range(copies):
            call(copy)
        gpu.synchronize()

        def many(call: Callable[[int], None] = call) -> None:
            for i in range(number):
                call(i % copies)

        graphs[name] = gpu.captured(many, warm=False)
    return gpu.us(graphs, number, rounds)


def eagerly(gpu: Gpu, calls: dict[str, Callable[[int], None]], copies: int) -> dict[str, float]:
    """Microseconds of one call outside of a graph, the host's work included."""
    number = 1 if gpu.rehearsal else max(GRAPH_CALLS, copies)

    def many(call: Callable[[int], None]) -> Callable[[], None]:
        def run() -> None:
            for i in range(number):
                call(i % copies)

        return run

    return gpu.us({name: many(call) for name, call in calls.items()}, number)


def copy_bandwidth(gpu: Gpu) -> float:
    """Bytes per second, in and out together, of copies of 1 GiB."""
    import torch

    size = 1 << (20 if gpu.rehearsal else 30)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=gpu.device)
    target = torch.empty_like(source)
    best = min(gpu.us({"copy": lambda: target.copy_(source)}, 1)["copy"] for _ in range(3))
    return 2 * size / (best * 1e-6)


def grouping(gpu: Gpu, vllm: gpu_vllm.Vllm) -> dict[str, float]:
    """Microseconds that the host spends on cutting a batch, once per step: ours, and vLLM's for the same rows."""
    import torch

    from lora_plugins.kernels.triton_ops.operators import Batch

    took = {}
    for rows in (8, 16) if gpu.rehearsal else (64, 8192):
        slots = torch.arange(rows, device=gpu.device) % 16
        batch = Batch(rows, 16, gpu.device)
        meta = vllm.meta.make(16, rows, device=gpu.device)
        runs: dict[str, Callable[[], None]] = {
            "ours": lambda batch=batch, slots=slots: batch.cut(slots, set(range(16)), base_rows=False),
            "vllm": lambda meta=meta, slots=slots: meta.prepare_tensors(slots),
        }
        for name, run in runs.items():
            run()
            gpu.synchronize()
            times = 2 if gpu.rehearsal else 50
            begin = time.perf_counter()
            for _ in range(times):
                run()
            took[f"{name} {rows} rows"] = round((time.perf_counter() - begin) / times * 1e6, 1)
            gpu.synchronize()
    return took


if __name__ == "__main__":
    sys.exit(main())
