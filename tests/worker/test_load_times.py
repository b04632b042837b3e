"""What a worker knows of its steps and loads, and which loads it therefore does within a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lora_plugins.scheduler.messages import Failed, Load, Loaded
from lora_plugins.worker import background
from lora_plugins.worker.background import LONGEST_WITHOUT_BATCH_S, LoadTimes
from tests.worker.small_model import Adapter, put, wrong_answers

Make = Callable[..., Any]


class Clock:
    """Stands still but for `pass_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1.0
        for name in ("perf_counter", "thread_time"):
            monkeypatch.setattr(background.time, name, lambda: self.now_s)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def load(times: LoadTimes, clock: Clock, size_bytes: int, seconds: float) -> None:
    with times.of_load(size_bytes):
        clock.pass_s(seconds)


def step(times: LoadTimes, clock: Clock, seconds: float) -> None:
    times.begin_step(has_batch=True)
    times.begin_batch()
    clock.pass_s(seconds)
    times.end_batch()


def test_loads_take_a_fixed_time_and_one_by_byte(clock: Clock) -> None:
    times = LoadTimes()
    assert times.expected_s(100) is None, "none has been measured"
    for size in (100, 300, 200, 1000):
        load(times, clock, size, 0.002 + size * 1e-5)
    assert times.expected_s(400) == pytest.approx(0.006)
    assert times.expected_s(0) is None, "its size is not known"


@pytest.mark.parametrize(
    ("loads", "size_bytes", "expected_s"),
    [
        ([(100, 0.01)] * 3, 100, 0.01),
        ([(100, 0.01)] * 3, 1000, 0.1),  # all of one size: the time by byte is bounded
        ([(100, 1.0), *[(100, 0.01)] * 60], 100, 0.01),  # later ones count more
    ],
)
def test_later_loads_of_one_size_say_how_long_others_take(
    clock: Clock, loads: list[tuple[int, float]], size_bytes: int, expected_s: float
) -> None:
    times = LoadTimes()
    for size, seconds in loads:
        load(times, clock, size, seconds)
    assert times.expected_s(size_bytes) == pytest.approx(expected_s, rel=0.3)


def test_odd_and_failed_measurements_promise_nothing_impossible(clock: Clock) -> None:
    times = LoadTimes()
    with pytest.raises(OSError, match="gone"), times.of_load(100):
        raise OSError("gone")
    assert times.expected_s(100) is None, "a load that fails is not measured"
    load(times, clock, 100, 0.5)
    load(times, clock, 1000, 0.1)
    assert 0 < times.expected_s(100) <= times.expected_s(1000)  # type: ignore[operator]


def test_what_is_taken_is_shorter_than_the_step(clock: Clock) -> None:
    times = LoadTimes()
    load(times, clock, 100, 0.004)
    step(times, clock, 0.01)
    times.begin_step(has_batch=True)
    assert [times.take(100) for _ in range(4)] == [True, True, False, False]
    times.begin_step(has_batch=True)
    assert not times.take(300)
    assert times.take(100), "of what is left"


def test_without_a_batch_a_short_load_holds_nobody_up(clock: Clock) -> None:
    times = LoadTimes()
    load(times, clock, 100, 0.9 * LONGEST_WITHOUT_BATCH_S)
    times.begin_step(has_batch=True)
    assert not times.take(100), "how long a step takes is not known"
    times.begin_step(has_batch=False)
    assert times.take(100)
    assert not times.take(100)


def test_neither_commands_nor_empty_steps_are_measured(clock: Clock) -> None:
    times = LoadTimes()
    load(times, clock, 100, 0.004)
    times.begin_step(has_batch=True)
    clock.pass_s(100)
    times.begin_batch()
    clock.pass_s(0.003)
    times.end_batch()
    times.end_batch()
    times.begin_step(has_batch=False)
    clock.pass_s(100)
    times.end_batch()
    times.begin_step(has_batch=True)
    assert not times.take(100)


# --- on a worker ---


def job(manager: Any, adapter: Adapter, number: int, size_bytes: int, *, has_batch: bool) -> None:
    spec = replace(adapter.spec, size_bytes=size_bytes)
    manager.begin_step([Load(spec, adapter.adapter_id, number)], has_batch=has_batch)


@pytest.fixture
def manager(make_manager: Make, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch) -> Any:
    """It knows that loads take no time to speak of, and steps a second; and notes who reads."""
    manager = make_manager()
    manager.readers = []
    read = manager.jobs._read

    def noting(*args: Any) -> Any:
        manager.readers.append(threading.current_thread())
        return read(*args)

    manager.jobs._read = noting
    with manager.jobs.times.of_load(10_000):
        pass
    manager.begin_step([], has_batch=True)
    manager.jobs.times._began_at -= 1.0
    assert manager.reports() == []
    return manager


@pytest.mark.parametrize("has_batch", [True, False])
def test_a_short_load_is_done_before_the_batch(manager: Any, adapters: list[Adapter], has_batch: bool) -> None:
    job(manager, adapters[0], 1, 10_000, has_batch=has_batch)
    assert manager.list_adapters() == {1}
    assert manager.readers == [threading.current_thread()]
    (report,) = manager.reports()
    assert isinstance(report, Loaded)
    assert report.job == 1
    put(manager, adapters[0], 1)
    assert wrong_answers(manager, adapters[0]) == []


@pytest.mark.parametrize("why", ["of unknown size", "longer than a step", "not here", "another is under way"])
def test_other_loads_are_done_in_the_background(manager: Any, adapters: list[Adapter], why: str) -> None:
    size_bytes = {"of unknown size": 0, "longer than a step": 10**15}.get(why, 10_000)
    if why == "another is under way":
        manager.jobs._running.add(99)
    if why == "not here":
        adapters[0].vanish()
    job(manager, adapters[0], 1, size_bytes, has_batch=True)
    manager.jobs._running.discard(99)
    manager.jobs.finish()
    assert threading.current_thread() not in manager.readers
    (report,) = manager.reports()
    assert isinstance(report, Failed if why == "not here" else Loaded)


def test_a_broken_adapter_within_the_step_is_isolated(manager: Any, adapters: list[Adapter]) -> None:
    (adapters[0].path / "adapter_model.safetensors").write_bytes(b"nothing")
    specs = [replace(adapter.spec, size_bytes=10_000) for adapter in adapters[:2]]
    manager.begin_step([Load(specs[0], 1, 1), Load(specs[1], 2, 2)], has_batch=True)
    failed, loaded = manager.reports()
    assert isinstance(failed, Failed)
    assert (failed.job, failed.error.code, failed.error.adapter) == (1, "L005", "adapter-1")
    assert isinstance(loaded, Loaded)
    assert manager.list_adapters() == {2}
    assert set(manager.readers) == {threading.current_thread()}


def test_what_ends_the_process_ends_it_during_a_load_too(manager: Any, adapters: list[Adapter]) -> None:
    """Engine and workers raise SystemExit in a signal's handler."""

    def read(*_: Any) -> Any:
        raise SystemExit

    manager.jobs._read = read
    with pytest.raises(SystemExit):
        job(manager, adapters[0], 1, 10_000, has_batch=True)
