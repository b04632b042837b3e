"""The trial of a served set in a table: its counts, and what it counts as wrong (`benchmarks/served_table.py`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import served_table
from benchmarks.served_table_lines import code_lines
from benchmarks.served_table_rows import ChangedMeanwhile, Row
from benchmarks.served_table_workers import opened
from lora_plugins.server.registry import DesiredAdapter

RIGHT = [(0.0, 1.0, 1, 7), (2.0, 3.0, 2, 8), (2.5, 2.6, 1, 0), (4.0, 4.1, 2, 0)]  # changes to 1 and 2, looks at 1 and 2


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="compiles the library that kills at a call")
def test_no_update_is_lost_no_row_half_nothing_forgotten(tmp_path: Path) -> None:
    cases = [part for case in ("writers", "kills", "full") for part in ("--case", case)]
    few = ["--rounds", "8", "--operations", "2", "--kill-step", "6", "--folder", str(tmp_path)]
    assert served_table.main([*cases, *few]) == 0
    kept = json.loads((tmp_path / "served_table_writers_kills_full.json").read_text())
    counts = {goal["what"]: goal["value"] for goal in kept["goals"]}
    assert set(counts.values()) == {0}
    assert len(counts) == 4 * 3 + 4 * 5 + 2
    assert all(row["kills"] > 1 for row in kept["rows"]["kills"])
    assert [row["changes"] for row in kept["rows"]["writers"]] == [16, 32, 16, 32]
    assert [row["error"] for row in kept["rows"]["full"]] == ["database or disk is full"] * 2


@pytest.mark.parametrize(
    ("more", "last", "wrong"),
    [
        ([], 2, {}),
        ([(2.9, 3.1, 2, 9)], 2, {"lost": 1}),  # a second change to 2, of which one is gone
        ([(5.0, 5.1, 1, 0)], 2, {"in no order": 2}),  # old, and begun after the change was answered, and after a look
        ([(1.2, 1.3, 2, 0)], 2, {"in no order": 1}),  # seen before its change began
        ([(5.0, 5.1, 3, 8)], 3, {"engine ids given twice": 1}),
    ],
)
def test_what_no_table_may_answer_is_counted(more: list[Any], last: int, wrong: dict[str, int]) -> None:
    found = served_table.judged(RIGHT + more, last)
    assert {count: found[count] for count in served_table.UPDATED if found[count]} == wrong


@pytest.mark.parametrize("journal", ["wal", "delete"])
@pytest.mark.parametrize("stamp", ["mapped", "data_version"])
def test_a_change_is_in_every_mapping_at_once(tmp_path: Path, journal: str, stamp: str) -> None:
    (table, own), (_, other) = (opened(tmp_path, journal, "unix", stamp) for _ in range(2))
    table.change("sql", 0, digest="a", engine_id=4)
    assert own["sql"] is own["sql"]
    assert other["sql"] == own["sql"] == Row("sql", "a", 4, times=1, number=1)
    with pytest.raises(ChangedMeanwhile):
        table.change("sql", 0, digest="b")
    del other["sql"]
    assert "sql" not in own
    assert list(own) == list(other) == []


def test_a_list_is_taken_up_once(tmp_path: Path) -> None:
    table, requests = opened(tmp_path, "wal", "unix")
    table.migrate([DesiredAdapter("sql", "s3://b/sql", "a" * 64, is_pinned=True), DesiredAdapter("chat")], ["bad"])
    table.migrate([DesiredAdapter("late")], [])
    assert requests.row("sql") == Row("sql", "a" * 64, None, "s3://b/sql", 1, 1, 0, 1, 1)
    assert (requests.row("bad").is_blocked, requests.row("late").times) == (1, 0)


def test_two_processes_do_not_both_poll(tmp_path: Path) -> None:
    assert served_table.elected(tmp_path / "polls", None) == {"at once": 1, "after a death": 1}  # type: ignore[arg-type]


def test_lines_of_code_are_counted_without_texts(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Words.\n\nMore."""\n\n# a comment\nx = 1\n\n\ndef f():\n    """Words."""\n    return x\n')
    assert (code_lines(module), code_lines(module, ("f",))) == (3, 2)
