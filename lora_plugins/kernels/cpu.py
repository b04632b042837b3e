"""Grouped, rank-exact LoRA on the CPU: a plan for each module and batch, and its few products.

Everything that Python has to decide is decided when the plan is made: once per batch and module. Where there is a
compiled product (`lora_plugins.kernels.compiled`), it is one call for all adapters.

What is left is PyTorch's. A long run of one adapter costs one product with A, all slices at once, and one with each
slice's B, on plain slices of `x` and `y`. Short runs that lie together, such as decoding sequences of many adapters,
are gathered adapter by adapter and go through one batched product for A and one for each B, whatever the number of
adapters of the same ranks. Every row meets its own adapter only, so nothing that an adapter holds reaches another's.

Products are summed by the BLAS, in float32 for half-precision inputs; the shrunk rows are kept in the weights' dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lora_plugins.kernels.compiled import step as compiled
from lora_plugins.kernels.packs import ModuleWeights, Pack
from lora_plugins.kernels.segments import Dense, Mixed, Segments

Step = Callable[[Any, Any], None]
Group = tuple[int, tuple[int, ...]]  # a place in a pack, and the rows of the adapter there
LARGEST_PADDING = 2  # gathered rows over true ones, up to which adapters of unlike numbers of rows share a product


class Buffers:
    """One flat buffer per dtype and use, which only grows: all modules of a step use it, one after the other."""

    def __init__(self) -> None:
        self._flat: dict[tuple[Any, str], Any] = {}

    def take(self, shape: tuple[int, ...], dtype: Any, use: str) -> Any:
        """A contiguous tensor of undefined content, shared with every other taker of this dtype and use."""
        size = 1
        for length in shape:
            size *= length
        flat = self._flat.get((dtype, use))
        if flat is None or flat.numel() < size:
            with torch.inference_mode(mode=False):  # what is made within inference mode may not be written outside it
                flat = self._flat[dtype, use] = torch.empty(size, dtype=dtype)
        return flat[:size].view(shape)

    @property
    def nbytes(self) -> int:
        return sum(int(flat.nbytes) for flat in self._flat.values())


class Batch:
    """The segments of one batch, with the indices and buffers that its modules share."""

    def __init__(self, segments: Segments, buffers: Buffers) -> None:
        self.segments = segments
        self.buffers = buffers
        self._indices: dict[tuple[int, ...], Any] = {}
        self._rows: dict[int, Any] | None = None

    def index(self, rows: tuple[int, ...]) -> Any:
        """These rows as an index, the same tensor for every module."""
        if rows not in self._indices:
            self._indices[rows] = torch.tensor(rows)
        return self._indices[rows]

    def rows(self) -> dict[int, Any]:
        """Every slot's rows, int32, the same tensors for every module."""
        if self._rows is None:
            found: dict[int, list[int]] = {}
            for block in self.segments.blocks:
                if isinstance(block, Mixed):
                    for slot, rows in zip(block.slots, block.rows, strict=True):
                        found.setdefault(slot, []).extend(rows)
                else:
                    found.setdefault(block.slot, []).extend(range(block.start, block.stop))
            self._rows = {slot: torch.tensor(rows, dtype=torch.int32) for slot, rows in found.items()}
        return self._rows


class Plan:
    """What one module has to do for one batch: `run(y, x)` adds the adapters' part to `y` in place."""

    def __init__(self, weights: ModuleWeights, batch: Batch, scale: float) -> None:
        self.ranks = weights.ranks
        self.version = weights.ranks.version  # read first: a write from here on makes the plan old
        self.scale = scale
        self.dtype = weights.dtype
        self.width = weights.width
        self.steps: tuple[Step, ...] = tuple(_steps(weights, batch, scale))

    def run(self, y: Any, x: Any) -> None:
        """Add to `y` `[rows, out]` what the adapters make of `x` `[rows, in]`."""
        if not self.steps:
            return
        dtype = self.dtype
        if x.dtype is not dtype:
            x = x.to(dtype)
        if y.dtype is dtype and y.shape[1] == self.width and y.stride(1) == 1:
            for step in self.steps:
                step(y, x)
        else:  # strided, or logits: of a wider dtype (vLLM's head_dtype), or the vocabulary padded in one of the two
            delta = torch.zeros(y.shape[0], self.width, dtype=dtype)
            for step in self.steps:
                step(delta, x)
            width = min(self.width, y.shape[1])
            y[:, :width] += delta[:, :width]


def _steps(weights: ModuleWeights, batch: Batch, scale: float) -> Iterator[Step]:
    """The compiled product's step, and PyTorch's for the slots that are not the compiled one's."""
    slots, rows = batch.segments.slots, batch.rows()
    panels = weights.panelled({slot: len(rows[slot]) for slot in slots})
    places = weights.places([slot for slot in slots if slot not in panels])
    for block in batch.segments.blocks:
        yield from _of_block(block, places, batch, scale)
    if weights.panels is not None and panels:
        take = functools.partial(batch.buffers.take, dtype=torch.float32, use="shrunk")
        yield compiled.step(weights.panels.product, panels, rows, weights.a[0].shape[-1], scale, take)


def _of_block(
    block: Dense | Mixed, places: dict[int, tuple[tuple[Pack, int], ...]], batch: Batch, scale: float
) -> Iterator[Step]:
    if isinstance(block, Dense):
        for pack, at in places.get(block.slot, ()):
            yield _dense(slice(block.start, block.stop), block.stop - block.start, pack, at, batch, scale)
        return
    groups: dict[int, tuple[Pack, list[Group]]] = {}
    for slot, rows in zip(block.slots, block.rows, strict=True):
        for pack, at in places.get(slot, ()):
            groups.setdefault(id(pack), (pack, []))[1].append((at, rows))
    for pack, found in groups.values():
        for neighbours in _neighbours(found):
            yield _gathered(neighbours, pack, batch, scale)


def _neighbours(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Groups that lie side by side in the pack and have about as many rows each."""
    run: list[Group] = []
    for group in sorted(groups):
        most = max(len(rows) for _, rows in [*run, group])
        true = sum(len(rows) for _, rows in [*run, group])
        if run and (group[0] != run[-1][0] + 1 or most * (len(run) + 1) > LARGEST_PADDING * true):
            yield run
            run = []
        run.append(group)
    if run:
        yield run


def _dense(rows: slice, n_rows: int, pack: Pack, at: int, batch: Batch, scale: float) -> Step:
    """`y[rows] += B A x[rows]` for one adapter, with as little Python as there can be."""
    a_t = pack.a[at].t()
    shrunk = batch.buffers.take((n_rows, a_t.shape[1]), a_t.dtype, "shrunk")
    parts = tuple((part.first, part.last, shrunk[:, part.top : part.end], part.b[at]) for part in pack.slices)
    mm = torch.mm

    def run(y: Any, x: Any) -> None:
        mm(x[rows], a_t, out=shrunk)
        if scale != 1.0:
            shrunk.mul_(scale)
        for first, last, own, b in parts:
            y[rows, first:last].addmm_(own, b)

    return run


def _gathered(groups: Sequence[Group], pack: Pack, batch: Batch, scale: float) -> Step:
    """`y[row] += B A x[row]` for the rows of adapters that lie side by side in the pack, in batched products."""
    most = max(len(rows) for _, rows in groups)
    # Adapters with fewer rows repeat one of theirs; what comes of it is left out again.
    padded = batch.index(tuple(row for _, rows in groups for row in (*rows, *rows[:1] * (most - len(rows)))))
    true = batch.index(tuple(row for _, rows in groups for row in rows))
    kept = (
        None
        if len(true) == len(padded)
        else batch.index(tuple(n * most + i for n, (_, rows) in enumerate(groups) for i in range(len(rows))))
    )
    span = slice(groups[0][0], groups[-1][0] + 1)
    a_t = pack.a[span].transpose(1, 2)
    shape = (len(groups), most)
    n_padded = len(padded)
    gathered = batch.buffers.take((n_padded, a_t.shape[1]), a_t.dtype, "gathered")
    gathered_3d = gathered.view(*shape, -1)
    shrunk = batch.buffers.take((*shape, a_t.shape[2]), a_t.dtype, "shrunk")
    pieces: list[tuple[Any, Any] | Any] = []
    first = 0
    for part in pack.slices:
        if part.first > first:
            pieces.append(pack.a.new_zeros((*shape, part.first - first)))
        pieces.append((shrunk[:, :, part.top : part.end], part.b[span]))
        first = part.last
    if pack.width > first:
        pieces.append(pack.a.new_zeros((*shape, pack.width - first)))
    select, bmm, cat = torch.index_select, torch.bmm, torch.cat

    def run(y: Any, x: Any) -> None:
        select(x, 0, padded, out=gathered)
        bmm(gathered_3d, a_t, out=shrunk)
        if scale != 1.0:
            shrunk.mul_(scale)
        deltas = [bmm(*piece) if isinstance(piece, tuple) else piece for piece in pieces]
        delta = (cat(deltas, 2) if len(deltas) > 1 else deltas[0]).view(n_padded, -1)
        # On all columns at once: of a part of them, index_add_ copies the whole there and back, rows of others too.
        y.index_add_(0, true, delta if kept is None else select(delta, 0, kept))

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
