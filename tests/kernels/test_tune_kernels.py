"""The search for a tuning table, with a score that needs no GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks import tune_kernels
from lora_plugins.kernels import tuning
from lora_plugins.kernels.tuning import Plan

DEFAULT = tuning.read_table(tuning.PACKAGED / "default.json")


def score_of(plan: Plan) -> tune_kernels.Score:
    """Smallest at 4 splits, 64 columns out, and where two launches are one."""
    return lambda other: (
        abs(other.shrink.splits - 4) + abs(other.expand.columns - 64) / 64 + (2.0 if other.fused is None else 1.0)
    )


def test_it_finds_the_best_of_each_part_and_writes_it(tmp_path: Path) -> None:
    table = tune_kernels.tune(DEFAULT, score_of, seconds=60)
    assert [plan.max_rows for plan in table.plans] == sorted({plan.max_rows for plan in DEFAULT.plans})
    assert {plan.shrink.splits for plan in table.plans} == {4}
    assert {plan.expand.columns for plan in table.plans} == {64}
    assert [plan.fused is not None for plan in table.plans] == [plan.max_rows <= 64 for plan in table.plans]
    (tmp_path / "sm_0.json").write_text(json.dumps({"made": {}, **tuning.as_json(table)}))
    assert tuning.load_table("sm_0", tmp_path).plans == table.plans


def test_every_candidate_is_one_that_a_table_may_hold(tmp_path: Path) -> None:
    for plan in DEFAULT.plans:
        for candidates in (tune_kernels.shrinks, tune_kernels.expands, tune_kernels.fusions):
            for candidate in candidates(plan):
                if candidates is tune_kernels.fusions or candidate.fused is None:
                    path = tmp_path / "sm_0.json"
                    whole = tuning.Table("", (candidate, DEFAULT.plans[-1]))
                    path.write_text(json.dumps(tuning.as_json(whole)))
                    assert tuning.read_table(path).plans[0] == candidate


def test_without_time_left_the_default_stays() -> None:
    plan = DEFAULT.plans[-1]
    found, _ = tune_kernels.best(plan, tune_kernels.shrinks(plan), score_of(plan), until=time.monotonic() - 1)
    assert found is plan
