"""Ends of loads that are reported early, over a real socket."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

from lora_plugins.errors import InvalidAdapter
from lora_plugins.scheduler.early_load_reports import EarlyLoadReports, send_early
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import AdapterSpec, Evict, Failed, Load, Loaded, ReportAddress
from lora_plugins.scheduler.planner import Planner
from lora_plugins.scheduler.policies import make_policy

LONGEST_S = 60


def asked(early_reports: EarlyLoadReports, *, is_urgent: bool = True) -> tuple[Planner, Load, Future[Any]]:
    planner = Planner(1, 1, HostCache(None, 2, make_policy("lru")))
    future = planner.load(AdapterSpec(1, "sql", "/sql"), time.monotonic(), is_urgent=is_urgent)
    commands = early_reports.with_addresses([*planner.plan(time.monotonic()).commands, Evict(9)], planner)
    assert commands[1] == Evict(9)
    (load, _) = commands
    assert isinstance(load, Load)
    return planner, load, future


@pytest.mark.parametrize("workers", [1, 3])
def test_a_load_ends_with_the_last_workers_report(workers: int) -> None:
    planner, load, future = asked(EarlyLoadReports(workers))
    assert load.early_report_to is not None
    for number in range(workers):
        assert not future.done()
        send_early(load.early_report_to, Loaded(load.job, 100 + number, True, 0.5))
    assert future.result(LONGEST_S) == Loaded(load.job, 99 + workers, True, 0.5)
    planner.reported([Loaded(load.job, 100, True, 0.5)], time.monotonic())
    planner.plan(time.monotonic())  # answers the call once more, which changes nothing
    assert planner.adapters[1].calls == []


def test_any_workers_failure_ends_the_load() -> None:
    _, load, future = asked(EarlyLoadReports(2))
    assert load.early_report_to is not None
    send_early(load.early_report_to, Failed(load.job, InvalidAdapter("truncated")))
    assert isinstance(future.exception(LONGEST_S), InvalidAdapter)


def test_only_urgent_loads_are_reported_early() -> None:
    _, load, _ = asked(EarlyLoadReports(1), is_urgent=False)
    assert load.early_report_to is None


def test_wrong_keys_jobs_and_types_are_ignored() -> None:
    _, load, future = asked(EarlyLoadReports(1))
    assert load.early_report_to is not None
    send_early(ReportAddress(load.early_report_to.address, b"another key"), Loaded(load.job, 1, True, 0.1))
    send_early(load.early_report_to, Loaded(load.job + 7, 1, True, 0.1))
    send_early(load.early_report_to, "nonsense")  # type: ignore[arg-type]
    assert not future.done()
    send_early(load.early_report_to, Loaded(load.job, 1, True, 0.1))
    assert future.result(LONGEST_S).size_bytes == 1


def test_a_report_without_a_listener_is_dropped() -> None:
    _, load, future = asked(EarlyLoadReports(1))
    assert load.early_report_to is not None
    said = Loaded(load.job, 1, True, 0.1)
    send_early(ReportAddress("\0lora-plugins-nobody", load.early_report_to.key), said)
    assert not future.done()
    send_early(load.early_report_to, said)
    assert future.result(LONGEST_S).size_bytes == 1
