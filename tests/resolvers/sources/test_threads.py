"""Work in other threads and loops: its results, its errors, and what a cancellation waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from lora_plugins.resolvers.sources.hub_errors import in_own_thread
from lora_plugins.resolvers.sources.object_store import on_loop


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_results_and_errors_come_from_another_loop(loop: asyncio.AbstractEventLoop) -> None:
    async def work(*, fails: bool) -> asyncio.AbstractEventLoop:
        await asyncio.sleep(0)
        if fails:
            raise ValueError("x")
        return asyncio.get_running_loop()

    assert asyncio.run(on_loop(loop, work(fails=False))) is loop
    with pytest.raises(ValueError, match="x"):
        asyncio.run(on_loop(loop, work(fails=True)))


@pytest.mark.parametrize("has_started", [True, False])
def test_cancelled_work_has_ended_when_the_caller_resumes(loop: asyncio.AbstractEventLoop, has_started: bool) -> None:
    started, ended = threading.Event(), []

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    async def run() -> None:
        task = asyncio.create_task(on_loop(loop, work()))
        await asyncio.sleep(0)
        if has_started:
            await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert started.is_set() is bool(ended)

    asyncio.run(run())


def test_an_own_thread_returns_raises_and_outlives_its_caller() -> None:
    go, done = threading.Event(), threading.Event()

    def slow() -> None:
        go.wait(60)
        done.set()

    async def run() -> None:
        assert await in_own_thread(lambda: threading.current_thread().name, "mine") == "mine"
        with pytest.raises(ZeroDivisionError):
            await in_own_thread(lambda: 1 // 0, "mine")
        task = asyncio.create_task(in_own_thread(slow, "mine"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not done.is_set()

    asyncio.run(run())
    go.set()
    assert done.wait(60)
