"""Work in the background goes on without an owner, and its failure is seen."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from lora_plugins.errors import AdapterNotFound
from lora_plugins.lifecycle.background_tasks import background


def test_a_collection_of_garbage_takes_no_task() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()  # known to this task alone

    async def run() -> None:
        task = weakref.ref(background(wait()))
        await asyncio.sleep(0)
        gc.collect()
        assert task() is not None

    asyncio.run(run())


@pytest.mark.parametrize("error", [AdapterNotFound("no such adapter", adapter="sql"), ZeroDivisionError("by zero")])
def test_a_failure_is_logged_and_reaches_who_awaits(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise error

    async def run() -> None:
        with pytest.raises(type(error)):
            await background(fail())
        background(fail())
        await asyncio.sleep(0.01)

    asyncio.run(run())
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == [f"Work in the background failed: {error!r}"] * 2
    is_ours = isinstance(error, AdapterNotFound)
    assert all((record.exc_info is None) == is_ours for record in caplog.records), "ours say all in a line"


def test_a_cancelled_task_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        task = background(asyncio.sleep(10))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert caplog.records == []
