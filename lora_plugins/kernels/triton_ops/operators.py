"""The Triton kernels as torch operators, so that torch.compile and CUDA graphs take each call as one opaque step.

In each worker with GPUs, `punica_triton.py` registers every layer at start (`Operators.register`), takes each batch
(`Batch.cut`), and calls the operators `lora_linear`, `lora_shrink` and `lora_expand` from every layer in every step. An
operator changes `y` in place. `lora_linear` chooses dense path, fused kernel or shrink and expand by the rows of its
input and the tuning table.

Facts about the batch come in tensors: `order` and `table` of `Chunks` on the device, and `host`, five numbers on the
CPU (see `Batch`). A Python number would be frozen into a compiled graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch

from lora_plugins.kernels.layers import refuse_more_rows
from lora_plugins.kernels.slot_ranks import SlotRanks
from lora_plugins.kernels.triton_ops.chunks import Chunks
from lora_plugins.kernels.triton_ops.dense import dense
from lora_plugins.kernels.triton_ops.expand import expand, fused
from lora_plugins.kernels.triton_ops.packed import Operands, PackedModule
from lora_plugins.kernels.triton_ops.rank_tables import DeviceRanks, constant_ranks, follow_vectors
from lora_plugins.kernels.triton_ops.shrink import partials, shrink
from lora_plugins.kernels.tuning import Plan, ShrinkTile, Table

NAMESPACE = "lora_plugins"
_FULLY_SHARDED = ShrinkTile()  # a fully sharded layer gathers the result, so the result must not be split


class Batch:
    """A batch as operators see the batch: the chunks of its rows, and facts that the host knows without the device.

    Attributes:
        host: int64 `[5]` on the CPU: rows; whether any row has an adapter; the single slot of all rows, or -1; the
            number of the `Operators` that compute the batch; whether rows that are neither the batch's nor padding are
            refused.
    """

    def __init__(self, max_rows: int, slots: int, device: Any, operators: Operators | None = None) -> None:
        """Make room for `max_rows` rows, computed by `operators`, or by the `Operators` of `use` where None."""
        self.chunks = Chunks(max_rows, slots, device)
        self.host = torch.tensor([0, 0, -1, operators.number if operators else _WHAT_IS_IN_USE, 0])

    def cut(self, slot_of_row: Any, slots_in_use: set[int], *, base_rows: bool) -> None:
        """Take a new batch.

        Args:
            slot_of_row: int64 `[rows]` on the device, negative for the base model.
            slots_in_use: the batch's slots, as the host knows.
            base_rows: whether the host knows of rows without an adapter.
        """
        single = next(iter(slots_in_use)) if len(slots_in_use) == 1 and not base_rows else -1
        # Written in place: a compiled graph holds the address of `host`.
        self.host[0], self.host[1], self.host[2] = slot_of_row.shape[0], int(bool(slots_in_use)), single
        self.chunks.cut(slot_of_row)

    @property
    def tensors(self) -> tuple[Any, Any, Any]:
        """The batch's tensors, in the order of every operator's arguments."""
        return self.chunks.order, self.chunks.table, self.host


@dataclass
class _Known:
    """A module whose stacks an operator was given.

    Attributes:
        device_ranks: int32 `[slices + 1, slots]`, see `DeviceRanks`.
        vectors: float32 `[slots, 2, outputs]` on the device, without outputs for an unregistered module.
        host_ranks: the same ranks and vectors on the host; None for an unregistered module.
        stacks: tensors whose addresses name the module; kept alive, so no other tensor gets the same address.
        reserved_rows: rows of the largest batch whose memory `reserve` has taken.
        packed: the stacks as kernels read them, by the arguments of the call.
    """

    device_ranks: Any
    vectors: Any
    host_ranks: SlotRanks | None
    stacks: tuple[Any, ...]
    reserved_rows: int = 0
    packed: dict[Any, PackedModule] = field(default_factory=dict)


_numbers = itertools.count(1)


@dataclass(eq=False)
class Operators:
    """The operators' knowledge beyond their arguments; each punica wrapper has its own, with the layers that call it.

    Attributes:
        table: how work is cut.
        captured_rows: batches of up to so many rows are captured in CUDA graphs, and never take the dense path, which
            the host chooses.
        number: the name of this object in a batch; torch passes operators tensors and numbers only.
    """

    table: Table
    captured_rows: int = 0
    number: int = field(default_factory=_numbers.__next__)
    _known: dict[int, _Known] = field(default_factory=dict)  # by the addresses of a module's first A and first B
    _ranks: DeviceRanks = field(default_factory=DeviceRanks)

    def __post_init__(self) -> None:
        _by_number[self.number] = self

    def register(self, a: Sequence[Any], b: Sequence[Any], ranks: SlotRanks, *, takes_vectors: bool = True) -> None:
        """Learn a module's ranks; an embedding's A `[slots, vocabulary, max_rank]` is never read.

        A module whose A and B differ in rank (sharded by rank) is computed at its slots' largest rank, and without
        vectors. `takes_vectors`: whether a slot's adapter may have vectors for the module, which need memory.
        """
        embedding = a[0].ndim == 3
        if not embedding and any(a_i.shape[2] != b_i.shape[3] for a_i, b_i in zip(a, b, strict=True)):
            return
        slots, device = b[0].shape[0], b[0].device
        outputs = sum(b_i.shape[-2] for b_i in b) if takes_vectors else 0
        vectors = follow_vectors(ranks, slots, outputs, device)
        known = _Known(self._ranks.follow(ranks, slots, device), vectors, ranks, (*a, *b))
        self._known[b[0].data_ptr()] = known
        # An embedding's A is no operand of a kernel: only B's address names the module.
        if not embedding:
            self._known[a[0].data_ptr()] = known

    def forget(self) -> None:
        """Drop all modules, and so their weights, where a process outlives its model."""
        self._known.clear()
        self._ranks = DeviceRanks()

    def module(
        self, a: Sequence[Any], b: Sequence[Any], output_slices: Sequence[int], offset: int
    ) -> tuple[PackedModule, _Known]:
        """Return the module with these stacks, packed, and its ranks; an unregistered module has the largest ranks.

        Raises:
            RuntimeError: a new module while a CUDA graph is captured.
        """
        first = (a or b)[0]
        known = self._known.get(first.data_ptr())
        # A linear layer calls with A and B, a fully sharded layer with one of the two: each call has a packed form of
        # its own.
        key = (len(a), b[0].data_ptr() if b else 0, *output_slices, offset)
        if known is not None and (packed := known.packed.get(key)) is not None:
            return packed, known
        # A new module copies its table to the device: a captured copy would run again at each replay, from host memory
        # that is gone.
        if _capturing():
            raise RuntimeError("a LoRA layer was first called while a CUDA graph was captured; it must have run before")
        if known is None:
            largest = [part.shape[-2] for part in a] or [part.shape[-1] for part in b]
            slots, device = first.shape[0], first.device
            vectors = torch.empty(slots, 2, 0, dtype=torch.float32, device=device)
            known = _Known(constant_ranks(largest, slots, device), vectors, None, (*a, *b))
            self._known[first.data_ptr()] = known
        packed = known.packed[key] = PackedModule(a, b, output_slices, offset)
        return packed, known

    def reserve(self, x: Any, a: Sequence[Any], b: Sequence[Any], output_slices: Sequence[int], offset: int) -> bool:
        """Take, for a moment, the memory that a batch of up to these rows would need if the batch had adapters.

        Returns False where a batch as large has been here before, or a graph is captured.

        vLLM profiles memory with the largest batch, without adapters, and gives all memory that was unused then to the
        KV cache.
        """
        rows = x.shape[0]
        known = self._known.get(a[0].data_ptr())
        if (known is not None and rows <= known.reserved_rows) or _capturing():
            return False
        module, known = self.module(a, b, output_slices, offset)
        known.reserved_rows = rows
        plans = self.reachable_plans(rows, x.shape[1], module.widest)
        most = max(plan.shrink.splits * min(rows, plan.max_rows) for plan in plans)
        # Not kept: PyTorch's allocator keeps the block, and vLLM's profile counts the peak.
        torch.empty(most, module.slices, module.max_rank, dtype=torch.float32, device=x.device)
        return True

    def reachable_plans(self, rows: int, n_in: int, n_out: int) -> list[Plan]:
        """Return the plans of all batches of up to `rows` rows."""
        sizes = sorted({min(rows, plan.max_rows) for plan in self.table.plans})
        return list(dict.fromkeys(self.table.plan(size, n_in, n_out) for size in sizes))

    def takes_dense_path(self, y: Any, x: Any, batch: Any) -> bool:
        """Whether the host may and should compute a batch, of `Batch.host`'s numbers, by plain products."""
        least = self.table.dense_min_rows  # None: the dense path is never taken
        rows, _, slot, *_ = batch
        return (
            least is not None
            and rows >= max(least, self.captured_rows + 1)
            and slot >= 0
            and x.dtype == y.dtype
            and not _capturing()
        )


_WHAT_IS_IN_USE = 0  # no number of an `Operators`: stands for the `Operators` of `use`
_operators: Operators | None = None
_by_number: WeakValueDictionary[int, Operators] = WeakValueDictionary()


def use(operators: Operators) -> None:
    """Let `operators` compute the batches that name no `Operators`: of tests and benchmarks."""
    global _operators  # noqa: PLW0603 - what `in_use` returns
    _operators = operators


def in_use(number: int = _WHAT_IS_IN_USE) -> Operators:
    """Return the `Operators` of this number; for number 0 the `Operators` of `use`."""
    operators = _by_number.get(number) if number else _operators
    if operators is None:
        raise RuntimeError("the Triton kernels were called before they were set up, or after their wrapper was gone")
    return operators


def lora_linear(
    y: torch.Tensor,
    x: torch.Tensor,
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    order: torch.Tensor,
    table: torch.Tensor,
    host: torch.Tensor,
    output_slices: list[int],
    scale: float,
    offset: int,
    add_inputs: bool,
) -> None:
    """Add `scale * B_i A_i x` to slice i of `y`, and turn `y` by the vectors of each row's slot.

    `y` `[rows, out]`, `x` `[rows, in]`, stacks as in `PackedModule`.
    """
    # A tensor on the CPU: reading the numbers waits for nothing.
    rows, has_adapters, slot, number, refuses_more_rows = batch = host.tolist()
    if not x.shape[0]:
        return
    operators = in_use(number)
    if not has_adapters:  # as in vLLM's profiling run: nothing to add
        if operators.reserve(x, a, b, output_slices, offset):
            module, known = operators.module(a, b, output_slices, offset)
            x = _rows(x, module)
            # Each kernel runs on one row without an adapter, which changes nothing: none is compiled while serving.
            for plan in operators.reachable_plans(x.shape[0], x.shape[1], module.widest):
                operands = _operands(module, known, order, table, 1, plan.chunk)
                _compute(y[:1], x[:1], operands, plan, scale, add_inputs=add_inputs)
        return
    module, known = operators.module(a, b, output_slices, offset)
    ranks = known.host_ranks
    # More rows than the batch's would go without their adapters; where no slot changes this module, no row loses any.
    if refuses_more_rows and x.shape[0] > rows and (ranks is None or any(map(any, ranks)) or ranks.vectors):
        refuse_more_rows(x.shape[0], rows)
    x = _rows(x, module)
    if operators.takes_dense_path(y, x, batch):
        # `x` may have more rows than the batch: vLLM pads for CUDA graphs. The dense path leaves padding alone.
        of_slot = (module.max_rank,) * module.slices if ranks is None else ranks[slot]
        has_vectors = ranks is not None and slot in ranks.vectors
        dense(
            y[:rows],
            x[:rows],
            [part[slot] for part in module.stacks[0]],
            [part[slot] for part in module.stacks[1]],
            of_slot,
            output_slices,
            scale=scale,
            offset=offset,
            add_inputs=add_inputs,
            vectors=known.vectors[slot] if has_vectors else None,
        )
        return
    plan = operators.table.plan(x.shape[0], x.shape[1], module.widest)
    operands = _operands(module, known, order, table, rows, plan.chunk)
    _compute(y, x, operands, plan, scale, add_inputs=add_inputs)


def _compute(y: Any, x: Any, operands: Operands, plan: Plan, scale: float, *, add_inputs: bool) -> None:
    if plan.fused is not None:
        fused(y, x, operands, plan.fused, scale, add_inputs=add_inputs)
        return
    t = partials(plan.shrink, operands.module, x.shape[0], x.device)
    shrink(t, x, operands, plan.shrink, scale)
    expand(y, t, operands, plan.expand, add_inputs=add_inputs)


def lora_shrink(
    y: torch.Tensor,
    x: torch.Tensor,
    a: list[torch.Tensor],
    order: torch.Tensor,
    table: torch.Tensor,
    host: torch.Tensor,
    scale: float,
) -> None:
    """Compute `y[i] = scale * A_i x`, 0 beyond the rank and in base rows: float32 `y` `[slices, rows, max_rank]`."""
    # The caller gathers `y` from all workers: rows without an adapter must be zeros, not old memory.
    y.zero_()
    rows, has_adapters, _, number, refuses_more_rows = host.tolist()
    if not has_adapters or not x.shape[0]:
        return
    operators = in_use(number)
    # A alone, so without slices of outputs and without their offset.
    module, known = operators.module(a, [], [], 0)
    if refuses_more_rows:
        refuse_more_rows(x.shape[0], rows)
    x = _rows(x, module)
    size = operators.table.plan(x.shape[0], x.shape[1], 0).chunk
    shrink(y.unsqueeze(0), x, _operands(module, known, order, table, rows, size), _FULLY_SHARDED, scale)


def lora_expand(
    y: torch.Tensor,
    t: torch.Tensor,
    b: list[torch.Tensor],
    order: torch.Tensor,
    table: torch.Tensor,
    host: torch.Tensor,
    output_slices: list[int],
    offset: int,
    add_inputs: bool,
) -> None:
    """Compute `y[:, slice i] += B_i t[i]`: `y` `[rows, out]`, `t` `[slices, rows, max_rank]`."""
    rows, has_adapters, _, number, _ = host.tolist()
    if not has_adapters or not y.shape[0]:
        return
    operators = in_use(number)
    module, known = operators.module([], b, output_slices, offset)
    plan = operators.table.plan(y.shape[0], module.max_rank, module.widest)
    t = t if t.stride(-1) == 1 else t.contiguous()
    operands = _operands(module, known, order, table, rows, plan.chunk)
    expand(y, t.unsqueeze(0), operands, plan.expand, add_inputs=add_inputs)


def _operands(module: PackedModule, known: _Known, order: Any, table: Any, rows: int, size: int) -> Operands:
    chunks = Chunks.over(order, table, module.slots, rows)
    return Operands(module, known.device_ranks, known.vectors, chunks, size)


def _rows(x: Any, module: PackedModule) -> Any:
    """Return the input as kernels read it, each row contiguous."""
    if x.dtype != module.dtype:
        raise TypeError(f"input of {x.dtype}, LoRA weights of {module.dtype}")
    return x if x.stride(-1) == 1 else x.contiguous()


def _capturing() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # torch drops an operator together with its library
for _function in (lora_linear, lora_shrink, lora_expand):
    _library.define(_function.__name__ + torch.library.infer_schema(_function, mutates_args=("y",)))
    _library.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_function.__name__}", lambda *_args: None, lib=_library)
