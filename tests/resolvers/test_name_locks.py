"""One lock per name while it is needed, and none afterwards."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

from lora_plugins.resolvers.single_flight import NameLocks


def test_a_name_has_a_lock_only_while_it_is_held():
    async def run() -> None:
        locks = NameLocks()
        async with locks["sql"]:
            assert locks["sql"] is locks["sql"]
            assert locks["sql"].locked()
            assert not locks["other"].locked()
            gc.collect()
            assert len(locks) == 1
        gc.collect()
        assert len(locks) == 0

    asyncio.run(run())


def test_an_awaited_lock_is_the_held_one():
    locks = NameLocks()
    order: list[str] = []

    async def hold(name: str) -> None:
        async with locks["sql"]:
            order.append(name)
            await asyncio.sleep(0)
            gc.collect()
            order.append(name)

    async def run() -> None:
        tasks = [asyncio.create_task(hold(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()  # one that waits gives up; the lock stays
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    gc.collect()  # the traceback of the one that gave up held the lock until here
    assert order == ["a", "a", "c", "c"]
    assert len(locks) == 0


def test_of_many_at_once_each_name_lets_one_in():
    async def run() -> None:
        locks = NameLocks()
        inside: Counter[str] = Counter()
        visits = 0

        async def visit(name: str) -> None:
            nonlocal visits
            async with locks[name]:
                inside[name] += 1
                assert inside[name] == 1
                await asyncio.sleep(0)
                inside[name] -= 1
                visits += 1

        await asyncio.gather(*(visit(f"name-{number % 7}") for number in range(700)))
        assert visits == 700
        assert len(locks) == 0

    asyncio.run(run())
