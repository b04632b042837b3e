"""Figures of R27 and R30 on a GPU, for docs/explanation/kernels-gpu.md.

Our Triton operators, vLLM's, the layer's own product of matrices, and the memory floor.

A few checks against float64 come first, and only then times, in a CUDA graph and eager, ours and vLLM's in turn, vLLM's
also with its `specialize_active_lora`. Cases come in order of what matters; those that the seconds do not suffice for
are counted. Writes kernels_gpu.json.

A model has many layers, whose weights do not stay in the second-level cache from one step to the next. So there are
several copies of every stack, used in turn, of more bytes together than the cache has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from benchmarks.gpu import cases, check
from benchmarks.gpu.cases import Case
from benchmarks.gpu.device import ROUNDS, Gpu
from benchmarks.gpu.session import Job, Session
from benchmarks.gpu.vllm import Vllm
from lora_plugins.kernels.slot_ranks import SlotRanks
from lora_plugins.kernels.triton_ops import operators
from lora_plugins.kernels.triton_ops.operators import Batch, Operators
from lora_plugins.kernels.tuning import Table

GRAPH_CALLS = 8  # at least this many calls in one graph
MEMORY_BUDGET_BYTES = 44 << 30
EAGER_ROWS = (1, 64, 2048)  # eager times are the host's; a few sizes show them
MOST_DIFFERENCE = 2e-2  # between ours and vLLM's, relative to vLLM's; both round t and y to bfloat16

COLD_BYTES = 160 << 20  # more than twice the L2 of an H100 or H200 (50 MiB)
MOST_COPIES = 256

Call = Callable[[int, Any, Any], None]  # copy, y, x
Copies = Callable[[int], None]  # a call on one copy of the weights


def run(session: Session, theirs: Vllm) -> bool:
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
    first: dict[object, Job] = {}
    for case in wanted:
        plan = table.plan(case.rows, case.n_in, max(case.widths))
        rank_programs = min(plan.shrink.rank_programs, -(-case.slot_rank // plan.shrink.rank))
        kind = (plan, len(case.widths), case.n_slots % 4, rank_programs)
        first.setdefault(kind, (compile_case, (case, table)))
    return list(first.values())


def timed(wanted: Sequence[Case], session: Session, theirs: Vllm, bytes_per_s: float) -> Iterator[dict[str, object]]:
    """Time the cases until the time is over; cases that share weights one after the other."""
    gpu, made = session.gpu, session.made
    for group in cases.by_weights(wanted):
        if session.is_over:
            return
        largest = max(group, key=lambda case: case.n_slots)
        few = min(group, key=lambda case: case.adapters)
        copies = min(copies_for(few), copies_that_fit(largest, MEMORY_BUDGET_BYTES))
        copies = 1 if gpu.rehearsal else copies
        stacks = make_stacks(largest, copies, gpu.dtype, gpu.device)
        for case in group:
            if session.is_over:
                return
            calls, y = ways(session, theirs, case, stacks.first(case.n_slots))
            made.captured_rows = case.rows  # a captured size takes no dense path, also not when it is warmed up
            differ = max(differences(calls, y).values())
            enough = min(copies, copies_for(case))
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


def ways(session: Session, theirs: Vllm, case: Case, stacks: Any) -> tuple[dict[str, Copies], Any]:
    """Ours, vLLM's, and vLLM's where it launches for the active slots only; and the output that all of them have."""
    gpu, torch = session.gpu, session.gpu.torch
    x = torch.randn(case.rows, case.n_in, dtype=gpu.dtype, device=gpu.device)
    y = torch.zeros(case.rows, sum(case.widths), dtype=gpu.dtype, device=gpu.device)
    calls = {"ours": ours(session.made, case, stacks, batch_of(case, gpu.device))}
    for name, specialized in (("vllm", False), ("vllm specialized", True)):
        batch = batch_of_vllm(theirs, case, gpu.device, specialized=specialized)
        calls[name] = vllms(theirs, case, stacks, batch)
    return {name: bound(call, y, x) for name, call in calls.items()}, y


def base_product(gpu: Gpu, case: Case, copies: int) -> Copies:
    """What the layer computes without adapters, on weights that no cache holds from one call to the next."""
    torch, n_out = gpu.torch, sum(case.widths)
    held = min(copies, 1 + COLD_BYTES // (2 * case.n_in * n_out))
    bases = [torch.randn(n_out, case.n_in, dtype=gpu.dtype, device=gpu.device) for _ in range(held)]
    x = torch.randn(case.rows, case.n_in, dtype=gpu.dtype, device=gpu.device)
    return lambda copy: torch.mm(x, bases[copy % held].t())


def bound(call: Call, y: Any, x: Any) -> Copies:
    """The call on these, of whichever copy of the"""
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


@dataclass
class Stacks:
    """`copies` times the stacks of one layer: `a[copy][slice]`: `[slots, 1, slot_rank, in]`, `b` likewise."""

    a: list[list[Any]]
    b: list[list[Any]]
    slots: int

    def first(self, slots: int) -> Stacks:
        """The same weights, of these slots only."""
        a, b = ([[part[:slots] for part in stack] for stack in stacks] for stacks in (self.a, self.b))
        return Stacks(a, b, slots)


def copies_for(case: Case, budget_bytes: int | None = None) -> int:
    """How many copies make the weights that the case reads exceed the cache, within `budget_bytes` of slots."""
    ranks = sum(case.rank_of_slot(case.slot_of(adapter)) for adapter in range(case.adapters))
    wanted = min(MOST_COPIES, -(-COLD_BYTES // (_bytes_of_rank(case) * ranks)))
    return wanted if budget_bytes is None else min(wanted, copies_that_fit(case, budget_bytes))


def copies_that_fit(case: Case, budget_bytes: int) -> int:
    """How many copies of the case's slots so many bytes hold, at least one."""
    return max(1, budget_bytes // (_bytes_of_rank(case) * case.slot_rank * case.n_slots))


def _bytes_of_rank(case: Case) -> int:
    return 2 * sum(case.n_in + width for width in case.widths)


def make_stacks(case: Case, copies: int, dtype: Any, device: Any, *, filled: bool = True) -> Stacks:
    """Random adapters of the case's ranks in slots of its slot rank, zeros beyond, as vLLM's slots are."""

    def stack(rows: int, columns: int, rank_axis: int) -> Any:
        made = torch.empty(case.n_slots, 1, rows, columns, dtype=dtype, device=device)
        if filled:
            made.normal_(0, 0.05)
            for slot in range(case.n_slots):
                rank = case.rank_of_slot(slot)
                made[slot].narrow(rank_axis - 1, rank, case.slot_rank - rank).zero_()
        return made

    return Stacks(
        [[stack(case.slot_rank, case.n_in, 2) for _ in case.widths] for _ in range(copies)],
        [[stack(width, case.slot_rank, 3) for width in case.widths] for _ in range(copies)],
        case.n_slots,
    )


def batch_of(case: Case, device: Any) -> Batch:
    """The case's batch, cut."""
    batch = Batch(case.rows, case.n_slots, device)
    slot_of_row = case.slot_of_row()
    in_use = {slot for slot in slot_of_row if slot >= 0}
    batch.cut(torch.tensor(slot_of_row, device=device), in_use, base_rows=min(slot_of_row) < 0)
    return batch


def ours(made: Operators, case: Case, stacks: Stacks, batch: Batch) -> Call:
    """Our operator on copy `i`, as `call(i, y, x)`; its ranks are registered."""
    ranks = SlotRanks(stacks.slots, [case.slot_rank] * len(case.widths))
    for slot in range(stacks.slots):
        ranks.written(slot, [case.rank_of_slot(slot)] * len(case.widths))
    for a, b in zip(stacks.a, stacks.b, strict=True):
        if b[0].data_ptr() not in made._known:
            made.register(a, b, ranks)
    widths, tensors = list(case.widths), batch.tensors
    linear = torch.ops.lora_plugins.lora_linear

    def call(copy: int, y: Any, x: Any) -> None:
        linear(y, x, stacks.a[copy], stacks.b[copy], *tensors, widths, 1.0, 0, True)

    return call


def batch_of_vllm(vllm: Vllm, case: Case, device: Any, *, specialized: bool) -> tuple[Any, ...]:
    """What vLLM's operators take for the case's batch.

    `specialized` is `specialize_active_lora`: a launch for as many slots as are active, rounded up.
    """
    counts = vllm.captured_counts(case.n_slots) if specialized else None
    meta = vllm.meta.make(case.n_slots, case.rows, device=device, captured_lora_counts=counts)
    meta.prepare_tensors(torch.tensor(case.slot_of_row(), device=device))
    return tuple(meta.meta_args(case.rows, specialized))


def vllms(vllm: Vllm, case: Case, stacks: Stacks, batch: tuple[Any, ...], *, add_inputs: bool = True) -> Call:
    """What vLLM's `PunicaWrapperGPU.add_lora_linear` (0.33) calls on copy `i`, as `call(i, y, x)`."""

    def call(copy: int, y: Any, x: Any) -> None:
        t = torch.empty((len(case.widths), case.rows, case.slot_rank), dtype=torch.float32, device=x.device)
        vllm.shrink(x, stacks.a[copy], t, *batch, 1.0)
        vllm.expand(t, stacks.b[copy], y, *batch, offset_start=0, add_inputs=add_inputs)

    return call


def compile_case(case: Case, table: Table) -> None:
    """Call our operator as the case does, on empty CPU tensors, for a process that compiles."""
    operators.use(made := Operators(replace(table, dense_min_rows=None)))
    x = torch.empty(case.rows, case.n_in, dtype=torch.bfloat16)
    y = torch.empty(case.rows, sum(case.widths), dtype=torch.bfloat16)
    stacks = make_stacks(case, 1, torch.bfloat16, "cpu", filled=False)
    ours(made, case, stacks, batch_of(case, "cpu"))(0, y, x)
