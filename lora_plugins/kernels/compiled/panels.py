"""A slot's A and B as the compiled product reads them: panels of columns, at the slot's true ranks.

A panel holds `Product.panel` columns of the product's result, one row of them for each step of the sum. The last one
may be narrow, `Product.lanes` columns, and is filled up with zeros, of which nothing reaches `y`. In bfloat16 the steps
go in pairs (`Product.pair`), a last odd one with a zero beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_plugins.kernels.compiled.library import Product, Slice
from lora_plugins.kernels.ranks import SlotRanks


@dataclass(frozen=True, slots=True)
class Panels:
    """One slot of one module.

    Attributes:
        stamp: what `SlotRanks.stamp` said when it was copied.
        flat: all panels, those of A first. rank: of all slices together.
        slices: those that have a rank, as `lora.c` wants them.
        placed: whether they were made of the adapter itself: the slot's stacks hold something else.
    """

    stamp: int
    flat: Any
    rank: int
    slices: Any
    placed: bool = False

    @property
    def nbytes(self) -> int:
        return int(self.flat.nbytes)


def make(product: Product, a: Sequence[Any], b: Sequence[Any], slot: int, ranks: tuple[int, ...], stamp: int) -> Panels:
    """Copy one slot's A's `[slots, 1, max_rank, in]` and B's `[slots, 1, out, max_rank]` into panels."""
    inn, widths = int(a[0].shape[-1]), [int(b_i.shape[2]) for b_i in b]
    flat = a[0].new_empty(size(product, inn, widths, ranks))
    sides = [(a_i[slot, 0, :rank], b_i[slot, 0, :, :rank]) for rank, a_i, b_i in zip(ranks, a, b, strict=True)]
    return Panels(stamp, flat, sum(ranks), fill(product, flat, inn, widths, sides))


def size(product: Product, inn: int, widths: Sequence[int], ranks: Sequence[int]) -> int:
    """Elements of the panels of slices of these widths and ranks."""
    return _side(product, sum(ranks), inn) + sum(
        _side(product, width, rank) for width, rank in zip(widths, ranks, strict=True)
    )


def fill(product: Product, flat: Any, inn: int, widths: Sequence[int], sides: Sequence[tuple[Any, Any]]) -> Any:
    """Write A `[rank, in]` and B `[out, rank]` of each slice into `flat`; returns the slices as `lora.c` wants them.

    The rows of A and B are contiguous. `flat` has `size` elements of their dtype, of any content.
    """
    ranks = [int(a.shape[0]) for a, _ in sides]
    own = [i for i, rank in enumerate(ranks) if rank]
    slices = (Slice * len(own))()
    total = sum(ranks)
    into_a = flat.data_ptr()
    into_b = into_a + _side(product, total, inn) * flat.element_size()
    top = 0
    for place, i in zip(slices, own, strict=True):
        (a, b), rank, width = sides[i], ranks[i], widths[i]
        product.pack(a.data_ptr(), a.stride(0), rank, inn, into_a, top, total)
        product.pack(b.data_ptr(), b.stride(0), width, rank, into_b, 0, width)
        place.b, place.rank, place.top = into_b, rank, top
        place.first, place.width = sum(widths[:i]), width
        top += rank
        into_b += _side(product, width, rank) * flat.element_size()
    return slices


def _side(product: Product, columns: int, depth: int) -> int:
    """Elements of the panels of so many columns, each the sum of `depth` steps."""
    return filled(product, columns) * -(-depth // product.pair) * product.pair


def filled(product: Product, columns: int) -> int:
    """So many columns, up to a whole register."""
    return -(-columns // product.lanes) * product.lanes


class SlotPanels:
    """The panels of a module's slots: made once of what a slot holds, or an adapter's own that the slot points at.

    Args:
        product: whose panels.
        a, b: vLLM's stacks, as for `make`; read only.
        ranks: what lies in them.
    """

    def __init__(self, product: Product, a: Sequence[Any], b: Sequence[Any], ranks: SlotRanks) -> None:
        self.product, self.a, self.b, self.ranks = product, tuple(a), tuple(b), ranks
        self._of_slot: dict[int, Panels] = {}
        ranks.listen(self._forget)  # what an unloaded adapter left behind is memory

    @property
    def nbytes(self) -> int:
        """Memory of the panels that were made of slots; that of placed ones is the adapters'."""
        return sum(found.nbytes for found in list(self._of_slot.values()) if not found.placed)

    def of(self, slot: int) -> Panels:
        """The panels of what this slot holds now, copied where nobody has done that; nobody is writing the slot.

        Callable from the thread that fills idle slots.
        """
        found = self._current(slot)
        if found is None:
            stamp = self.ranks.stamp(slot)
            found = self._of_slot[slot] = make(self.product, self.a, self.b, slot, self.ranks[slot], stamp)
        return found

    def place(self, slot: int, ranks: Sequence[int], flat: Any, slices: Any) -> None:
        """Point the slot at panels of these ranks, until it is written or placed again."""
        self.ranks.written(slot, ranks)
        if slices:
            self._of_slot[slot] = Panels(self.ranks.stamp(slot), flat, sum(ranks), slices, placed=True)

    def is_placed(self, slot: int) -> bool:
        found = self._current(slot)
        return found is not None and found.placed

    def _current(self, slot: int) -> Panels | None:
        found = self._of_slot.get(slot)
        return found if found is not None and found.stamp == self.ranks.stamp(slot) else None

    def _forget(self, slot: int) -> None:
        self._of_slot.pop(slot, None)
