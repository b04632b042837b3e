"""Ends of loads that are said at once, over a real socket."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

from lora_plugins.errors import InvalidAdapter
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import AdapterSpec, Evict, Failed, Load, Loaded, Notify
from lora_plugins.scheduler.planner import Planner
from lora_plugins.scheduler.policies import make_policy
from lora_plugins.vllm_patches.notices import Notices
from lora_plugins.worker.notices import send

LONGEST_S = 60


def asked(notices: Notices, *, is_urgent: bool = True) -> tuple[Planner, Load, Future[Any]]:
    planner = Planner(1, 1, HostCache(None, 2, make_policy("lru")))
    future = planner.load(AdapterSpec(1, "sql", "/sql"), time.monotonic(), is_urgent=is_urgent)
    commands = notices.asked_for([*planner.plan(time.monotonic()).commands, Evict(9)], planner)
    assert commands[1] == Evict(9)
    (load, _) = commands
    assert isinstance(load, Load)
    return planner, load, future


@pytest.mark.parametrize("workers", [1, 3])
def test_a_load_ends_when_the_last_worker_has_said_so(workers: int) -> None:
    planner, load, future = asked(Notices(workers))
    assert load.notify is not None
    for number in range(workers):
        assert not future.done()
        send(load.notify, Loaded(load.job, 100 + number, True, 0.5))
    assert future.result(LONGEST_S) == Loaded(load.job, 99 + workers, True, 0.5)
    planner.reported([Loaded(load.job, 100, True, 0.5)], time.monotonic())
    planner.plan(time.monotonic())  # answers the call once more, which nobody minds
    assert planner.adapters[1].calls == []


def test_a_failure_is_said_by_whichever_worker() -> None:
    _, load, future = asked(Notices(2))
    assert load.notify is not None
    send(load.notify, Failed(load.job, InvalidAdapter("truncated")))
    assert isinstance(future.exception(LONGEST_S), InvalidAdapter)


def test_only_what_is_urgent_is_said_twice() -> None:
    _, load, _ = asked(Notices(1), is_urgent=False)
    assert load.notify is None


def test_strangers_and_nonsense_are_not_heard() -> None:
    _, load, future = asked(Notices(1))
    assert load.notify is not None
    send(Notify(load.notify.address, b"another key"), Loaded(load.job, 1, True, 0.1))
    send(load.notify, Loaded(load.job + 7, 1, True, 0.1))
    send(load.notify, "nonsense")  # type: ignore[arg-type]
    assert not future.done()
    send(load.notify, Loaded(load.job, 1, True, 0.1))
    assert future.result(LONGEST_S).size_bytes == 1


def test_a_reader_that_has_gone_stops_nobody() -> None:
    send(Notify("\0lora-plugins-nobody", b"key"), Loaded(1, 1, True, 0.1))
