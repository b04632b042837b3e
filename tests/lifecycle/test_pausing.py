"""Pausing one name of an API server, with the real planner before a made-up worker."""

from __future__ import annotations

import asyncio

import pytest

from lora_plugins.errors import AdapterNotFound
from lora_plugins.scheduler.pauses import PauseMode
from tests.lifecycle.world import World, serving
from tests.virtual_time import runs


async def running_for(seconds: float) -> tuple[World, asyncio.Task[str]]:
    """A server of `sql`, with one request in flight."""
    world, _ = await serving("aa")
    running = world.start("sql", seconds)
    await world.settled()
    return world, running


@runs
async def test_a_pause_is_answered_once_nothing_runs() -> None:
    world, running = await running_for(5.0)
    pausing = asyncio.create_task(world.lifecycle.server.pause("sql", PauseMode.WAIT))
    await asyncio.sleep(4.0)
    assert (pausing.done(), world.lifecycle.registry.paused) == (False, {"sql"})
    assert await running
    assert await pausing
    assert await world.lifecycle.server.resume("sql")
    assert not await world.lifecycle.server.resume("sql"), "it was not paused"


@runs
async def test_an_abort_ends_what_runs() -> None:
    world, running = await running_for(500.0)
    async with asyncio.timeout(1):
        assert await world.lifecycle.server.pause("sql", PauseMode.ABORT)
    assert (world.server.aborted, running.cancelled()) == (["running"], True)


@runs
async def test_a_resume_answers_a_pause_that_waits() -> None:
    world, running = await running_for(500.0)
    pausing = asyncio.create_task(world.lifecycle.server.pause("sql", PauseMode.WAIT))
    await world.settled()
    assert await world.lifecycle.server.resume("sql")
    assert not await pausing
    running.cancel()


@runs
async def test_a_swap_leaves_a_pause_and_an_unload_ends_it() -> None:
    world, _ = await serving("aa")
    await world.lifecycle.server.pause("sql", PauseMode.KEEP)
    await world.serve("aa", "bb")
    assert world.lifecycle.registry.paused == {"sql"}
    await world.lifecycle.unload("sql", block=False)
    assert (world.lifecycle.registry.paused, world.engine.asked["lora_plugins_resume"]) == (set(), 1)
    for change in (world.lifecycle.server.pause("sql", PauseMode.KEEP), world.lifecycle.server.resume("sql")):
        with pytest.raises(AdapterNotFound):
            await change
