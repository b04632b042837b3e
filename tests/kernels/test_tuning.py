"""Tuning tables: what is read, which plan is taken, what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

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


def test_an_architecture_without_a_table_has_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default, own = (write(tmp_path / f"{name}.json", {"plans": [PLAN]}) for name in ("default", "sm_90"))
    monkeypatch.setattr(tuning, "PACKAGED", tmp_path)
    assert tuning.load_table("sm_90").origin == str(own)
    assert tuning.load_table("sm_0").origin == str(default)


def assert_compilable(table: tuning.Table) -> None:
    assert table.dense_min_rows is None or table.dense_min_rows > 0
    assert table.plans[-1].holds(tuning.ANY, tuning.ANY, tuning.ANY), "the last one has no limits"
    for plan in table.plans:
        assert plan.chunk in tuning.CHUNK_SIZES
        assert plan.fused is None or plan.chunk == tuning.CHUNK_SIZES[0]
        for tile in filter(None, (plan.shrink, plan.expand, plan.fused)):
            for name, value in asdict(tile).items():
                assert value >= (16 if name in {"rank", "columns", "columns_in", "columns_out"} else 1)  # tensor cores
                assert name in {"splits", "rank_programs", "stages"} or value & (value - 1) == 0  # a power of 2


@pytest.mark.parametrize("path", sorted(tuning.PACKAGED.glob("*.json")), ids=lambda path: path.stem)
def test_packaged_tables_hold_what_kernels_can_be_compiled_with(path: Path) -> None:
    assert_compilable(tuning.read_table(path))
