"""Figures of R27 and R30 on a GPU, for docs/explanation/kernels-gpu.md.

Our Triton operators, vLLM's, the layer's own product of matrices, and the memory floor.

A few checks against float64 come first, and only then times, in a CUDA graph and eager, ours and vLLM's in turn, vLLM's
also with its `specialize_active_lora`. Cases come in order of what matters; those that the seconds do not suffice for
are counted. Writes kernels_gpu.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from benchmarks.gpu import cases, check, vllm
from benchmarks.gpu.cases import Case
from benchmarks.gpu.compiling import Job
from benchmarks.gpu.device import ROUNDS, Gpu
from benchmarks.gpu.session import Session

GRAPH_CALLS = 8  # at least this many calls in one graph
MEMORY_BUDGET_BYTES = 44 << 30
EAGER_ROWS = (1, 64, 2048)  # eager times are the host's; a few sizes show them
MOST_DIFFERENCE = 2e-2  # between ours and vLLM's, relative to vLLM's; both round t and y to bfloat16

Copies = Callable[[int], None]  # a call on one copy of the weights


def run(session: Session, theirs: vllm.Vllm) -> bool:
    """Check and time; False where something is wrong."""
    gpu = session.gpu
    wanted = cases.rehearsed() if gpu.rehearsal else list(cases.cases())
    result = session.result("kernels_gpu", vllm=theirs.version, cases=len(wanted))
    result.note(**session.compile_ahead(compile_jobs(wanted, session.table), 1 / 4))
    some = (it for it in check.checks(small=gpu.rehearsal) if (it.dtype, it.operator) == ("bfloat16", check.LINEAR))
    worst, wrong, _ = check.all_right(session, result.add, list(islice(some, 0, None, 4 if gpu.rehearsal else 1)))
    result.note(error_per_allowed=worst, wrong=wrong)
    if wrong:
        result.finish(timed="nothing: the results are not right")
        return False
    bytes_per_s = copy_bandwidth(gpu)
    result.note(copy_bytes_per_s=round(bytes_per_s))
    rows = []
    for row in timed(wanted, session, theirs, bytes_per_s):
        rows.append(row)
        result.add(row)
    found = cases.goals(rows)
    result.finish(left_out=len(wanted) - len(rows), goals=found)
    print(*found, sep="\n", flush=True)
    return bool(rows) and not any(row.get("wrong") for row in rows)


def compile_jobs(wanted: Sequence[Case], table: Any) -> list[Job]:
    """One job for each set of our kernels that the cases launch, in their order."""
    from benchmarks.gpu import weights

    first: dict[object, Job] = {}
    for case in wanted:
        plan = table.plan(case.rows, case.n_in, max(case.widths))
        rank_programs = min(plan.shrink.rank_programs, -(-case.slot_rank // plan.shrink.rank))
        kind = (plan, len(case.widths), case.n_slots % 4, rank_programs)
        first.setdefault(kind, (weights.compile_case, (case, table)))
    return list(first.values())


def timed(
    wanted: Sequence[Case], session: Session, theirs: vllm.Vllm, bytes_per_s: float
) -> Iterator[dict[str, object]]:
    """Time the cases until the time is over; cases that share weights one after the other."""
    from benchmarks.gpu import weights

    gpu, made = session.gpu, session.made
    for group in cases.by_weights(wanted):
        if session.is_over:
            return
        largest = max(group, key=lambda case: case.n_slots)
        few = min(group, key=lambda case: case.adapters)
        copies = min(weights.copies_for(few), weights.copies_that_fit(largest, MEMORY_BUDGET_BYTES))
        copies = 1 if gpu.rehearsal else copies
        stacks = weights.make_stacks(largest, copies, gpu.dtype, gpu.device)
        for case in group:
            if session.is_over:
                return
            calls, y = ways(session, theirs, case, stacks.first(case.n_slots))
            made.captured_rows = case.rows  # a captured size takes no dense path, also not when it is warmed up
            differ = max(differences(calls, y).values())
            enough = min(copies, weights.copies_for(case))
            beside = {"base": base_product(gpu, case, copies)} if case.slots else {}
            us = {f"{name} graph": value for name, value in in_graph(gpu, {**calls, **beside}, enough).items()}
            made.captured_rows = 0
            if case.rows in EAGER_ROWS:
                us |= {f"{name} eager": value for name, value in eagerly(gpu, calls, min(enough, 32)).items()}
            wrong = {} if differ <= MOST_DIFFERENCE else {"wrong": "ours and vLLM's differ"}
            row = cases.row(case, us, case.floor_us(bytes_per_s))
            yield {**row, "copies": enough, "differs": round(differ, 5), **wrong}
            if not case.slots:  # the same addresses come with other slots
                made.forget()
                theirs.forget()
        made.forget()
        theirs.forget()
        del stacks, calls, beside
        gpu.empty_cache()


def ways(session: Session, theirs: vllm.Vllm, case: Case, stacks: Any) -> tuple[dict[str, Copies], Any]:
    """Ours, vLLM's, and vLLM's where it launches for the active slots only; and the output that all of them have."""
    from benchmarks.gpu import weights

    gpu, torch = session.gpu, session.gpu.torch
    x = torch.randn(case.rows, case.n_in, dtype=gpu.dtype, device=gpu.device)
    y = torch.zeros(case.rows, sum(case.widths), dtype=gpu.dtype, device=gpu.device)
    calls = {"ours": weights.ours(session.made, case, stacks, weights.batch_of(case, gpu.device))}
    for name, specialized in (("vllm", False), ("vllm specialized", True)):
        batch = weights.batch_of_vllm(theirs, case, gpu.device, specialized=specialized)
        calls[name] = weights.vllms(theirs, case, stacks, batch)
    return {name: bound(call, y, x) for name, call in calls.items()}, y


def base_product(gpu: Gpu, case: Case, copies: int) -> Copies:
    """What the layer computes without adapters, on weights that no cache holds from one call to the next."""
    from benchmarks.gpu import weights

    torch, n_out = gpu.torch, sum(case.widths)
    held = min(copies, 1 + weights.COLD_BYTES // (2 * case.n_in * n_out))
    bases = [torch.randn(n_out, case.n_in, dtype=gpu.dtype, device=gpu.device) for _ in range(held)]
    x = torch.randn(case.rows, case.n_in, dtype=gpu.dtype, device=gpu.device)
    return lambda copy: torch.mm(x, bases[copy % held].t())


def bound(call: Callable[[int, Any, Any], None], y: Any, x: Any) -> Copies:
    """The call on these, of whichever copy of the weights."""
    return lambda copy: call(copy, y, x)


def differences(calls: dict[str, Copies], y: Any) -> dict[str, float]:
    """How far each result on the first copy is from vLLM's, relative to that."""
    made = {}
    for name, call in calls.items():
        y.zero_()
        call(0)
        made[name] = y.double()
    norm = made["vllm"].norm().clamp_min(1e-30)
    return {name: float((value - made["vllm"]).norm() / norm) for name, value in made.items()}


def in_graph(gpu: Gpu, calls: dict[str, Copies], copies: int, rounds: int = ROUNDS) -> dict[str, float]:
    """Microseconds of one call among many in a CUDA graph, each on other weights; medians of rounds taken in turn."""
    number = 1 if gpu.rehearsal else max(GRAPH_CALLS, copies)
    graphs = {}
    for name, call in calls.items():
        for copy in range(copies):
            call(copy)
        gpu.synchronize()
        graphs[name] = gpu.captured(_many(call, number, copies), warm=False)
    return gpu.us(graphs, number, rounds)


def eagerly(gpu: Gpu, calls: dict[str, Copies], copies: int) -> dict[str, float]:
    """Microseconds of one call outside of a graph, the host's work included."""
    number = 1 if gpu.rehearsal else max(GRAPH_CALLS, copies)
    return gpu.us({name: _many(call, number, copies) for name, call in calls.items()}, number)


def _many(call: Copies, number: int, copies: int) -> Callable[[], None]:
    def run() -> None:
        for i in range(number):
            call(i % copies)

    return run


def copy_bandwidth(gpu: Gpu) -> float:
    """Bytes per second, in and out together, of copies of 1 GiB."""
    size = 1 << (20 if gpu.rehearsal else 30)
    source = gpu.torch.randint(0, 255, (size,), dtype=gpu.torch.uint8, device=gpu.device)
    target = gpu.torch.empty_like(source)
    best = min(gpu.us({"copy": lambda: target.copy_(source)})["copy"] for _ in range(3))
    return 2 * size / (best * 1e-6)
