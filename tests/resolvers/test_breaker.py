"""When a source's breaker opens, what it admits then, and what closes it."""

from __future__ import annotations

import asyncio

import pytest

from lora_plugins.errors import LoRAPluginsError, SourceUnavailable
from lora_plugins.events import BreakerClosed, BreakerOpened, Event, Events
from lora_plugins.resolvers.breaker import Breaker, BreakerLimits
from lora_plugins.resolvers.sources.remote_failures import Failure, FailureKind
from lora_plugins.resolvers.sources.retries import NoAnswer
from tests.resolvers.fakes import Clock

BUSY = Failure(FailureKind.BUSY).as_error("an object store")
SILENCE = NoAnswer("no complete answer within 30 s")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def breaker(clock: Clock, events: list[Event]) -> Breaker:
    return Breaker(BreakerLimits(failures=3, retry_s=2.0), "s3", Events(events.append), clock)


def opened_by(breaker: Breaker, began_at: float, error: SourceUnavailable, of: str | None = None) -> bool:
    """Whether this failure opens the breaker."""
    was_open = breaker.is_open
    breaker.failed(began_at, error, of)
    return breaker.is_open and not was_open


def test_failures_in_a_row_open_it_once(breaker: Breaker, clock: Clock, events: list[Event]) -> None:
    assert [opened_by(breaker, clock(), BUSY) for _ in range(5)] == [False, False, True, False, False]
    assert events == [BreakerOpened("s3", BUSY)]


def test_an_answer_between_failures_keeps_it_closed(breaker: Breaker, clock: Clock, events: list[Event]) -> None:
    for _ in range(5):
        assert not opened_by(breaker, clock(), BUSY)
        assert not opened_by(breaker, clock(), BUSY)
        clock.now_s += 1
        breaker.answered()
    assert events == []


@pytest.mark.parametrize("error", [SILENCE, Failure(FailureKind.TIMEOUT).as_error("an object store")])
def test_one_look_up_without_any_answer_opens_it(breaker: Breaker, clock: Clock, error: SourceUnavailable) -> None:
    assert opened_by(breaker, clock(), error)


def test_failures_of_one_adapter_count_once(breaker: Breaker, clock: Clock) -> None:
    assert not any(opened_by(breaker, clock(), BUSY, "sql") for _ in range(10))
    assert [opened_by(breaker, clock(), BUSY, of) for of in ("chat", "sql", "poet")] == [False, False, True]


def test_silence_opens_only_a_breaker_that_minds_it(clock: Clock) -> None:
    breaker = Breaker(BreakerLimits(failures=3, by_silence=False), clock=clock)
    assert [opened_by(breaker, clock(), SILENCE) for _ in range(3)] == [False, False, True]


def test_a_late_failure_after_an_answer_opens_nothing(breaker: Breaker, clock: Clock) -> None:
    began_at = clock()
    clock.now_s += 30
    breaker.answered()
    assert [opened_by(breaker, began_at, SILENCE) for _ in range(10)] == [False] * 10


def test_an_open_breaker_admits_one_look_up_at_a_time(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(clock(), SILENCE)
    admitted = []
    for _ in range(40):
        admitted.append(breaker.admits())
        clock.now_s += 0.5
    assert admitted == [False] * 4 + [True, False, False, False] * 9


def test_the_first_answer_closes_it_and_says_the_time(breaker: Breaker, clock: Clock, events: list[Event]) -> None:
    breaker.failed(clock(), SILENCE)
    clock.now_s += 7
    breaker.answered()
    assert not breaker.is_open
    breaker.answered()
    assert events == [BreakerOpened("s3", SILENCE), BreakerClosed("s3", 7)]
    assert not opened_by(breaker, clock(), BUSY), "the failures before the answer count no more"


@pytest.mark.parametrize("kind", FailureKind)
def test_a_failure_is_an_outage_where_a_retry_may_help(kind: FailureKind) -> None:
    assert is_outage(Failure(kind).as_error("an object store")) == kind.is_retryable


def test_an_error_about_one_directory_is_no_outage() -> None:
    assert not is_outage(SourceUnavailable("permission denied"))


def is_outage(error: LoRAPluginsError) -> bool:
    """Whether an error opens a breaker that one failure opens."""
    breaker = Breaker(BreakerLimits(failures=1))

    async def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        asyncio.run(breaker.judged(fail()))
    return breaker.is_open
