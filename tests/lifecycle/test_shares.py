"""What the requests of one principal use at once: never more than its share, and others notice nothing."""

from __future__ import annotations

import asyncio
import time

import pytest

from lora_plugins.errors import NoFreeSlot
from lora_plugins.lifecycle import principal_limits
from lora_plugins.lifecycle.principal_limits import NO_LIMIT, Share, Shares
from tests.virtual_time import runs

A, B = Share("team-a", 0.5), Share("team-b", 0.5)


async def hold(shares: Shares, share: Share, adapter: str, size_bytes: int = 0, seconds: float = 60) -> float:
    """When it had it."""
    async with shares.using(share, adapter, size_bytes):
        had_at = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
    return had_at


@runs
async def test_one_over_its_share_is_refused_after_a_while() -> None:
    shares, loop = Shares(4, None), asyncio.get_running_loop()
    holding = [asyncio.create_task(hold(shares, A, f"a-{number}")) for number in range(2)]
    await asyncio.sleep(1)
    began = loop.time()
    with pytest.raises(NoFreeSlot, match=r"2 adapters of team-a in use at once.*2 of 4 at most"):
        await hold(shares, A, "a-2")
    assert loop.time() - began == pytest.approx(30)
    await asyncio.gather(*holding)


@runs
async def test_others_and_administrators_do_not_wait() -> None:
    shares, loop = Shares(4, 100), asyncio.get_running_loop()
    tasks = [asyncio.create_task(hold(shares, A, f"a-{number}", 10)) for number in range(20)]
    await asyncio.sleep(1)
    began = loop.time()
    assert await hold(shares, B, "b", 50, 0) == began
    assert await hold(shares, NO_LIMIT, "x", 1000, 0) == began
    assert await hold(shares, A, "a-0", 10, 0) == began, "which it uses already"
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, NoFreeSlot) for result in results) == 18


@runs
async def test_who_waits_goes_on_when_another_has_ended() -> None:
    shares, loop = Shares(2, None), asyncio.get_running_loop()
    first = asyncio.create_task(hold(shares, A, "a-0", seconds=5))
    await asyncio.sleep(1)
    began = loop.time()
    assert await hold(shares, A, "a-1", seconds=0) == pytest.approx(began + 4)
    await first
    assert await hold(shares, A, "a-2", seconds=0) == loop.time(), "nothing is left in use"


@runs
async def test_bytes_are_shared_too_and_one_is_always_allowed() -> None:
    shares = Shares(100, 100, wait_s=1)
    await hold(shares, A, "larger-than-all", 1000, 0)
    holding = asyncio.create_task(hold(shares, A, "a-0", 30))
    await asyncio.sleep(1)
    with pytest.raises(NoFreeSlot, match="50% of the bytes"):
        await hold(shares, A, "a-1", 21)
    await hold(shares, A, "a-2", 20, 0)
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    await hold(shares, A, "a-1", 50, 0)


@runs
async def test_late_arrivals_do_not_pass_those_that_wait() -> None:
    shares = Shares(100, 100)
    holding = asyncio.create_task(hold(shares, A, "a-0", 30, seconds=5))
    await asyncio.sleep(1)
    large = asyncio.create_task(hold(shares, A, "large", 50, seconds=5))
    await asyncio.sleep(1)
    small = asyncio.create_task(hold(shares, A, "small", 10))
    beside = asyncio.create_task(hold(shares, A, "a-0", 30, seconds=1))
    began = await asyncio.gather(holding, large, small, beside)
    assert began == pytest.approx([0, 5, 10, 2]), "one in use already takes no more of the share"


@runs
async def test_who_asks_again_at_once_comes_after_who_waits() -> None:
    """A tenant's third adapter, while two requests at a time go through all others."""
    shares = Shares(4, None)

    async def loop_over(adapters: list[str]) -> None:
        for adapter in adapters * 10:
            await hold(shares, A, adapter, seconds=1)

    loops = [asyncio.create_task(loop_over([f"{one}-0", f"{one}-1"])) for one in "xy"]
    await asyncio.sleep(0.5)
    assert await hold(shares, A, "third", seconds=1) == 1
    await asyncio.gather(*loops)


@runs
async def test_room_that_a_leaver_does_not_take_goes_on() -> None:
    """The first to wait wants more than is free, and goes away: the next has room at once."""
    shares = Shares(100, 100)
    holding = asyncio.create_task(hold(shares, A, "a-0", 30, seconds=20))
    await asyncio.sleep(1)
    large = asyncio.create_task(hold(shares, A, "large", 50))
    await asyncio.sleep(1)
    small = asyncio.create_task(hold(shares, A, "small", 10, seconds=1))
    await asyncio.sleep(1)
    large.cancel()
    assert await small == 3
    await asyncio.gather(holding, large, return_exceptions=True)
    assert await hold(shares, A, "whole", 50, seconds=0) == asyncio.get_running_loop().time(), "nothing is left"


@runs
async def test_place_given_to_who_is_cancelled_goes_on() -> None:
    shares = Shares(2, None)
    leaves = asyncio.Event()

    async def until_told() -> None:
        async with shares.using(A, "a-0"):
            await leaves.wait()

    holding = asyncio.create_task(until_told())
    await asyncio.sleep(1)
    first, second = (asyncio.create_task(hold(shares, A, f"a-{number}", seconds=0)) for number in (1, 2))
    await asyncio.sleep(1)
    leaves.set()
    await holding
    first.cancel()
    assert await second == 2
    await asyncio.gather(first, return_exceptions=True)


@runs
async def test_an_end_costs_no_more_where_thousands_wait() -> None:
    async def cpu_s_of_ends(waiting: int) -> float:
        shares = Shares(2, None, wait_s=1000)
        holding = [asyncio.create_task(hold(shares, A, f"a-{number}", seconds=1)) for number in range(waiting)]
        await asyncio.sleep(0.5)
        began = time.process_time()
        await asyncio.sleep(20)  # so many end
        took_s = time.process_time() - began
        for one in holding:
            one.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        return took_s

    assert await cpu_s_of_ends(5000) < 10 * await cpu_s_of_ends(50)


@runs
async def test_a_flood_of_one_principal_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(principal_limits, "_WAITING", 5)
    shares, loop = Shares(2, None), asyncio.get_running_loop()
    began = loop.time()
    holding = asyncio.create_task(hold(shares, A, "a-0", seconds=20))
    other = [asyncio.create_task(hold(shares, B, f"b-{number}", seconds=5)) for number in range(2)]
    await asyncio.sleep(1)
    flood = [asyncio.create_task(hold(shares, A, f"a-{number}")) for number in range(1, 50)]
    await asyncio.sleep(1)
    refused = [one for one in flood if one.done()]
    assert (len(refused), loop.time() - began) == (45, 2)
    assert all(isinstance(one.exception(), NoFreeSlot) for one in refused)
    assert await other[1] == began + 5, "the other principal keeps its place in the queue"
    for one in (holding, *flood):
        one.cancel()
    await asyncio.gather(holding, *flood, *other, return_exceptions=True)
