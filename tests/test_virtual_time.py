"""The clock that other tests stand on."""

from __future__ import annotations

import asyncio
import time
from types import BuiltinFunctionType

import pytest

from tests.virtual_time import run_in_virtual_time


def test_wait_takes_exactly_its_time() -> None:
    async def day() -> tuple[float, float]:
        began, counted = time.monotonic(), time.perf_counter()
        await asyncio.gather(*(asyncio.sleep(hours * 3600.0) for hours in (1, 24, 7)))
        await asyncio.to_thread(sum, range(1_000_000))
        return time.monotonic() - began, time.perf_counter() - counted

    assert run_in_virtual_time(day(), longest_s=1e6) == (86_400.0, 86_400.0)
    assert isinstance(time.monotonic, BuiltinFunctionType), "the real one is back"


def test_earliest_timer_fires_first() -> None:
    async def order() -> list[int]:
        came: list[int] = []

        async def come(number: int, after_s: float) -> None:
            await asyncio.sleep(after_s)
            time.sleep(0.01 * after_s)  # whoever is slow, on whatever machine
            came.append(number)

        await asyncio.gather(*(come(number, after_s) for number, after_s in enumerate((0.003, 0.001, 0.002))))
        return came

    assert run_in_virtual_time(order()) == [1, 2, 0]


def test_endless_wait_fails() -> None:
    async def for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        run_in_virtual_time(for_ever())


def test_exception_of_a_thread_is_raised() -> None:
    async def divide() -> None:
        await asyncio.to_thread(divmod, 1, 0)

    with pytest.raises(ZeroDivisionError):
        run_in_virtual_time(divide())
