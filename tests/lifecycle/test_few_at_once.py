"""Work for many, of which a few of each place are done at once."""

from __future__ import annotations

import asyncio

from lora_plugins.lifecycle.background_tasks import FewAtOnce, in_steps
from tests.virtual_time import runs


class Work:
    """Items are texts such as `a1`, whose place is the first letter; each ends when it is told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.idle = 0
        self.go = asyncio.Event()
        self.few = FewAtOnce(self.work, lambda item: item[0], limit=2, on_idle=self.on_idle)

    async def work(self, item: str) -> None:
        self.begun.append(item)
        await self.go.wait()
        self.ended.append(item)

    def on_idle(self) -> None:
        self.idle += 1

    def begin(self, *items: str) -> None:
        for item in items:
            self.few.begin(item, item)


@runs
async def test_first_come_is_first_served_at_each_place() -> None:
    work = Work()
    work.begin("a1", "a2", "a3", "b1", "a4")
    await asyncio.sleep(0)
    assert (work.begun, len(work.few)) == (["a1", "a2", "b1"], 5)
    work.go.set()
    await work.few.idle()
    assert work.begun == work.ended == ["a1", "a2", "b1", "a3", "a4"]
    assert (len(work.few), work.idle) == (0, 1)
    assert not work.few._queues, "no place is kept for ever"
    assert not work.few._running_at


@runs
async def test_a_name_is_worked_for_once() -> None:
    work = Work()
    for _ in range(2):
        work.begin("a1", "a2", "a3")
        await asyncio.sleep(0)
    work.go.set()
    await work.few.idle()
    assert work.begun == ["a1", "a2", "a3"]


@runs
async def test_what_is_ended_is_left_out() -> None:
    work = Work()
    work.begin("a1", "a2", "a3", "a4")
    await asyncio.sleep(0)
    assert work.few.end("a3") is None
    assert work.few.end("nobody") is None
    task = work.few.end("a1")
    assert task is not None
    await asyncio.wait([task])
    work.go.set()
    await work.few.idle()
    assert (work.begun, work.ended) == (["a1", "a2", "a4"], ["a2", "a4"])


@runs
async def test_a_name_may_begin_again_while_its_cancelled_work_ends() -> None:
    work = Work()
    work.begin("a1")
    await asyncio.sleep(0)
    work.few.end("a1")
    work.few.begin("a1", "again")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    work.go.set()
    await work.few.idle()
    assert (work.begun, work.ended) == (["a1", "again"], ["again"])


@runs
async def test_all_can_be_ended() -> None:
    work = Work()
    work.begin(*(f"a{number}" for number in range(5)))
    await asyncio.sleep(0)
    work.few.end_all()
    await work.few.idle()
    assert (work.begun, work.ended, len(work.few)) == (["a0", "a1"], [], 0)


def test_long_walks_leave_others_their_turns() -> None:
    async def run() -> int:
        turns, is_over = 0, False

        async def turn() -> None:
            nonlocal turns
            while not is_over:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        walked = [item async for item in in_steps(range(10_000))]
        is_over = True
        await turning
        assert walked == list(range(10_000))
        return turns

    assert asyncio.run(run()) >= 50
