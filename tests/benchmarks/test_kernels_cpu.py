"""What the benchmark of the CPU kernels measures, and prints of it."""

from __future__ import annotations

import pytest

from benchmarks.kernels_cpu import ADAPTERS, GOALS, PARTS, SEQUENCES, SLOT_RANKS, cases, print_table


@pytest.mark.parametrize("slot_rank", SLOT_RANKS)
def test_each_case_has_a_goal_and_adapters_that_are_written(slot_rank) -> None:
    found = cases(slot_rank)
    assert found.pop("base") == []
    assert set(found) <= set(GOALS)
    written = {f"r{rank}-{n}" for rank, count in ADAPTERS.items() for n in range(count)}
    assert {name for names in found.values() for name in names} <= written
    assert [len(set(found[case])) for case in ("one16", "four16", "sixteen16")] == [1, 4, SEQUENCES]


def test_a_batch_of_sixteen_adapters_stands_beside_its_goal(capsys) -> None:
    seconds = {"base": 9.0, "one16": 9.5, "four16": 9.6, "sixteen16": 10.0}
    rows = [
        {"kernels": "ours", "slot_rank": 16, "case": case, "part": part, "round": 0, "seconds": taken, "load": 1.0}
        for case, taken in seconds.items()
        for part in PARTS
    ]
    print_table(rows, [16])
    assert "| ours | 16 | sixteen16 | 51 | 90.0% | 90.0% | 90.0% | 90% |" in capsys.readouterr().out
