"""Weights, inputs and outputs for one group of benchmark cases, and both implementations as plain calls on them.

A model has many layers, whose weights do not stay in the second-level cache from one step to the next. So there are
several copies of every stack, used in turn, of more bytes together than the cache has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_cases import Case
from lora_plugins.kernels.ranks import SlotRanks
from lora_plugins.kernels.triton_ops.operators import Batch, Operators

COLD_BYTES = 160 << 20  # more than twice the L2 of an H100 or H200 (50 MiB)
MOST_COPIES = 256

Call = Callable[[int], None]


@dataclass
class Stacks:
    """`copies` times the stacks of one layer: `a[copy][slice]`: `[slots, 1, slot_rank, in]`, `b` likewise."""

    a: list[list[Any]]
    b: list[list[Any]]
    slots: int
    rank: int
    slot_rank: int

    def first(self, slots: int) -> Stacks:
        """The same weights, of these slots only."""
        a, b = ([[part[:slots] for part in stack] for stack in stacks] for stacks in (self.a, self.b))
        return Stacks(a, b, slots, self.rank, self.slot_rank)


def copies_for(case: Case, budget_bytes: int | None = None) -> int:
    """How many copies make the weights that the case reads exceed the cache, within `budget_bytes` of slots."""
    per_rank = case.adapters * sum(case.n_in + width for width in case.widths) * 2  # bytes of an element
    wanted = min(MOST_COPIES, -(-COLD_BYTES // (per_rank * case.rank)))
    return wanted if budget_bytes is None else max(1, min(wanted, budget_bytes // (per_rank * case.slot_rank)))


def make_stacks(case: Case, copies: int, dtype: Any, device: Any) -> Stacks:
    """Random adapters of the case's rank in slots of its slot rank, zeros beyond, as vLLM's slots are."""

    def stack(rows: int, columns: int, rank_axis: int) -> Any:
        made = torch.randn(case.adapters, 1, rows, columns, dtype=dtype, device=device).mul_(0.05)
        made.narrow(rank_axis, case.rank, case.slot_rank - case.rank).zero_()
        return made

    return Stacks(
        [[stack(case.slot_rank, case.n_in, 2) for _ in case.widths] for _ in range(copies)],
        [[stack(width, case.slot_rank, 3) for width in case.widths] for _ in range(copies)],
        case.adapters,
        case.rank,
        case.slot_rank,
    )


def ours(operators: Operators, case: Case, stacks: Stacks, x: Any, y: Any, slot_of_row: Sequence[int]) -> Call:
    """Our operator on copy `i`; the batch has been cut."""
    batch = Batch(case.rows, stacks.slots, x.device)
    in_use = {slot for slot in slot_of_row if slot >= 0}
    batch.cut(torch.tensor(slot_of_row, device=x.device), in_use, base_rows=min(slot_of_row) < 0)
    for a, b in zip(stacks.a, stacks.b, strict=True):
        ranks = SlotRanks(stacks.slots, [stacks.slot_rank] * len(a))
        for slot in range(stacks.slots):
            ranks.written(slot, [stacks.rank] * len(a))
        operators.register(a, b, ranks)
    widths, tensors = list(case.widths), batch.tensors
    linear = torch.ops.lora_plugins.lora_linear

    def call(copy: int) -> None:
        linear(y, x, stacks.a[copy], stacks.b[copy], *tensors, widths, 1.0, 0, True)

    return call


def forget_vllms() -> None:
    """Empty vLLM's tables of addresses, which would hold for other weights that come to lie there."""
    from vllm.lora.ops.triton_ops import utils

    utils._LORA_A_PTR_DICT.clear()
    utils._LORA_B_PTR_DICT.clear()


def vllms(case: Case, stacks: Stacks, x: Any, y: Any, slot_of_row: Sequence[int]) -> Call:
    """What vLLM's `PunicaWrapperGPU.add_lora_linear` (0.33) calls, on copy `i`; its metadata has been prepared.

    Raises:
        ImportError: vLLM's Triton operators are not on the path.
    """
    from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink

    meta = LoRAKernelMeta.make(stacks.slots, case.rows, device=x.device)
    meta.prepare_tensors(torch.tensor(slot_of_row, device=x.device))
    told = meta.meta_args(case.rows, False)

    def call(copy: int) -> None:
        shape = (len(case.widths), case.rows, stacks.slot_rank)
        t = torch.empty(shape, dtype=torch.float32, device=x.device)
        lora_shrink(x, stacks.a[copy], t, *told, 1.0)
        lora_expand(t, stacks.b[copy], y, *told, offset_start=0, add_inputs=True)

    return call
