"""Work in other threads and loops: its results, its errors, and what a cancellation waits for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from lora_plugins.resolvers.sources.object_store import on_loop
from lora_plugins.resolvers.sources.threads import OwnThreads


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


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
    threads = OwnThreads("mine")

    def slow() -> None:
        go.wait(60)
        done.set()

    async def run() -> None:
        call = partial(asyncio.get_running_loop().run_in_executor, threads)
        assert await call(lambda: threading.current_thread().name) == "mine"
        with pytest.raises(ZeroDivisionError):
            await call(lambda: 1 // 0)
        waiting = call(slow)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not done.is_set()

    asyncio.run(run())
    go.set()
    assert done.wait(60)


def test_threads_are_few_and_left_out_calls_never_run() -> None:
    threads, go, at_once, most = OwnThreads("mine", 2), threading.Event(), list[int](), list[int]()

    def work(number: int) -> int:
        at_once.append(number)
        most.append(len(at_once))
        go.wait(60)
        at_once.remove(number)
        return number

    calls = [threads.submit(work, number) for number in range(20)]
    assert calls[10].cancel()
    go.set()
    assert [call.result(60) for call in calls if call is not calls[10]] == [n for n in range(20) if n != 10]
    assert max(most) <= 2
    assert len(most) == 19


HANGS = """
import asyncio, os, sys, threading
from pathlib import Path
from lora_plugins.adapter.names import AdapterName
from lora_plugins.resolvers.sources.filesystem import FilesystemSource

async def run():
    os.path.realpath = lambda path, **options: threading.Event().wait()
    source = FilesystemSource(Path(sys.argv[1]), timeout_s=5)
    with __import__("contextlib").suppress(TimeoutError):
        await asyncio.wait_for(source.locate(AdapterName("sql"), ""), 0.5)

asyncio.run(run())
"""


def test_a_mount_that_hangs_keeps_no_process_alive(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", HANGS, tmp_path], check=False, timeout=60).returncode == 0
