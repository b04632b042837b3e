"""The search for a tuning table, with a score that needs no GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks.gpu import tune as search
from lora_plugins.kernels import tuning
from lora_plugins.kernels.tuning import Plan
from tests.kernels.test_tuning import assert_compilable

DEFAULT = tuning.read_table(tuning.PACKAGED / "default.json")


def score_of(plan: Plan) -> search.Score:
    """Smallest at 4 splits, 64 columns out, and where two launches are one."""
    return lambda other: (
        abs(other.shrink.splits - 4) + abs(other.expand.columns - 64) / 64 + (2.0 if other.fused is None else 1.0)
    )


def test_it_finds_the_best_of_each_part_and_writes_it(tmp_path: Path) -> None:
    table = search.tune(DEFAULT, score_of, seconds=60)
    limits = sorted({plan.max_rows for plan in DEFAULT.plans})
    wide = (search.NARROW_IN, tuning.ANY)
    assert [(plan.max_rows, plan.max_in) for plan in table.plans] == [(rows, n_in) for rows in limits for n_in in wide]
    for plan in table.plans:
        narrow = plan.max_in < tuning.ANY
        splits = 2 if plan.max_rows > 512 else 8 if plan.max_rows <= 64 and not narrow else 4  # the nearest there is
        assert plan.shrink.splits == splits
        assert (plan.fused is not None) is (plan.max_rows <= 64 and narrow)
    assert {plan.expand.columns for plan in table.plans} == {64}
    (tmp_path / "sm_0.json").write_text(json.dumps({"made": {}, **tuning.as_json(table)}))
    assert tuning.read_table(tmp_path / "sm_0.json").plans == table.plans


def test_every_candidate_is_one_that_a_table_may_hold() -> None:
    for plan in DEFAULT.plans:
        for candidates in (search.shrinks, search.expands, search.fusions):
            for candidate in candidates(plan):
                if candidates is search.fusions or candidate.fused is None:
                    assert_compilable(tuning.Table("", (candidate, DEFAULT.plans[-1])))


def test_without_time_left_the_default_stays() -> None:
    plan = DEFAULT.plans[-1]
    found, _ = search.best(plan, search.shrinks(plan), score_of(plan), until=time.monotonic() - 1)
    assert found is plan


def test_a_run_that_is_cut_off_leaves_the_plans_found() -> None:
    kept: list[tuple[tuning.Table, int]] = []
    ahead: list[int] = []
    search.tune(
        DEFAULT,
        score_of,
        seconds=60,
        compile_ahead=lambda plans: ahead.append(len(plans)),
        keep=lambda table, found: kept.append((table, found)),
    )
    start = search.starting_plans(DEFAULT)
    assert [found for _, found in kept] == list(range(1, len(start) + 1))
    for table, found in kept:
        assert table.plans[found:] == start[found:]
        assert table.plans[0].expand.columns == 64
    assert ahead[0] == sum(len(list(search.shrinks(plan))) for plan in start)  # all of them before any is timed
    fused = sum(plan.max_rows <= 64 and plan.max_in < tuning.ANY for plan in start)
    assert len(ahead) == 1 + 2 * len(start) + fused


def test_starting_plans_are_the_defaults_for_both_widths() -> None:
    for plan in search.starting_plans(DEFAULT):
        n_in = 4096 if plan.max_in < tuning.ANY else 14336
        found = DEFAULT.plan(min(plan.max_rows, 1 << 20), n_in, 4096)
        assert (plan.chunk, plan.shrink, plan.expand, plan.fused) == (
            found.chunk,
            found.shrink,
            found.expand,
            found.fused,
        )
        assert {case.n_in <= search.NARROW_IN for case in search.cases_of(plan)} == {n_in == 4096}


def test_one_adapter_on_a_wide_input_is_split_far() -> None:
    few = DEFAULT.plan(16, 14336, 4096)
    assert few.shrink.splits > DEFAULT.plan(16, 4096, 4096).shrink.splits
    assert few.shrink.splits * few.shrink.columns <= 14336  # no program without columns


def test_kernels_to_compile_come_once_for_each_kind() -> None:
    plan = search.starting_plans(DEFAULT)[2]
    once = search.compile_jobs([plan])
    assert len(once) == len({len(case.widths) for case in search.cases_of(plan)})
    assert len(search.compile_jobs([plan, plan])) == len(once)
