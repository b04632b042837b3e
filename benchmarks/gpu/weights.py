"""Weights, inputs and outputs for one group of benchmark cases, and both implementations as plain calls on them.

A model has many layers, whose weights do not stay in the second-level cache from one step to the next. So there are
several copies of every stack, used in turn, of more bytes together than the cache has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.cases import Case
from benchmarks.gpu.vllm import Vllm
from lora_plugins.kernels.slot_ranks import SlotRanks
from lora_plugins.kernels.triton_ops import operators
from lora_plugins.kernels.triton_ops.operators import Batch, Operators
from lora_plugins.kernels.tuning import Table

COLD_BYTES = 160 << 20  # more than twice the L2 of an H100 or H200 (50 MiB)
MOST_COPIES = 256

Call = Callable[[int, Any, Any], None]  # copy, y, x


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
