"""Tuning tables: what is read, which plan is taken, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_plugins.errors import InvalidSettings
from lora_plugins.kernels import tuning

PLAN = {"chunk": 16, "shrink": {}, "expand": {}}


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_every_packaged_table_can_be_read_and_written(tmp_path: Path) -> None:
    tables = sorted(tuning.PACKAGED.glob("*.json"))
    assert tuning.PACKAGED / "default.json" in tables
    for path in tables:
        table = tuning.read_table(path)
        assert tuning.read_table(write(tmp_path / "again.json", tuning.as_json(table))).plans == table.plans


def test_the_first_plan_whose_limits_hold_is_taken(tmp_path: Path) -> None:
    plans = [{**PLAN, "max_rows": 4, "max_in": 64}, {**PLAN, "chunk": 32, "max_rows": 4}, {**PLAN, "chunk": 64}]
    table = tuning.read_table(write(tmp_path / "t.json", {"plans": plans}))
    assert [table.plan(*batch).chunk for batch in ((4, 64, 1), (4, 65, 1), (5, 64, 1))] == [16, 32, 64]
    assert table.invariant().chunk == 64


def test_the_users_table_comes_before_the_packages(tmp_path: Path) -> None:
    assert tuning.load_table("sm_0", tmp_path).origin == str(tuning.PACKAGED / "default.json")
    path = write(tmp_path / "sm_0.json", {"plans": [PLAN]})
    assert tuning.load_table("sm_0", tmp_path).origin == str(path)


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"plans": []},
        {"plans": [{**PLAN, "max_rows": 4}]},
        {"plans": [{**PLAN, "chunk": 24}]},
        {"plans": [{**PLAN, "shrink": {"rank": 8}}]},
        {"plans": [{**PLAN, "shrink": {"columns": 48}}]},
        {"plans": [{**PLAN, "shrink": {"splits": 0}}]},
        {"plans": [{**PLAN, "expand": {"width": 16}}]},
        {"plans": [{**PLAN, "rows": 4}]},
        {"plans": [{**PLAN, "chunk": 32, "fused": {}}]},
        {"plans": [PLAN], "dense_min_rows": 0},
    ],
    ids=str,
)
def test_what_cannot_be_right_is_refused_with_the_files_name(tmp_path: Path, content: object) -> None:
    path = write(tmp_path / "sm_0.json", content)
    with pytest.raises(InvalidSettings, match=str(path)):
        tuning.load_table("sm_0", tmp_path)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sm_0.json").write_text("{")
    with pytest.raises(InvalidSettings, match="JSONDecodeError"):
        tuning.load_table("sm_0", tmp_path)
