"""Limits by the minute: what is let in never exceeds a minute's worth and what has come back since."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import combinations_with_replacement
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.errors import RateExceeded
from lora_plugins.lifecycle.principal_limits import Rate, Rates


@given(st.integers(1, 300), st.lists(st.tuples(st.floats(0, 90), st.integers(1, 40)), max_size=30))
def test_requests_never_exceed_the_limit(per_minute: int, arrivals: list[tuple[float, int]]) -> None:
    clock = SimpleNamespace(now_s=100.0)
    rates, rate = Rates(lambda: clock.now_s), Rate("a", requests_per_minute=per_minute)
    admitted: Counter[float] = Counter()
    for pause_s, count in arrivals:
        clock.now_s += pause_s
        for _ in range(count):
            unit, wait_s = rates.wait(rate)
            assert (unit, wait_s > 0) in {("", False), ("requests", True)}
            admitted[clock.now_s] += not wait_s
    for first, last in combinations_with_replacement(admitted, 2):
        within = sum(count for at_s, count in admitted.items() if first <= at_s <= last)
        assert within <= per_minute * (1 + (last - first) / 60) + 1e-6


@given(st.integers(1, 5000), st.lists(st.integers(0, 3000), min_size=1, max_size=20))
def test_a_wait_is_as_long_as_it_must_be(per_minute: int, answers: list[int]) -> None:
    clock = SimpleNamespace(now_s=100.0)
    rates, rate = Rates(lambda: clock.now_s), Rate("a", tokens_per_minute=per_minute)
    spent = 0
    for tokens in answers:
        unit, wait_s = rates.wait(rate)
        if wait_s:
            assert unit == "tokens"
            clock.now_s += wait_s - 1
            assert rates.wait(rate) == ("tokens", 1)
            clock.now_s += 1
            assert rates.wait(rate) == ("", 0)
        rates.spend(rate, tokens)
        spent += tokens
        assert spent <= per_minute * (1 + (clock.now_s - 100) / 60) + max(answers)


def test_a_refused_request_takes_nothing_and_says_when() -> None:
    clock = SimpleNamespace(now_s=100.0)
    rates, rate, other = Rates(lambda: clock.now_s), Rate("a", 1, 10), Rate("b", 1)
    asyncio.run(rates.admit(rate))
    for _ in range(5):
        with pytest.raises(
            RateExceeded, match="more requests of a than its limit; expected 1 requests a minute"
        ) as refused:
            asyncio.run(rates.admit(rate))
        assert refused.value.retry_after_s == 60
    asyncio.run(rates.admit(other))
    clock.now_s += 60
    rates.spend(rate, 30)
    with pytest.raises(RateExceeded, match="more tokens of a") as refused:
        asyncio.run(rates.admit(rate))
    assert refused.value.retry_after_s == 126  # 21 tokens at ten a minute
