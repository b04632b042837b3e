"""One module of one adapter as the compiled product reads the module: panels of columns, at the true ranks.

In a worker on the CPU, `fill` copies an adapter's A and B into panels, in the loading thread (`kernels/packing.py`) or,
of a copied slot, in the engine loop (`SlotPanels.of`). `Prepared` computes one module for one batch, in every step.

A panel holds the weights for `Product.panel` columns of the product's result, a row for each step of the sum. The last
panel may be narrow, `Product.lanes` columns (a register's), filled up with zeros; no zero reaches `y`. In bfloat16 the
steps go in pairs (`Product.pair`); a zero stands beside a last odd step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_plugins.kernels.compiled.library import Group, Product, Slice, Work
from lora_plugins.kernels.slot_ranks import SlotRanks, Vectors


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a layer: columns of `x` (`inn`), columns of each slice of `y` (`widths`), and the dtype."""

    inn: int
    widths: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Panels:
    """One module of one adapter; the panels own their memory, or keep the given block alive.

    Attributes:
        shape: of the layers that can compute with the panels. ranks: of each slice.
        flat: all panels, A's first. slices: the slices with a rank, as `lora.c` wants the slices.
    """

    shape: Shape
    ranks: tuple[int, ...]
    flat: Any
    slices: Any


def size(product: Product, shape: Shape, ranks: Sequence[int]) -> int:
    """Return the number of elements in the panels of a module of this shape and these ranks."""
    return _side(product, sum(ranks), shape.inn) + sum(
        _side(product, width, rank) for width, rank in zip(shape.widths, ranks, strict=True)
    )


def fill(product: Product, flat: Any, shape: Shape, sides: Sequence[tuple[Any, Any]]) -> Panels:
    """Write A `[rank, in]` and B `[out, rank]` of each slice into `flat`, and return the panels.

    The rows of A and B are contiguous. `flat` has `size` elements of their dtype, of any content.
    """
    ranks = tuple(int(a.shape[0]) for a, _ in sides)
    own = [i for i, rank in enumerate(ranks) if rank]
    slices = (Slice * len(own))()
    # Slices without a rank get no entry: the product would compute nothing for such a slice.
    total = sum(ranks)
    into_a = flat.data_ptr()
    into_b = into_a + _side(product, total, shape.inn) * flat.element_size()
    top = 0
    # `lora.c` computes the A's of all slices as a single product: `top` is the slice's first row in the shared A.
    for place, i in zip(slices, own, strict=True):
        (a, b), rank, width = sides[i], ranks[i], shape.widths[i]
        # The last two arguments: the first column to fill, of so many columns in all panels of the side.
        product.pack(a.data_ptr(), a.stride(0), rank, shape.inn, into_a, top, total)
        product.pack(b.data_ptr(), b.stride(0), width, rank, into_b, 0, width)
        place.b, place.rank, place.top = into_b, rank, top
        place.first, place.width = sum(shape.widths[:i]), width
        top += rank
        into_b += _side(product, width, rank) * flat.element_size()
    return Panels(shape, ranks, flat, slices)


def _side(product: Product, columns: int, depth: int) -> int:
    """Return the elements in the panels of so many columns, each column a sum of `depth` steps."""
    return filled(product, columns) * -(-depth // product.pair) * product.pair


def filled(product: Product, columns: int) -> int:
    """Return the number of columns, up to a whole register."""
    return -(-columns // product.lanes) * product.lanes


@dataclass(frozen=True, slots=True)
class _SlotEntry:
    """A slot's panels, whether the panels are an adapter's own, and `SlotRanks.stamp` at the time of the entry."""

    panels: Panels
    is_placed: bool
    stamp: int


class SlotPanels:
    """The panels of a module's slots: an adapter's own panels, or panels made once of the slot's content.

    Args:
        product: the compiled product that reads the panels.
        a, b: vLLM's stacks `[slots, 1, max_rank, in]` and `[slots, 1, out, max_rank]`, a pair for a slice; read only.
        ranks: true ranks of the stacks' content.
    """

    def __init__(self, product: Product, a: Sequence[Any], b: Sequence[Any], ranks: SlotRanks) -> None:
        self.product, self.ranks = product, ranks
        self.shape = Shape(int(a[0].shape[-1]), tuple(int(b_i.shape[2]) for b_i in b), a[0].dtype)
        self._stacks = tuple(zip(a, b, strict=True))
        self._of_slot: dict[int, _SlotEntry] = {}
        ranks.listen(self._forget)  # an unloaded adapter's panels must not keep memory

    def of(self, slot: int) -> Panels:
        """Return the panels of the slot's content, copied at the first call.

        Callers ensure that no thread writes the slot.
        """
        held = self._current(slot)
        if held is None:
            ranks, stamp = self.ranks[slot], self.ranks.stamp(slot)
            flat = self._stacks[0][0].new_empty(size(self.product, self.shape, ranks))
            sides = [
                (a[slot, 0, :rank], b[slot, 0, :, :rank]) for rank, (a, b) in zip(ranks, self._stacks, strict=True)
            ]
            # Not placed: a copy of the slot's content, not an adapter's own panels.
            held = self._of_slot[slot] = _SlotEntry(fill(self.product, flat, self.shape, sides), False, stamp)
        return held.panels

    def place(self, slot: int, panels: Panels | None) -> None:
        """Point the slot at `panels`, or at nothing, until the next write or placement."""
        # `written` first: `written` changes the stamp and calls `_forget`, which would drop a new entry.
        self.ranks.written(slot, panels.ranks if panels else (0,) * len(self.shape.widths))
        if panels and panels.slices:
            self._of_slot[slot] = _SlotEntry(panels, is_placed=True, stamp=self.ranks.stamp(slot))

    def is_placed(self, slot: int) -> bool:
        """Whether the slot points at an adapter's own panels; the stacks then hold other content."""
        held = self._current(slot)
        return held is not None and held.is_placed

    def _current(self, slot: int) -> _SlotEntry | None:
        """Return the slot's entry; None without an entry of the present content."""
        held = self._of_slot.get(slot)
        # A stamp that differs means a write since: the panels are of earlier content.
        return held if held is not None and held.stamp == self.ranks.stamp(slot) else None

    def _forget(self, slot: int) -> None:
        if self._current(slot) is None:  # else the slot's content was only given vectors
            self._of_slot.pop(slot, None)


def _turned(panels: Panels, vectors: Vectors) -> Any:
    """Return all slices of the layer, those without a rank too, with their parts of the vectors."""
    widths, known = panels.shape.widths, {place.first: place for place in panels.slices}
    slices = (Slice * len(widths))()
    for i, (place, width) in enumerate(zip(slices, widths, strict=True)):
        first = sum(widths[:i])
        if (own := known.get(first)) is not None:
            place.b, place.rank, place.top = own.b, own.rank, own.top
        place.first, place.width = first, width
        place.g, place.c = (side.data_ptr() + 4 * first for side in vectors)  # float32
    return slices


class Prepared:
    """The compiled product for the adapters of one batch: `prepared(y, x)` adds to `y` `[rows, out]` their outputs.

    Args:
        product: for the dtype of `x`, `y` and the panels.
        panels: by slot.
        rows: by slot, the rows of the batch with this adapter, int32, ascending.
        scale: factor of the addition.
        take: gives a float32 buffer of a shape, undefined in content, that no other code uses until a call has
            returned.
        vectors: by slot, of the panels' slots that have any.
    """

    __slots__ = ("_add", "_address", "_kept", "_layout", "_n_rows", "_width", "_work")

    def __init__(
        self,
        product: Product,
        panels: Mapping[int, Panels],
        rows: Mapping[int, Any],
        scale: float,
        take: Callable[[tuple[int, ...]], Any],
        vectors: Mapping[int, Vectors],
    ) -> None:
        groups = (Group * len(panels))()
        slices = {
            slot: _turned(found, vectors[slot]) if slot in vectors else found.slices for slot, found in panels.items()
        }
        for group, (slot, found) in zip(groups, panels.items(), strict=True):
            group.rows, group.n_rows = rows[slot].data_ptr(), len(rows[slot])
            group.a, group.rank = found.flat.data_ptr(), sum(found.ranks)
            group.slices, group.n_slices = ctypes.addressof(slices[slot]), len(slices[slot])
        inn = next(iter(panels.values())).shape.inn
        work = Work(groups=ctypes.addressof(groups), n_groups=len(groups), inn=inn, scale=scale)
        self._add, self._address = product.add, ctypes.addressof(work)
        work.parts = product.parts(self._address)
        sizes = [work.parts * group.n_rows * filled(product, group.rank) for group in groups]
        buffer = take((sum(sizes),))
        shrunk = buffer.data_ptr()
        for group, size in zip(groups, sizes, strict=True):
            group.shrunk = shrunk
            # 4 bytes: shrunk rows are float32 in every dtype.
            shrunk += 4 * size
        self._n_rows = 1 + max(int(rows[slot][-1]) for slot in panels)
        self._width = max(place.first + place.width for places in slices.values() for place in places)
        self._work = work
        # The structures hold addresses only; the object keeps the tensors behind the addresses alive.
        self._kept = (groups, dict(panels), slices, dict(vectors), dict(rows), buffer)
        self._layout: tuple[Any, ...] | None = None

    def repeat(self, y: Any, x: Any) -> bool:
        """Compute as a call does, if the last call had tensors of the same layout; return whether it had.

        In a step of the engine each method of a tensor costs up to half a microsecond, so one comparison replaces the
        checks.
        """
        is_same = self._layout == (y.shape, y.stride(), y.dtype, x.shape, x.stride(), x.dtype)
        if is_same:
            self._add(self._address, x.data_ptr(), y.data_ptr())
        return is_same

    def __call__(self, y: Any, x: Any) -> None:
        if x.stride(1) != 1:
            x = x.contiguous()
        x_rows, x_width = x.shape
        y_rows, y_width = y.shape
        inn = self._work.inn
        # The compiled product checks nothing: a shape beyond these bounds would write outside of `y`.
        if min(x_rows, y_rows) < self._n_rows or x_width != inn or y_width < self._width or y.stride(1) != 1:
            raise ValueError(
                f"x {tuple(x.shape)} and y {tuple(y.shape)} with strides {y.stride()}: "
                f"the product needs {self._n_rows} rows, {inn} columns of x and {self._width} adjacent ones of y"
            )
        self._work.x_stride, self._work.y_stride = x.stride(0), y.stride(0)
        self._layout = (y.shape, y.stride(), y.dtype, x.shape, x.stride(), x.dtype)
        self._add(self._address, x.data_ptr(), y.data_ptr())
