"""Blocks of a batch: every adapted row in exactly one of them, with its own slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.kernels.segments import LONG_RUN, Dense, Mixed, segment

slots_of_rows = st.lists(st.tuples(st.integers(-2, 4), st.integers(1, 2 * LONG_RUN)), max_size=12).map(
    lambda runs: [slot for slot, length in runs for _ in range(length)]
)


def covered(slot_of_row: list[int], long_run: int = LONG_RUN) -> list[tuple[int, int]]:
    """Row and slot, for every row that a block computes."""
    found = []
    for block in segment(slot_of_row, long_run=long_run).blocks:
        if isinstance(block, Dense):
            found += [(row, block.slot) for row in range(block.start, block.stop)]
        else:
            found += [(row, slot) for slot, rows in zip(block.slots, block.rows, strict=True) for row in rows]
    return found


@given(slots_of_rows, st.integers(1, 40))
def test_every_adapted_row_is_in_one_block_with_its_slot(slot_of_row, long_run):
    expected = [(row, slot) for row, slot in enumerate(slot_of_row) if slot >= 0]
    assert sorted(covered(slot_of_row, long_run)) == expected


@given(slots_of_rows)
def test_blocks_are_in_order_and_begin_and_end_with_adapters(slot_of_row):
    end = 0
    for block in segment(slot_of_row).blocks:
        assert end <= block.start < block.stop <= len(slot_of_row)
        assert slot_of_row[block.start] >= 0
        assert slot_of_row[block.stop - 1] >= 0
        end = block.stop


@given(slots_of_rows)
def test_the_slots_in_use_are_known(slot_of_row):
    found = segment(slot_of_row)
    assert found.slots == tuple(sorted({slot for slot in slot_of_row if slot >= 0}))
    assert found.n_rows == len(slot_of_row)


def test_batches_without_adapters_have_no_blocks():
    assert segment([]).blocks == ()
    assert segment([-1] * 100).blocks == ()


def test_one_adapter_is_one_dense_block_however_short():
    assert segment([3]).blocks == (Dense(0, 1, 3),)
    assert segment([3] * 500).blocks == (Dense(0, 500, 3),)


def test_short_runs_share_a_block_and_long_ones_do_not():
    slot_of_row = [-1, 0, 1, 0, -1, 2] + [1] * LONG_RUN + [-1] * LONG_RUN + [0, 0]
    assert segment(slot_of_row).blocks == (
        Mixed(1, 6, (0, 1, 2), ((1, 3), (2,), (5,))),
        Dense(6, 6 + LONG_RUN, 1),
        Dense(6 + 2 * LONG_RUN, 8 + 2 * LONG_RUN, 0),
    )


def test_base_rows_between_adapter_rows_make_a_mixed_block():
    assert segment([0, -1, 0]).blocks == (Mixed(0, 3, (0,), ((0, 2),)),)
