"""What the requests of one principal use at once: never more than its share, and others notice nothing."""

from __future__ import annotations

import asyncio

import pytest

from lora_plugins.errors import NoFreeSlot
from lora_plugins.server.shares import Share, Shares
from tests.virtual_time import runs

A, B = Share("team-a", 0.5), Share("team-b", 0.5)


async def hold(shares: Shares, share: Share | None, adapter: str, size_bytes: int = 0, seconds: float = 60) -> float:
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
    assert await hold(shares, None, "x", 1000, 0) == began
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
    assert shares._uses == {}


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
    assert shares._uses == {}


@runs
async def test_who_goes_away_while_waiting_leaves_nothing() -> None:
    shares = Shares(2, None)
    holding = asyncio.create_task(hold(shares, A, "a-0", seconds=5))
    await asyncio.sleep(1)
    waiting = asyncio.create_task(hold(shares, A, "a-1"))
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.gather(holding, waiting, return_exceptions=True)
    assert shares._uses == {}
