"""What the benchmark of the CPU kernels measures, and prints of it."""

from __future__ import annotations

import pytest

from benchmarks.kernels_cpu import ADAPTERS, GOALS, SEQUENCES, SLOT_RANKS, cases


@pytest.mark.parametrize("slot_rank", SLOT_RANKS)
def test_each_case_has_a_goal_and_adapters_that_are_written(slot_rank) -> None:
    found = cases(slot_rank)
    assert found.pop("base") == []
    assert set(found) <= set(GOALS)
    written = {f"r{rank}-{n}" for rank, count in ADAPTERS.items() for n in range(count)}
    assert {name for names in found.values() for name in names} <= written
    assert [len(set(found[case])) for case in ("one16", "four16", "sixteen16")] == [1, 4, SEQUENCES]
