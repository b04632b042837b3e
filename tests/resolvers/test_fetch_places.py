"""Who may fetch from a source whose fetches fail: in a time that passes by waiting only."""

from __future__ import annotations

import asyncio

import pytest

from lora_plugins.events import Events
from lora_plugins.resolvers.admission import _PROBES, Fetches
from lora_plugins.resolvers.breaker import Breaker, BreakerLimits, BreakerOpen
from lora_plugins.resolvers.fair_places import PlaceLimits, Places
from lora_plugins.resolvers.sources.retries import NoAnswer
from tests.virtual_time import runs

RETRY_S = 2.0


class Source:
    """Fetches take a second, or for ever while it hangs; its breaker is open."""

    def __init__(self) -> None:
        self.hangs = False
        self.stored: set[str] = set()
        breaker = Breaker(BreakerLimits(3, RETRY_S), "s3", Events(), asyncio.get_running_loop().time)
        breaker.failed(0.0, NoAnswer("nothing"))
        places = Places(PlaceLimits(8, 100, 300.0), lambda *_: NoAnswer("no place"))
        self.fetches = Fetches(places, breaker)

    async def _fetch(self) -> None:
        await asyncio.sleep(3600.0 if self.hangs else 1.0)

    async def ask(self, name: str) -> float:
        """The seconds that it took."""
        began = asyncio.get_running_loop().time()
        async with self.fetches.turn("team"):
            if name not in self.stored:
                await self.fetches.breaker.judged(self._fetch(), name)
                self.stored.add(name)
        return asyncio.get_running_loop().time() - began


@runs
async def test_who_comes_beside_the_first_try_waits_for_it() -> None:
    source = Source()
    with pytest.raises(BreakerOpen):
        await source.ask("sql")
    await asyncio.sleep(RETRY_S)
    assert await asyncio.gather(*map(source.ask, ("sql", "chat", "poet"))) == [1.0, 2.0, 2.0]
    assert not source.fetches.breaker.is_open


@runs
async def test_few_fetches_hang_and_all_others_are_refused() -> None:
    source = Source()
    source.hangs = True
    loop, hanging = asyncio.get_running_loop(), []
    for number in range(_PROBES):
        await asyncio.sleep(RETRY_S)
        hanging.append(asyncio.ensure_future(source.ask(f"sql-{number}")))
        await asyncio.sleep(0)
        began = loop.time()
        with pytest.raises(BreakerOpen):
            await source.ask("other")
        assert loop.time() - began <= RETRY_S
    await asyncio.sleep(RETRY_S)
    began = loop.time()
    with pytest.raises(BreakerOpen):
        await source.ask("other")
    assert loop.time() == began
    for task in hanging:
        task.cancel()
    await asyncio.wait(hanging)
    source.hangs = False
    assert await source.ask("other") == 1.0
