"""Which name is looked up next at a source: in a time that passes by waiting only, so that each figure is exact."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

import pytest

from lora_plugins.absence import Absence
from lora_plugins.resolvers.admission import LookUpLimits, LookUps, LookUpsBusy
from tests.virtual_time import runs

LIMITS = LookUpLimits(at_once=4, absent_per_s=20.0, waiting=100, wait_s=5.0)
LOOK_UP_S = 0.03


class Source:
    """Answers after a while, has what begins with "real", and counts what it is asked at once and in all."""

    def __init__(self, limits: LookUpLimits = LIMITS) -> None:
        self.look_ups = LookUps(limits)
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0

    async def _look_up(self, name: str) -> str | Absence:
        self.asked.append(name)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(LOOK_UP_S)
        self.at_once -= 1
        return name if name.startswith("real") else Absence("s3", name, "no such object")

    async def ask(self, name: str, *, is_known: bool = False) -> str | Absence:
        return await self.look_ups.run(lambda: self._look_up(name), is_known=is_known)

    async def ask_until_answered(self, name: str) -> tuple[str | Absence, float]:
        """As a client does who minds Retry-After; with the seconds that it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                return await self.ask(name), loop.time() - began
            except LookUpsBusy as error:
                await asyncio.sleep(error.retry_after_s or 0)


class Flood:
    """So many new names a second, each asked for once, or until it is answered."""

    def __init__(self, source: Source, per_s: int, *, asks_again: bool = False) -> None:
        self._source = source
        self._per_s = per_s
        self._ask = source.ask_until_answered if asks_again else source.ask
        self.asking: list[asyncio.Task[object]] = []

    async def run(self, seconds: float) -> None:
        for number in range(int(seconds * self._per_s)):
            self.asking.append(asyncio.ensure_future(self._ask(f"unknown-{id(self)}-{number}")))
            await asyncio.sleep(1 / self._per_s)


@runs
async def test_a_known_name_does_not_wait_for_a_flood() -> None:
    source = Source()
    flood = asyncio.create_task(Flood(source, 100).run(6))
    loop = asyncio.get_running_loop()
    for _ in range(50):
        await asyncio.sleep(0.1)
        began = loop.time()
        await source.ask("real", is_known=True)
        assert loop.time() - began == pytest.approx(LOOK_UP_S)
    await flood


@runs
async def test_a_flood_is_looked_up_as_often_as_stated() -> None:
    source = Source()
    flood = Flood(source, 100)
    await flood.run(8)
    assert source.most_at_once <= LIMITS.at_once
    assert 19 <= len(source.asked) / 8 <= 21


@runs
async def test_as_many_names_wait_as_may_and_no_more() -> None:
    source = Source(replace(LIMITS, waiting=2))
    names = [f"real-{number}" for number in range(LIMITS.at_once + 10)]
    answers = await asyncio.gather(*map(source.ask, names), return_exceptions=True)
    places = LIMITS.at_once + 2
    assert answers[:places] == names[:places]
    assert {type(answer) for answer in answers[places:]} == {LookUpsBusy}


@runs
async def test_a_name_is_refused_after_its_wait_to_come_again() -> None:
    source = Source()
    places = [asyncio.ensure_future(source.look_ups.run(asyncio.Event().wait, is_known=False)) for _ in range(4)]
    await asyncio.sleep(0)
    began = asyncio.get_running_loop().time()
    with pytest.raises(LookUpsBusy, match=r"a turn within 5 s.*ask again") as caught:
        await source.ask("real")
    assert asyncio.get_running_loop().time() - began == pytest.approx(LIMITS.wait_s)
    assert (caught.value.code, caught.value.http_status, caught.value.retry_after_s) == ("L006", 503, 2)
    assert source.asked == []
    for place in places:
        place.cancel()
    await asyncio.wait(places)
    assert await source.ask("real") == "real"


@runs
async def test_names_that_wait_are_answered_in_their_order() -> None:
    source = Source()
    names = [f"unknown-{number}" for number in range(40)]
    await asyncio.gather(*map(source.ask, names))
    assert source.asked == names


@runs
async def test_adapters_that_exist_are_found_at_full_speed() -> None:
    source = Source()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(source.ask(f"real-{number}") for number in range(100)))
    assert loop.time() - began == pytest.approx(100 / LIMITS.at_once * LOOK_UP_S)


@pytest.mark.parametrize("late", [0.0, 0.001])
@runs
async def test_a_cancelled_wait_costs_no_place(late: float) -> None:
    source = Source()
    for _ in range(20):
        asking = [asyncio.ensure_future(source.ask(f"real-{number}")) for number in range(8)]
        await asyncio.sleep(LOOK_UP_S + late)  # the last four wait, or have just got their places
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
    source.at_once = source.most_at_once = 0
    await asyncio.gather(*(source.ask(f"real-{number}") for number in range(8)))
    assert source.most_at_once == LIMITS.at_once


@runs
async def test_a_failed_look_up_gives_its_place_back() -> None:
    source = Source()

    async def fail() -> None:
        raise ConnectionError

    for _ in range(20):
        with pytest.raises(ConnectionError):
            await source.look_ups.run(fail, is_known=False)
    assert await source.ask("real") == "real"


@runs
async def test_a_flood_of_one_principal_does_not_hold_another() -> None:
    source, loop = Source(), asyncio.get_running_loop()
    flood = asyncio.create_task(Flood(source, 400, asks_again=True).run(10))
    await asyncio.sleep(3)
    waits = []
    for number in range(20):
        began = loop.time()
        name = f"real-{number}"
        look_up = functools.partial(source._look_up, name)
        found = await source.look_ups.run(look_up, is_known=False, principal="team-b")
        waits.append(loop.time() - began)
        assert found == name
    assert max(waits) < 0.2, "the next place that is free, twenty a second"
    flood.cancel()
