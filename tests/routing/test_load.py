"""The load estimator against sums over time, and when an adapter gets replicas and loses them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.routing import load
from lora_plugins.routing.load import LoadEstimator, ReplicaLoad

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=40)  # starts or ends, after tenths of a second


class Naive:
    """Adds up every tenth of a second."""

    def __init__(self, smoothing):
        self.in_flight, self.tenths, self.sum, self.average, self.smoothing = 0, 0, 0, 0.0, smoothing

    def pass_tenths(self, count):
        for _ in range(count):
            self.sum += self.in_flight
            self.tenths += 1
            if self.tenths % 10 == 0:
                self.average += self.smoothing * (self.sum / 10 - self.average)
                self.sum = 0


@given(STEPS)
def test_average_is_that_of_sums_over_time(steps):
    estimator, naive = LoadEstimator(1), Naive(load.SMOOTHING)
    now = 0
    for starts, tenths in steps:
        now += tenths
        naive.pass_tenths(tenths)
        if starts or not naive.in_flight:
            estimator.routed("sql", now / 10)
            naive.in_flight += 1
        else:
            estimator.completed("sql", now / 10)
            naive.in_flight -= 1
        if now % 10:  # at the end of a bucket it is either's
            estimator.replicas("sql", now / 10)
            assert estimator._demands["sql"].average == pytest.approx(naive.average, abs=1e-6)


def sustained(estimator, requests, from_s, to_s):
    for _ in range(requests):
        estimator.routed("sql", from_s)
    for _ in range(requests):
        estimator.completed("sql", to_s)


def test_sustained_load_gets_replicas_and_a_burst_does_not():
    estimator = LoadEstimator(4)
    sustained(estimator, 16, 0.0, 0.3)
    assert estimator.replicas("sql", 1.0) == 1
    for _ in range(16):
        estimator.routed("sql", 2.0)
    assert estimator.replicas("sql", 30.0) == 4


def test_fewer_replicas_only_after_cool_down():
    estimator = LoadEstimator(4, cool_down_s=60.0)
    sustained(estimator, 16, 0.0, 30.0)
    assert estimator.replicas("sql", 30.0) == 4
    assert estimator.replicas("sql", 50.0) == 4  # fewer would do from here on
    assert estimator.replicas("sql", 109.0) == 4
    assert estimator.replicas("sql", 111.0) == 1


def test_cool_down_begins_again_when_load_returns():
    estimator = LoadEstimator(4, cool_down_s=60.0)
    sustained(estimator, 16, 0.0, 30.0)
    assert [estimator.replicas("sql", at) for at in (30.0, 50.0)] == [4, 4]
    sustained(estimator, 16, 60.0, 90.0)
    assert [estimator.replicas("sql", at) for at in (90.0, 111.0, 150.0)] == [4, 4, 4]


def test_adapters_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(load, "REMEMBERED", 5)
    estimator = LoadEstimator(1)
    for number in range(20):
        estimator.routed(f"adapter-{number}", float(number))
    assert len(estimator._demands) == 5
    assert estimator.replicas("adapter-0", 30.0) == 1
    estimator.completed("adapter-0", 30.0)


def test_requests_of_other_routers_count_once():
    loads = ReplicaLoad()
    loads.join("a")
    assert loads.routed("a")
    loads.reported("a", 5)
    assert (loads.of("a"), loads.total) == (5, 5)
    loads.reported("a", 1)
    assert (loads.of("a"), loads.total) == (1, 1)
    loads.leave("a")
    loads.completed("a")
    assert (loads.of("a"), loads.total, loads.routed("a")) == (0, 0, False)


def test_requests_that_ended_since_a_report_are_not_of_others():
    loads = ReplicaLoad()
    loads.join("a")
    for _ in range(5):
        loads.routed("a")
    loads.reported("a", 5)
    for _ in range(5):
        loads.completed("a")
    loads.reported("a", 5)
    assert (loads.of("a"), loads.total) == (0, 0)
    loads.reported("a", 5)
    loads.reported("a", 5)
    assert (loads.of("a"), loads.total) == (5, 5)
