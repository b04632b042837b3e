"""Plans of R27 for one GPU, by docs/explanation/kernels-gpu.md.

Make a tuning table for the GPU at hand.

For each size of batch, narrow and wide inputs apart, it begins with the default table's plan and takes, one part after
the other (chunk and shrink, then expand, then fused), what makes the geometric mean over some cases smallest. What is
to be compared is compiled in parallel first. It writes sm_XX.json, again after every plan, so that a run that is cut
off leaves a table with the plans that it had found, and the default's for the others.

In the package a table is found by its name. Hold it to `python -m benchmarks.gpu check --table FILE` before it is used.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

from benchmarks.gpu.cases import Case
from benchmarks.gpu.device import Gpu
from benchmarks.gpu.operators import (
    MEMORY_BUDGET_BYTES,
    batch_of,
    bound,
    compile_case,
    copies_for,
    in_graph,
    make_stacks,
    ours,
)
from benchmarks.gpu.session import Job, Session
from benchmarks.record import circumstances
from lora_plugins.kernels import tuning
from lora_plugins.kernels.tuning import ExpandTile, FusedTile, Plan, ShrinkTile

Score = Callable[[Plan], float]
CompileAhead = Callable[[Sequence[Plan]], None]

NARROW_IN = 8192  # up to here the inputs of most layers; those of `down` are wider, and want more splits


def cases_of(plan: Plan) -> list[Case]:
    """What a plan is judged by: the largest batch within its limits, few and many adapters, more slots than those."""
    rows = min(plan.max_rows, 8192)
    if plan.max_in < tuning.ANY:
        asked = (("qkv", 1, 16), ("qkv", 4, 64), ("o", 16, 16))
    else:
        asked = (("down", 1, 16), ("down", 4, 64), ("down", 16, 16))
    return [Case("Llama-8B", layer, rows, min(adapters, rows), rank, 64, slots=16) for layer, adapters, rank in asked]


def shrinks(plan: Plan) -> Iterator[Plan]:
    """Other ways to cut the shrink, with chunks that suit the size of the batch and splits that suit the input."""
    sizes = (16,) if plan.max_rows <= 64 else (16, 32) if plan.max_rows <= 512 else (32, 64, 128)
    few = (4, 8, 16) if plan.max_in < tuning.ANY else (8, 16, 32, 56)
    splits = few if plan.max_rows <= 64 else (2, 4, 8, 16) if plan.max_rows <= 512 else (1, 2)
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
    if plan.max_rows <= 64 and plan.max_in < tuning.ANY and plan.chunk == tuning.CHUNK_SIZES[0]:
        for rank, columns_in, columns_out in product((16,), (128, 256), (64, 128)):
            yield replace(plan, fused=FusedTile(rank, columns_in, columns_out, 4, 1))


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


def starting_plans(table: tuning.Table) -> tuple[Plan, ...]:
    """For each limit on rows of the table a plan for narrow inputs and one for all others, in the table's order."""
    plans = []
    for most in sorted({plan.max_rows for plan in table.plans}):
        rows = min(most, 1 << 20)
        for n_in, limit in ((4096, NARROW_IN), (14336, tuning.ANY)):
            plan = table.plan(rows, n_in, 4096)
            plans.append(replace(plan, max_rows=most, max_in=limit, max_out=tuning.ANY))
    return tuple(plans)


def tune(
    table: tuning.Table,
    score_of: Callable[[Plan], Score],
    seconds: float,
    *,
    compile_ahead: CompileAhead = lambda plans: None,
    keep: Callable[[tuning.Table, int], None] = lambda table, found: None,
    most: int | None = None,
) -> tuning.Table:
    """The best plans found for these limits; each gets an even share of the time that is left.

    Of each kind the first `most` are compared. `keep(table, found)` is called after each plan, with those that are
    found and the starting ones of the others.
    """
    plans = list(starting_plans(table))
    end = time.monotonic() + seconds
    compile_ahead([candidate for plan in plans for candidate in islice(shrinks(plan), most)])
    for number in range(len(plans)):
        plan = plans[number]
        until = time.monotonic() + (end - time.monotonic()) / (len(plans) - number)
        score, least = score_of(plan), math.inf
        for candidates in (shrinks, expands, fusions):
            wanted = list(candidates(plan))[:most]
            if not wanted or time.monotonic() > until:
                continue
            compile_ahead([plan, *wanted])
            plan, least = best(plan, wanted, score, until)
        print(f"up to {plan.max_rows:.3g} rows, {plan.max_in:.3g} in: {least:.2f} us, {plan}", flush=True)
        plans[number] = plan
        keep(tuning.Table("tuned", tuple(plans), table.dense_min_rows), number + 1)
    return tuning.Table("tuned", tuple(plans), table.dense_min_rows)


def run(session: Session) -> bool:
    """Write the table; it is whole after each plan."""
    gpu = session.gpu
    path = session.out / f"{'rehearsal_' if gpu.rehearsal else ''}{gpu.architecture}.json"
    session.out.mkdir(parents=True, exist_ok=True)
    facts = {**({"rehearsal: not measured": True} if gpu.rehearsal else {}), **circumstances(), **gpu.facts()}

    def keep(table: tuning.Table, found: int) -> None:
        made = {**facts, "plans_found": found, "complete": found == len(table.plans)}
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"made": made, **tuning.as_json(table)}, indent=1) + "\n")
        part.replace(path)

    def compile_ahead(plans: Sequence[Plan]) -> None:
        facts = session.compile_ahead(compile_jobs(plans[:2] if gpu.rehearsal else plans), 1 / 3)
        print(facts, flush=True)

    tune(
        gpu.table() if gpu.rehearsal else tuning.read_table(tuning.PACKAGED / "default.json"),
        lambda plan: _score_on(gpu, plan),
        session.seconds,
        compile_ahead=compile_ahead,
        keep=keep,
        most=1 if gpu.rehearsal else None,
    )
    print(path)
    return True


def compile_jobs(plans: Sequence[Plan]) -> list[Job]:
    """One job for each plan and number of slices; inputs of one plan have the same divisibility."""
    jobs: dict[object, Job] = {}
    for plan in plans:
        for case in cases_of(plan):
            kind = (plan.chunk, plan.shrink, plan.expand, plan.fused, len(case.widths))
            table = tuning.Table("", (replace(plan, max_rows=tuning.ANY, max_in=tuning.ANY),))
            jobs.setdefault(kind, (compile_case, (case, table)))
    return list(jobs.values())


def _score_on(gpu: Gpu, first: Plan) -> Score:
    """Geometric mean of microseconds in CUDA graphs over the plan's cases; infinite for what cannot be compiled."""
    import torch
    import triton

    from lora_plugins.kernels.triton_ops import operators

    operators.use(made := operators.Operators(tuning.Table("candidate", (first,))))
    calls: list[tuple[Any, int]] = []
    for case in cases_of(replace(first, max_rows=min(first.max_rows, 8)) if gpu.rehearsal else first):
        copies = copies_for(case, MEMORY_BUDGET_BYTES // 4)
        stacks = make_stacks(case, 1 if gpu.rehearsal else copies, gpu.dtype, gpu.device)
        x = torch.randn(case.rows, case.n_in, dtype=gpu.dtype, device=gpu.device)
        y = torch.zeros(case.rows, sum(case.widths), dtype=gpu.dtype, device=gpu.device)
        call = ours(made, case, stacks, batch_of(case, gpu.device))
        calls.append((bound(call, y, x), len(stacks.a)))

    def score(plan: Plan) -> float:
        made.table = tuning.Table("candidate", (replace(plan, max_rows=tuning.ANY, max_in=tuning.ANY),))
        try:
            took = [in_graph(gpu, {"ours": call}, copies, rounds=3)["ours"] for call, copies in calls]
        except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError):
            return math.inf
        return math.exp(sum(map(math.log, took)) / len(took))

    return score
