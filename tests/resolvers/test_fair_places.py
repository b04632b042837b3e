"""Places: taken in turns by principal, never all by one, and waited for within limits."""

from __future__ import annotations

import asyncio

import pytest

from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.fair_places import Most, PlaceLimits, Places
from tests.virtual_time import runs

LIMITS = PlaceLimits(at_once=4, waiting=10, wait_s=5.0)


class Work:
    """Tasks that hold a place until they are told to end."""

    def __init__(self, limits: PlaceLimits = LIMITS) -> None:
        self.places = Places(limits, lambda *_: SourceUnavailable("busy"), lambda _: Most(2))
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    def start(self, name: str, principal: str) -> asyncio.Task[None]:
        self._ends[name] = asyncio.Event()

        async def work() -> None:
            async with self.places.held(principal):
                self.begun.append(name)
                await self._ends[name].wait()

        return asyncio.ensure_future(work())

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await asyncio.sleep(0.001)


@runs
async def test_one_principal_leaves_places_to_others() -> None:
    work = Work()
    tasks = [work.start(f"a{number}", "team-a") for number in range(4)]
    tasks += [work.start(f"b{number}", "team-b") for number in range(3)]
    await asyncio.sleep(0.001)
    assert work.begun == ["a0", "a1", "b0", "b1"]
    await work.end("b0")
    assert work.begun[4:] == ["b2"], "team-a has all that one may have"
    await work.end("b1")
    assert work.begun[5:] == [], "a place stays free"
    await work.end("a0")
    assert work.begun[5:] == ["a2"]
    for task in tasks:
        task.cancel()


@runs
async def test_a_wait_for_a_place_ends() -> None:
    work = Work()
    tasks = [work.start(f"a{number}", "team-a") for number in range(2)]
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(SourceUnavailable, match="busy"):
        await work.start("a2", "team-a")
    assert loop.time() - began == pytest.approx(5.0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    later = work.start("a3", "team-a")
    await asyncio.sleep(0.001)
    assert work.begun == ["a0", "a1", "a3"]
    later.cancel()


@runs
async def test_a_full_queue_refuses_whoever_waits_most() -> None:
    work = Work(PlaceLimits(at_once=1, waiting=3, wait_s=5.0))
    tasks = {name: work.start(name, name[0]) for name in ("a0", "a1", "a2", "b0", "c0")}
    await asyncio.sleep(0.001)
    assert [name for name, task in tasks.items() if task.done()] == ["a2"]
    with pytest.raises(SourceUnavailable, match="busy"):
        await tasks["a2"]
    for task in tasks.values():
        task.cancel()
