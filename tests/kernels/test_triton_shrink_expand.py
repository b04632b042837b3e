"""Shrink and expand in Triton's interpreter, against the reference."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")

from lora_plugins.kernels.triton_ops.chunks import SIZES, Chunks
from lora_plugins.kernels.triton_ops.expand import expand
from lora_plugins.kernels.triton_ops.packed import Operands, PackedModule
from lora_plugins.kernels.triton_ops.shrink import partials, shrink
from lora_plugins.kernels.tuning import ExpandTile, ShrinkTile
from tests.kernels.triton_bed import Bed

SMALL_SHRINK = ShrinkTile(columns=16)
SMALL_EXPAND = ExpandTile(columns=16)


def run(
    bed: Bed,
    *,
    size: int = 16,
    tile: ShrinkTile = SMALL_SHRINK,
    out: ExpandTile = SMALL_EXPAND,
    max_rows: int | None = None,
) -> torch.Tensor:
    operands, y = Operands(bed.module, bed.device_ranks, bed.device_vectors, bed.chunks(max_rows), size), bed.y.clone()
    t = partials(tile, operands.module, bed.x.shape[0], "cpu").fill_(float("nan"))
    shrink(t, bed.x, operands, tile, 1.0)
    expand(y, t, operands, out, add_inputs=True)
    return y


@pytest.mark.parametrize(("splits", "rank_programs"), [(1, 2), (2, 1), (5, 2)])
def test_any_split_of_the_work_gives_the_same_answer(splits: int, rank_programs: int) -> None:
    bed = Bed.make([0, 1, 0, -1], [[32, 17], [8, 32]], n_in=67, widths=(24, 24))
    bed.check(run(bed, tile=ShrinkTile(columns=16, splits=splits, rank_programs=rank_programs)))


@pytest.mark.parametrize("size", [16, *(pytest.param(size, marks=pytest.mark.nightly) for size in (32, 64)), 128])
def test_chunks_of_every_size_with_slots_that_need_several(size: int) -> None:
    slot_of_row = [row % 3 - 1 for row in range(150)]
    bed = Bed.make(slot_of_row, [[8], [16]], n_in=32)
    bed.check(run(bed, size=size, out=ExpandTile(columns=32)))


@pytest.mark.parametrize("slots", [300, 512])
def test_chunks_of_many_slots(slots: int) -> None:
    """One program takes fewer chunks at once then, so that what it compares fits into its registers."""
    slot_of_row = [(row * 37) % slots if row % 5 else -1 for row in range(60)] + [slots - 1] * 40
    chunks = Chunks(128, slots, "cpu")
    chunks.cut(torch.tensor(slot_of_row))
    order = sorted(range(len(slot_of_row)), key=lambda row: slot_of_row[row])
    for size in SIZES:
        want = []
        for slot, places in groupby(range(len(order)), key=lambda place: slot_of_row[order[place]]):
            rows = list(places)
            if slot >= 0:
                want += [(slot, rows[at], len(rows[at : at + size])) for at in range(0, len(rows), size)]
        table = chunks.of_size(size).T.tolist()
        assert [tuple(chunk) for chunk in table[: len(want)]] == want
        assert all(chunk == [-1, 0, 0] for chunk in table[len(want) :])


def test_larger_buffers_keep_nothing_of_the_batch_before() -> None:
    bed = Bed.make([0] * 40, [[8], [8]])
    chunks = bed.chunks(max_rows=64)
    chunks.cut(torch.tensor([1, -1]))
    assert chunks.of_size(16)[2].tolist()[:2] == [1, 0]
    assert chunks.of_size(16)[0, 0] == 1
    assert chunks.table[:, 2].sum() == len(chunks.table)


def test_rows_beyond_y_are_left_out() -> None:
    bed = Bed.make([0, 1, 0, 1, 0, 1], [[8], [8]])
    short = Bed(bed.x[:4], bed.y[:4], bed.a, bed.b, bed.slot_of_row, bed.ranks, bed.widths, bed.max_rank)
    short.check(run(short, max_rows=8))


def test_weights_that_one_launch_cannot_serve_are_refused() -> None:
    a, b = torch.zeros(2, 1, 8, 16), torch.zeros(2, 1, 24, 8)
    with pytest.raises(ValueError, match="stacked A of one module differ"):
        PackedModule([a, torch.zeros(2, 1, 4, 16)], [b, b], (24, 24))
    with pytest.raises(TypeError, match=r"torch\.float64"):
        PackedModule([a.double()], [b.double()], (24,))
    with pytest.raises(ValueError, match="slices of"):
        PackedModule([a], [b], (25,))
