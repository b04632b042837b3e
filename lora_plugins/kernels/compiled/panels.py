"""A slot's A and B as the compiled product reads them: panels of columns, at the slot's true ranks.

A panel holds `Product.panel` columns of the product's result, one row of them for each step of the sum. The last one
may be narrow, `Product.lanes` columns, and is filled up with zeros, of which nothing reaches `y`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_plugins.kernels.compiled.build import Product, Slice
from lora_plugins.kernels.ranks import SlotRanks


@dataclass(frozen=True, slots=True)
class Panels:
    """One slot of one module.

    Attributes:
        stamp: what `SlotRanks.stamp` said when it was copied.
        flat: all panels, those of A first. rank: of all slices together.
        slices: those that have a rank, as `lora.c` wants them.
    """

    stamp: int
    flat: Any
    rank: int
    slices: Any

    @property
    def nbytes(self) -> int:
        return int(self.flat.nbytes)


def make(product: Product, a: Sequence[Any], b: Sequence[Any], slot: int, ranks: tuple[int, ...], stamp: int) -> Panels:
    """Copy one slot's A's `[slots, 1, max_rank, in]` and B's `[slots, 1, out, max_rank]` into panels."""
    inn, rank = int(a[0].shape[-1]), sum(ranks)
    own = [i for i, of_slice in enumerate(ranks) if of_slice]
    widths = [int(b_i.shape[2]) for b_i in b]
    sizes = [filled(product, rank) * inn, *(filled(product, widths[i]) * ranks[i] for i in own)]
    flat = a[0].new_zeros(sum(sizes))
    of_a, *of_b = flat.split(sizes)
    top = 0
    slices = (Slice * len(own))()
    for place, i, into in zip(slices, own, of_b, strict=True):
        _fill(product, of_a, a[i][slot, 0, : ranks[i]].t(), top)
        _fill(product, into, b[i][slot, 0, :, : ranks[i]].t(), 0)
        place.b, place.rank, place.top = into.data_ptr(), ranks[i], top
        place.first, place.width = sum(widths[:i]), widths[i]
        top += ranks[i]
    return Panels(stamp, flat, rank, slices)


def filled(product: Product, columns: int) -> int:
    """So many columns, up to a whole register."""
    return -(-columns // product.lanes) * product.lanes


def _fill(product: Product, flat: Any, matrix: Any, column: int) -> None:
    """Write `matrix` `[depth, columns]` into the panels in `flat`, from their `column` on."""
    depth, columns = matrix.shape
    total = flat.numel() // depth
    done = 0
    while done < columns:
        within = (column + done) % product.panel
        start = column + done - within  # of the panel
        whole = (columns - done) // product.panel
        if within == 0 and whole:
            count = whole * product.panel
            into = flat[start * depth : (start + count) * depth].view(whole, depth, product.panel)
            into.copy_(matrix[:, done : done + count].view(depth, whole, product.panel).transpose(0, 1))
        else:
            wide = min(product.panel, total - start)
            count = min(wide - within, columns - done)
            into = flat[start * depth : (start + wide) * depth].view(depth, wide)
            into[:, within : within + count] = matrix[:, done : done + count]
        done += count


class SlotPanels:
    """The panels of a module's slots, each made once for what the slot holds: the adapters' memory once more.

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
        return sum(found.nbytes for found in list(self._of_slot.values()))

    def of(self, slot: int) -> Panels:
        """The panels of what this slot holds now."""
        found = self._of_slot.get(slot)
        return found if found is not None and found.stamp == self.ranks.stamp(slot) else self.make(slot)

    def make(self, slot: int) -> Panels:
        """Copy the slot, which nobody is writing; callable from the thread that fills idle slots."""
        stamp = self.ranks.stamp(slot)
        found = self._of_slot[slot] = make(self.product, self.a, self.b, slot, self.ranks[slot], stamp)
        return found

    def _forget(self, slot: int) -> None:
        self._of_slot.pop(slot, None)
