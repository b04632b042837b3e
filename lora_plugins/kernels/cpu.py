"""Rank-exact LoRA on the CPU: what one module has to do for one batch, decided once for both.

The compiled product (`lora_plugins.kernels.compiled`) computes all adapters in one call. What is left is PyTorch's,
adapter by adapter, from views of the slots: adapters of many rows where PyTorch is the faster one (`crossover.py`),
those of a large rank that were written into a slot, whose copy into panels would hold up the engine's loop, and dtypes
that are not compiled. Every row meets its own adapter only, so nothing that an adapter holds reaches another's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lora_plugins.kernels.compiled.panels import Panels, SlotPanels
from lora_plugins.kernels.compiled.step import step
from lora_plugins.kernels.ranks import SlotRanks

Step = Callable[[Any, Any], None]
LARGEST_COPIED_RANK = 64


class Buffers:
    """One flat buffer per dtype, which only grows: all modules of a step use it, one after the other."""

    def __init__(self) -> None:
        self._flat: dict[Any, Any] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A contiguous tensor of undefined content, shared with every other taker of this dtype."""
        size = 1
        for length in shape:
            size *= length
        flat = self._flat.get(dtype)
        if flat is None or flat.numel() < size:
            with torch.inference_mode(mode=False):  # what is made within inference mode may not be written outside it
                flat = self._flat[dtype] = torch.empty(size, dtype=dtype)
        return flat[:size].view(shape)


class BatchRows:
    """The rows of every slot in a batch, found once and used by every module.

    Attributes:
        n_rows: of the batch. rows: int64, ascending, by slot. rows_of_32_bits: the same, for the compiled product.
    """

    def __init__(self, slot_of_row: Any) -> None:
        """`slot_of_row`: int64 `[rows]`, negative for the base model."""
        self.n_rows = int(slot_of_row.shape[0])
        in_order, order = torch.sort(slot_of_row, stable=True)
        slots, counts = (found.tolist() for found in torch.unique_consecutive(in_order, return_counts=True))
        self.rows = _of_slots(slots, order.split(counts))
        self.rows_of_32_bits = _of_slots(slots, order.to(torch.int32).split(counts))


def _of_slots(slots: Sequence[int], rows: Sequence[Any]) -> dict[int, Any]:
    return {slot: of_slot for slot, of_slot in zip(slots, rows, strict=True) if slot >= 0}


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSlots:
    """The slots of one module.

    Attributes:
        a: one `[slots, 1, max_rank, in]` per slice. b: one `[slots, 1, out, max_rank]`. Both vLLM's own, read only.
        ranks: what lies in them.
        panels: of the same slots, where the compiled product computes them.
        torch_from_rows: the number of rows from which on an adapter is PyTorch's all the same; None: never.
    """

    a: tuple[Any, ...]
    b: tuple[Any, ...]
    ranks: SlotRanks
    panels: SlotPanels | None = None
    torch_from_rows: int | None = None

    def compiled(self, rows: dict[int, Any]) -> dict[int, Panels]:
        """The panels of those of these slots, each with its rows, that the compiled product computes."""
        panels, most = self.panels, self.torch_from_rows
        if panels is None:
            return {}
        return {
            slot: panels.of(slot)
            for slot, own in rows.items()
            # What a slot points at is in its panels only.
            if panels.is_placed(slot)
            or (0 < max(self.ranks[slot]) <= LARGEST_COPIED_RANK and (most is None or len(own) < most))
        }


class ModulePlan:
    """What one module has to do for one batch: `run(y, x)` adds the adapters' part to `y` in place."""

    def __init__(self, module: ModuleSlots, batch: BatchRows, buffers: Buffers, scale: float) -> None:
        self.version = module.ranks.version  # read first: a write from here on makes the plan old
        self.module, self.scale = module, scale
        self.dtype = module.a[0].dtype
        self.width = sum(int(b_i.shape[2]) for b_i in module.b)
        self.steps: tuple[Step, ...] = tuple(_steps(module, batch, buffers, scale))

    def is_for(self, scale: float) -> bool:
        """Whether nothing has changed since that would change it."""
        return self.version == self.module.ranks.version and self.scale == scale

    def run(self, y: Any, x: Any) -> None:
        """Add to `y` `[rows, out]` what the adapters make of `x` `[rows, in]`."""
        if not self.steps:
            return
        dtype = self.dtype
        if x.dtype is not dtype:
            x = x.to(dtype)
        if y.dtype is dtype and y.shape[1] == self.width and y.stride(1) == 1:
            for each in self.steps:
                each(y, x)
        else:  # strided, or logits: of a wider dtype (vLLM's head_dtype), or the vocabulary padded in one of the two
            delta = torch.zeros(y.shape[0], self.width, dtype=dtype)
            for each in self.steps:
                each(delta, x)
            width = min(self.width, y.shape[1])
            y[:, :width] += delta[:, :width]


def _steps(module: ModuleSlots, batch: BatchRows, buffers: Buffers, scale: float) -> Iterator[Step]:
    compiled = module.compiled(batch.rows)
    for slot, rows in batch.rows.items():
        if slot not in compiled and any(module.ranks[slot]):
            yield _by_torch(module, slot, rows, buffers, scale)
    if module.panels is not None and compiled:
        take = functools.partial(buffers.take, dtype=torch.float32)
        inn = module.panels.shape.inn
        yield step(module.panels.product, compiled, batch.rows_of_32_bits, inn, scale, take)


def _by_torch(module: ModuleSlots, slot: int, rows: Any, buffers: Buffers, scale: float) -> Step:
    """`y[rows] += B A x[rows]` for one adapter; its sums are the BLAS's, its shrunk rows of the weights' dtype."""
    first, n_rows = int(rows[0]), len(rows)
    are_together = int(rows[-1]) - first + 1 == n_rows
    own = slice(first, first + n_rows) if are_together else rows
    parts = []
    start = 0
    for rank, a, b in zip(module.ranks[slot], module.a, module.b, strict=True):
        stop = start + int(b.shape[2])
        if rank:
            shrunk = buffers.take((n_rows, rank), a.dtype)
            parts.append((slice(start, stop), a[slot, 0, :rank].t(), shrunk, b[slot, 0, :, :rank].t()))
        start = stop

    def run(y: Any, x: Any) -> None:
        x = x[own]
        for columns, a_t, shrunk, b_t in parts:
            torch.mm(x, a_t, out=shrunk)
            into = y[own, columns]  # a view where the rows are together, else a copy
            into.addmm_(shrunk, b_t, alpha=scale)
            if not are_together:
                y[own, columns] = into

    return run


def add_expanded(y: Any, x: Any, b: Any, rows: Any, rank: int, columns: slice) -> None:
    """`y[rows, columns] += x[rows, :rank] B`, for one slot's `b` `[out, max_rank]` and an index of rows."""
    width = min(columns.stop - columns.start, b.shape[0])
    columns = slice(columns.start, columns.start + width)
    delta = torch.mm(x.index_select(0, rows)[:, :rank].to(y.dtype), b[:width, :rank].t().to(y.dtype))
    y[rows, columns] += delta


def shrink_rows(y: Any, x: Any, a: Any, rows: Any, rank: int, scale: float) -> None:
    """`y[rows, :rank] = scale * A x[rows]`, for one slot's `a` `[max_rank, in]` and an index of rows."""
    shrunk = torch.mm(x.index_select(0, rows).to(a.dtype), a[:rank].t())
    y[:, :rank].index_copy_(0, rows, shrunk.to(y.dtype).mul_(scale))
