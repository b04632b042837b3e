"""What becomes of a result whose callers are gone, and locks of names: one per name while it is needed."""

from __future__ import annotations

import asyncio
import gc

import pytest

from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.single_flight import NameLocks, SingleFlight
from tests.virtual_time import runs


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
@runs
async def test_callers_cancelled_with_the_answer_at_hand_abandon_it(count: int) -> None:
    flight = Flight()
    callers = await flight.callers(count)
    # After what hands the result to the callers, and before they run again.
    for caller in callers:
        flight.task.add_done_callback(lambda _, caller=caller: caller.cancel())
    flight.may_end.set()
    ended = await asyncio.gather(*callers, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended)
    assert (len(flight.flights._flights), flight.abandoned) == (0, ["adapter"])


@runs
async def test_answer_that_one_of_two_callers_takes_is_kept() -> None:
    flight = Flight()
    first, second = await flight.callers(2)
    flight.task.add_done_callback(lambda _: first.cancel())
    flight.may_end.set()
    assert await second == "adapter"
    assert first.cancelled()
    assert flight.abandoned == []


@runs
async def test_callers_cancelled_before_the_end_abandon_the_answer() -> None:
    flight = Flight()
    callers = await flight.callers(2)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    assert flight.abandoned == []  # the task goes on
    flight.may_end.set()
    await flight.task
    await asyncio.sleep(0)
    assert flight.abandoned == ["adapter"]


@runs
async def test_callers_of_a_given_up_task_get_an_error() -> None:
    flight = Flight()
    first, second = await flight.callers(2)
    flight.flights.give_up()
    second.cancel()
    with pytest.raises(SourceUnavailable, match="an engine that has ended"):
        await first
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (len(flight.flights._flights), flight.abandoned) == (0, [])


# --- locks of names


@runs
async def test_a_name_has_a_lock_only_while_it_is_held() -> None:
    locks = NameLocks()
    async with locks["sql"]:
        assert locks["sql"] is locks["sql"]
        assert locks["sql"].locked()
        assert not locks["other"].locked()
        gc.collect()
        assert len(locks) == 1
    gc.collect()
    assert len(locks) == 0


def test_of_many_at_once_each_name_lets_one_in() -> None:
    """One that waits gives up; the lock stays."""
    locks = NameLocks()
    order: list[str] = []

    async def visit(name: str, visitor: str) -> None:
        async with locks[name]:
            order.append(visitor)
            await asyncio.sleep(0)
            gc.collect()
            order.append(visitor)

    async def run() -> None:
        tasks = [asyncio.create_task(visit("sql", visitor)) for visitor in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a", "a", "c", "c"]
        await asyncio.gather(*(visit("chat", "x"), visit("sql", "y"), visit("sql", "z")))
        assert sorted(order[4:6]) == ["x", "y"], "names do not wait for each other"
        assert order[-2:] == ["z", "z"]

    asyncio.run(run())
    gc.collect()  # the traceback of the one that gave up held the lock until here
    assert len(locks) == 0
