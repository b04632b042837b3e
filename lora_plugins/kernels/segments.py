"""Which rows of a batch belong to which slot, found once per batch and used by every layer; pure.

A batch is a sequence of slots, one per row (token), -1 for the base model. It is cut into blocks of neighbouring rows.
A long run of one slot is a block of its own and is computed on plain slices. Short runs (decoding sequences, one row
each) that lie together are one block, in which every row meets its own adapter. Long runs of base rows are in no block.
Source of the idea of grouping by adapter: S-LoRA and Punica (arXiv:2311.03285, arXiv:2310.18547).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

BASE = -1
LONG_RUN = 32  # rows: from here on a product of its own costs less than the rows that it would share one with


@dataclass(frozen=True, slots=True)
class Dense:
    """Rows `start` to `stop`, all of `slot`."""

    start: int
    stop: int
    slot: int


@dataclass(frozen=True, slots=True)
class Mixed:
    """Rows `start` to `stop` of several slots, or of one slot and the base model.

    `rows` has one entry per slot in `slots`: its rows, counted from the batch's first.
    """

    start: int
    stop: int
    slots: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]


Block = Dense | Mixed


@dataclass(frozen=True, slots=True)
class Segments:
    """A batch of `n_rows` rows; `slots` are those in use, ascending."""

    n_rows: int
    slots: tuple[int, ...]
    blocks: tuple[Block, ...]


NONE = Segments(0, (), ())


def segment(slot_of_row: Sequence[int], *, long_run: int = LONG_RUN) -> Segments:
    """Cut a batch into blocks.

    Args:
        slot_of_row: one slot per row; every negative one stands for the base model.
        long_run: the number of rows from which on a run is a block of its own.
    """
    blocks: list[Block] = []
    pending: list[tuple[int, int, int]] = []
    for start, stop, slot in _runs(slot_of_row):
        if stop - start < long_run:
            pending.append((start, stop, slot))
            continue
        blocks.extend(_joined(pending))
        pending.clear()
        if slot > BASE:
            blocks.append(Dense(start, stop, slot))
    blocks.extend(_joined(pending))
    slots = sorted({slot for slot in slot_of_row if slot > BASE})
    return Segments(len(slot_of_row), tuple(slots), tuple(blocks))


def _runs(slot_of_row: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    start = 0
    for slot, rows in groupby(max(slot, BASE) for slot in slot_of_row):
        stop = start + sum(1 for _ in rows)
        yield start, stop, slot
        start = stop


def _joined(runs: Sequence[tuple[int, int, int]]) -> Iterator[Block]:
    """The one block of short runs that lie together, without base rows at its ends; none if all are base rows."""
    used = [number for number, (_, _, slot) in enumerate(runs) if slot > BASE]
    if not used:
        return
    runs = runs[used[0] : used[-1] + 1]
    start, stop = runs[0][0], runs[-1][1]
    if len(runs) == 1:
        yield Dense(start, stop, runs[0][2])
        return
    rows: dict[int, list[int]] = {}
    for first, last, slot in runs:
        if slot > BASE:
            rows.setdefault(slot, []).extend(range(first, last))
    slots = tuple(sorted(rows))
    yield Mixed(start, stop, slots, tuple(tuple(rows[slot]) for slot in slots))
