"""What becomes of a result whose callers are gone."""

from __future__ import annotations

import asyncio

import pytest

from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.single_flight import SingleFlight


class Flight:
    """One key, whose task ends when it is told to."""

    def __init__(self) -> None:
        self.abandoned: list[str] = []
        self.flights: SingleFlight[str, str] = SingleFlight(self.abandoned.append)
        self.may_end = asyncio.Event()
        self.task: asyncio.Task[str]

    async def _work(self) -> str:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        await self.may_end.wait()
        return "adapter"

    async def callers(self, count: int) -> list[asyncio.Task[str]]:
        callers = [asyncio.create_task(self.flights.run("key", self._work)) for _ in range(count)]
        await asyncio.sleep(0.01)
        return callers


@pytest.mark.parametrize("count", [1, 3])
def test_callers_cancelled_with_the_answer_at_hand_abandon_it(count: int) -> None:
    async def main() -> list[str]:
        flight = Flight()
        callers = await flight.callers(count)
        # After what hands the result to the callers, and before they run again.
        for caller in callers:
            flight.task.add_done_callback(lambda _, caller=caller: caller.cancel())
        flight.may_end.set()
        ended = await asyncio.gather(*callers, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)
        assert len(flight.flights) == 0
        return flight.abandoned

    assert asyncio.run(main()) == ["adapter"]


def test_answer_that_one_of_two_callers_takes_is_kept() -> None:
    async def main() -> list[str]:
        flight = Flight()
        first, second = await flight.callers(2)
        flight.task.add_done_callback(lambda _: first.cancel())
        flight.may_end.set()
        assert await second == "adapter"
        assert first.cancelled()
        return flight.abandoned

    assert asyncio.run(main()) == []


def test_callers_cancelled_before_the_end_abandon_the_answer() -> None:
    async def main() -> list[str]:
        flight = Flight()
        callers = await flight.callers(2)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        assert flight.abandoned == []  # the task goes on
        flight.may_end.set()
        await flight.task
        await asyncio.sleep(0)
        return flight.abandoned

    assert asyncio.run(main()) == ["adapter"]


def test_callers_of_a_given_up_task_get_an_error() -> None:
    async def main() -> list[str]:
        flight = Flight()
        first, second = await flight.callers(2)
        flight.flights.give_up()
        second.cancel()
        with pytest.raises(SourceUnavailable, match="an engine that has ended"):
            await first
        with pytest.raises(asyncio.CancelledError):
            await second
        assert len(flight.flights) == 0
        return flight.abandoned

    assert asyncio.run(main()) == []
