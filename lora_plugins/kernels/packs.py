"""A module's adapters at their true ranks, side by side: what the CPU kernels multiply with.

vLLM's slots are padded to `max_lora_rank`, and the slices of a packed module (q, k, v) lie apart. Packs copy the
adapters of the running batch out of them without the padding: adapters of the same ranks in one pack, so that one
batched product serves them all. A pack is made when a batch first needs it and kept while its adapters are in use. The
memory of a module's packs is that of these adapters at their true ranks, once, and at most twice that after a change.

An adapter of a large rank is not copied: its products are long enough without company, and a copy of hundreds of
megabytes would be made in the engine's loop. It is computed from views of its slot, slice by slice. One that was placed
(`lora_plugins.kernels.packing`) brings its panels along, of whatever rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_plugins.kernels.compiled.panels import Panels, SlotPanels
from lora_plugins.kernels.ranks import SlotRanks

LARGEST_PACKED_RANK = 64


@dataclass(frozen=True, slots=True)
class PackedSlice:
    """One slice of the output.

    Attributes:
        first, last: columns of `y`.
        top, end: columns of the shrunk rows, those of `Pack.a`.
        b: `[adapters, end - top, last - first]`.
    """

    first: int
    last: int
    top: int
    end: int
    b: Any


@dataclass(frozen=True, slots=True)
class Pack:
    """Adapters of the same ranks.

    Attributes:
        slots: where they are from, in the order in which they lie.
        stamps: what `SlotRanks.stamp` said when each was copied.
        a: `[adapters, rank, in]`, the ranks of all slices, slice after slice.
        slices: those that have a rank. width: columns of `y`, those of slices without a rank included.
    """

    slots: tuple[int, ...]
    stamps: tuple[int, ...]
    a: Any
    slices: tuple[PackedSlice, ...]
    width: int

    @property
    def rank(self) -> int:
        """Ranks of all slices and adapters together."""
        return int(self.a.shape[0] * self.a.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.a.nbytes + sum(part.b.nbytes for part in self.slices))


class ModuleWeights:
    """The slots of one module, and the packs or panels made of them.

    Args:
        a: one `[slots, 1, max_rank, in]` per slice; vLLM's own tensors, read only.
        b: one `[slots, 1, out, max_rank]` per slice.
        ranks: what lies in them.
        panels: of the same slots, where the compiled product computes them: it takes the place of packs.
        torch_from_rows: the number of rows from which on an adapter is PyTorch's all the same; None: never.
    """

    def __init__(
        self,
        a: Sequence[Any],
        b: Sequence[Any],
        ranks: SlotRanks,
        panels: SlotPanels | None = None,
        torch_from_rows: int | None = None,
    ) -> None:
        self.a, self.b, self.ranks, self.panels = tuple(a), tuple(b), ranks, panels
        self.torch_from_rows = torch_from_rows
        self.dtype = self.a[0].dtype
        self.width = sum(int(b_i.shape[2]) for b_i in self.b)
        self._packs: dict[tuple[int, ...], Pack] = {}
        self._ready: dict[int, Pack] = {}  # made in a background thread, by slot

    @property
    def packed_bytes(self) -> int:
        packs = sum(pack.nbytes for pack in [*self._packs.values(), *list(self._ready.values())])
        return packs + (self.panels.nbytes if self.panels else 0)

    def prepare(self, slot: int) -> None:
        """Copy one slot now, so that no step has to; the slot has just been written, and nobody reads it.

        Callable from the thread that fills idle slots.
        """
        self._ready.pop(slot, None)
        ranks = self.ranks[slot]
        if 0 < max(ranks) <= LARGEST_PACKED_RANK:
            if self.panels is not None:
                self.panels.of(slot)
            else:
                self._ready[slot] = self._make(ranks, (slot,))

    def panelled(self, n_rows: Mapping[int, int]) -> dict[int, Panels]:
        """The panels of those of these slots, each with its number of rows, that the compiled product computes."""
        panels, most = self.panels, self.torch_from_rows
        if panels is None:
            return {}
        return {
            slot: panels.of(slot)
            for slot, n in n_rows.items()
            # What a slot points at is in its panels only.
            if panels.is_placed(slot)
            or (0 < max(self.ranks[slot]) <= LARGEST_PACKED_RANK and (most is None or n < most))
        }

    def places(self, slots: Sequence[int]) -> dict[int, tuple[tuple[Pack, int], ...]]:
        """Where each of these slots lies: packs and the places in them; none where it adapts nothing here."""
        wanted: dict[tuple[int, ...], list[int]] = {}
        # Where there are panels, an adapter of many rows has them for its next few: no third copy of it.
        is_copied = self.panels is None
        views = self.views([slot for slot in slots if not is_copied or max(self.ranks[slot]) > LARGEST_PACKED_RANK])
        for slot in slots:
            ranks = self.ranks[slot]
            if slot not in views and any(ranks):
                wanted.setdefault(ranks, []).append(slot)
        found = {ranks: self._pack(ranks, of_ranks) for ranks, of_ranks in wanted.items()}
        # An adapter that has just left the batch often comes back with the next request: it stays while that is cheap.
        spare = sum(pack.rank for pack in found.values())
        for ranks, pack in self._packs.items():
            if ranks not in found and pack.rank <= spare:
                found[ranks] = pack
                spare -= pack.rank
        self._packs = found
        # A pack may hold slots that have since been written with other ranks: only what is wanted has a place in it.
        return views | {
            slot: ((found[ranks], found[ranks].slots.index(slot)),)
            for ranks, of_ranks in wanted.items()
            for slot in of_ranks
        }

    def views(self, slots: Sequence[int]) -> dict[int, tuple[tuple[Pack, int], ...]]:
        """As `places`, with nothing copied."""
        return {slot: tuple((pack, 0) for pack in self._views(self.ranks[slot], slot)) for slot in slots}

    def _views(self, ranks: tuple[int, ...], slot: int) -> Iterator[Pack]:
        """One pack for each slice that has a rank, of which nothing is copied."""
        first = 0
        for rank, a_i, b_i in zip(ranks, self.a, self.b, strict=True):
            last = first + int(b_i.shape[2])
            if rank:
                part = PackedSlice(first, last, 0, rank, b_i[slot, :, :, :rank].transpose(1, 2))
                yield Pack((slot,), (self.ranks.stamp(slot),), a_i[slot, :, :rank], (part,), self.width)
            first = last

    def _pack(self, ranks: tuple[int, ...], wanted: Sequence[int]) -> Pack:
        have = self._packs.get(ranks)
        ready = [pack for slot in wanted if (pack := self._ready.pop(slot, None)) is not None]
        kept: list[int] = []
        if have is not None:
            kept = [
                slot for slot, stamp in zip(have.slots, have.stamps, strict=True) if self.ranks.stamp(slot) == stamp
            ]
            if set(wanted) <= set(kept) and len(have.slots) <= 2 * len(wanted):
                return have
        if len(wanted) == len(ready) == 1 and ready[0].stamps == (self.ranks.stamp(wanted[0]),):
            return ready[0]
        left = [slot for slot in kept if slot not in wanted]
        return self._make(ranks, tuple(sorted([*wanted, *left] if len(left) <= len(wanted) else wanted)))

    def _make(self, ranks: tuple[int, ...], slots: tuple[int, ...]) -> Pack:
        stamps = tuple(self.ranks.stamp(slot) for slot in slots)
        a = self.a[0].new_empty((len(slots), sum(ranks), self.a[0].shape[-1]))
        slices: list[PackedSlice] = []
        first = top = 0
        for rank, a_i, b_i in zip(ranks, self.a, self.b, strict=True):
            width, end = b_i.shape[2], top + rank
            if rank:
                b = b_i.new_empty((len(slots), rank, width))
                for at, slot in enumerate(slots):
                    a[at, top:end] = a_i[slot, 0, :rank]
                    b[at] = b_i[slot, 0, :, :rank].t()
                slices.append(PackedSlice(first, first + width, top, end, b))
            first, top = first + width, end
        return Pack(slots, stamps, a, tuple(slices), first)
