"""Rank-exact LoRA on the CPU: a plan of the products of each module for each batch.

In a worker's engine loop, `punica_cpu.py` makes `BatchRows` for each batch, and a `ModulePlan` when a layer is first
called in the batch; `ModulePlan.run` then adds the adapters' part to the layer's output.

The compiled product (`lora_plugins.kernels.compiled`) computes all adapters in a single call. PyTorch computes the
rest, adapter by adapter, from views of the slots: adapters of a large rank in a slot, whose copy into panels would hold
up the engine's loop; dtypes without a compiled product. Each row meets only its own adapter, so no content of an
adapter reaches the rows of another.

Panels are A and B of a slot in the order in which the compiled product reads them (`compiled/panels.py`). Where an
adapter has vectors, its rows of `y` become `g * y + c` behind the products (`slot_ranks.Vectors`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lora_plugins.kernels.compiled.panels import Panels, Prepared, SlotPanels
from lora_plugins.kernels.slot_ranks import SlotRanks, Vectors

Step = Callable[[Any, Any], None]  # `step(y, x)` changes `y` in place
# Copying a slot into panels happens in the engine's loop, at the first batch after the write; the cost grows with the
# rank.
LARGEST_COPIED_RANK = 64


class Buffers:
    """A flat buffer per dtype that only grows; all modules of a step use the buffer one after the other."""

    def __init__(self) -> None:
        self._flat: dict[Any, Any] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a contiguous tensor of undefined content, shared with every other taker of the same dtype."""
        size = math.prod(shape)
        flat = self._flat.get(dtype)
        if flat is None or flat.numel() < size:
            # PyTorch refuses to write tensors of inference mode outside of inference mode.
            with torch.inference_mode(mode=False):
                flat = self._flat[dtype] = torch.empty(size, dtype=dtype)
        return flat[:size].view(shape)


class BatchRows:
    """The rows of every slot in a batch, found once and used by every module.

    Attributes:
        n_rows: rows of the batch.
        rows: int64 row numbers, ascending, by slot.
        rows_of_32_bits: the same row numbers as int32, for the compiled product.
    """

    def __init__(self, slot_of_row: Any) -> None:
        """`slot_of_row`: int64 `[rows]`, negative for the base model."""
        self.n_rows = int(slot_of_row.shape[0])
        # A stable sort keeps the rows of each slot ascending: `_by_torch` reads the first and the last row, and
        # `Prepared` the last.
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
        a: `[slots, 1, max_rank, in]` for each slice, vLLM's own tensor, read only.
        b: `[slots, 1, out, max_rank]` for each slice, vLLM's own tensor, read only.
        ranks: true ranks of the slots' content.
        panels: the slots' panels, where the compiled product computes the module.
    """

    a: tuple[Any, ...]
    b: tuple[Any, ...]
    ranks: SlotRanks
    panels: SlotPanels | None = None

    def compiled(self, slots: Iterable[int]) -> dict[int, Panels]:
        """Return the panels of the given slots that the compiled product computes."""
        panels = self.panels
        if panels is None:
            return {}
        return {
            slot: panels.of(slot)
            for slot in slots
            # The panels alone hold the adapter of a slot that points at panels: the stacks are views of a single zero.
            if panels.is_placed(slot)
            or 0 < max(self.ranks[slot]) <= LARGEST_COPIED_RANK
            # Vectors without a product cost no copy, and are computed with the panels of other slots.
            or (slot in self.ranks.vectors and not any(self.ranks[slot]))
        }


class ModulePlan:
    """The products of one module for one batch: `run(y, x)` adds the adapters' part to `y` in place.

    Attributes:
        alone: the compiled product, where no other product is needed; callers may try `alone.repeat` before `run`.
        steps: the products and additions, each for its own rows. turns: whether a slot of the batch has vectors.
        version: `SlotRanks.version` before the plan was made. width: the columns of all slices together.
    """

    __slots__ = ("alone", "dtype", "module", "ranks", "scale", "steps", "turns", "version", "width")

    def __init__(self, module: ModuleSlots, batch: BatchRows, buffers: Buffers, scale: float) -> None:
        # Read first: a background write during `_steps` then makes the plan stale, not wrong.
        self.version = module.ranks.version
        self.module, self.ranks, self.scale = module, module.ranks, scale
        self.dtype = module.a[0].dtype
        self.width = sum(int(b_i.shape[2]) for b_i in module.b)
        self.steps: tuple[Step, ...] = tuple(_steps(module, batch, buffers, scale))
        self.turns = any(slot in module.ranks.vectors for slot in batch.rows)
        first = self.steps[0] if len(self.steps) == 1 else None
        self.alone = first if isinstance(first, Prepared) else None

    def is_for(self, scale: float) -> bool:
        """Whether slots and scale are unchanged since the plan was made."""
        return self.version == self.ranks.version and self.scale == scale

    def run(self, y: Any, x: Any) -> None:
        """Add to `y` `[rows, out]` the adapters' outputs for `x` `[rows, in]`."""
        if not self.steps:
            return
        dtype = self.dtype
        # vLLM may hand over rows of another dtype than the adapters'.
        if x.dtype is not dtype:
            x = x.to(dtype)
        if y.dtype is dtype and y.shape[1] == self.width and y.stride(1) == 1:
            for each in self.steps:
                each(y, x)
        elif self.turns:  # of a linear layer, whose rows have the adapters' dtype
            turned = y.to(dtype, copy=True).contiguous()
            for each in self.steps:
                each(turned, x)
            y.copy_(turned)
        # A strided `y`, or logits: of a wider dtype (vLLM's head_dtype), or with padded vocabulary on either side.
        else:
            delta = torch.zeros(y.shape[0], self.width, dtype=dtype)
            for each in self.steps:
                each(delta, x)
            # Columns of padding have no weights in B, and keep the base model's value.
            width = min(self.width, y.shape[1])
            y[:, :width] += delta[:, :width]


def _steps(module: ModuleSlots, batch: BatchRows, buffers: Buffers, scale: float) -> Iterator[Step]:
    compiled = module.compiled(batch.rows)
    for slot, rows in batch.rows.items():
        if slot in compiled:  # computed by the last step, all slots together
            continue
        # Slots without a rank add nothing: an adapter need not adapt every module.
        if any(module.ranks[slot]):
            yield _by_torch(module, slot, rows, buffers, scale)
        if slot in module.ranks.vectors:
            yield functools.partial(turn, rows, module.ranks.vectors[slot])
    if module.panels is not None and compiled:
        take = functools.partial(buffers.take, dtype=torch.float32)
        vectors = {slot: one for slot in compiled if (one := module.ranks.vectors.get(slot)) is not None}
        yield Prepared(module.panels.product, compiled, batch.rows_of_32_bits, scale, take, vectors)


def _by_torch(module: ModuleSlots, slot: int, rows: Any, buffers: Buffers, scale: float) -> Step:
    """Compute `y[rows] += B A x[rows]` for one adapter by BLAS; the shrunk rows have the weights' dtype."""
    first, n_rows = int(rows[0]), len(rows)
    # Adjacent rows make views: no gather of `x`, no copy of `y`. A prefill of a single request is always adjacent.
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
            into = y[own, columns]  # a view of adjacent rows, else a copy
            into.addmm_(shrunk, b_t, alpha=scale)
            if not are_together:
                y[own, columns] = into

    return run


def turn(rows: Any, vectors: Vectors, y: Any, _: Any = None) -> None:
    """Compute `y[rows] = g * y[rows] + c`; a `Step`, which needs no input."""
    y[rows] = (y[rows] * vectors.g + vectors.c).to(y.dtype)


def add_expanded(y: Any, x: Any, b: Any, rows: Any, rank: int, first: int, width: int) -> None:
    """Add `x[rows, :rank] B` to `width` columns of `y[rows]` from `first` on, for one slot's `b` `[out, max_rank]`."""
    # `y` may have fewer columns than the slot has rows: vLLM pads a vocabulary in one of the two.
    width = min(width, b.shape[0], y.shape[1] - first)
    columns = slice(first, first + width)
    delta = torch.mm(x.index_select(0, rows)[:, :rank].to(y.dtype), b[:width, :rank].t().to(y.dtype))
    y[rows, columns] += delta


def shrink_rows(y: Any, x: Any, a: Any, rows: Any, rank: int, scale: float) -> None:
    """Compute `y[rows, :rank] = scale * A x[rows]` for one slot's `a` `[max_rank, in]` and an index of rows."""
    shrunk = torch.mm(x.index_select(0, rows).to(a.dtype), a[:rank].t())
    y[:, :rank].index_copy_(0, rows, shrunk.to(y.dtype).mul_(scale))
