"""Requests that are held for an adapter which is unloaded: served before its time ends, or refused; none is left."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot
from lora_plugins.events import AdapterUnloaded
from tests.lifecycle.world import Version, World
from tests.scheduler.simulated import held_count
from tests.virtual_time import runs

LONG_S = 60.0


async def serving_two(**options: Any) -> World:
    """A server of `sql` and `chat`."""
    world = World({"sql": "aa", "chat": "bb"}, **options)
    for name in world.resolver.has:
        await world.lifecycle.load(name)
    return world


async def one_runs_and_one_is_held() -> tuple[World, asyncio.Task[str], asyncio.Task[str]]:
    """Of one slot, `chat` has it until its request is ended, and a request for `sql` is held."""
    world = await serving_two(slots=1)
    running = world.start("chat", LONG_S, "running")
    while not world.engine.is_running("running"):
        await asyncio.sleep(0.001)
    held = world.start("sql", 0, "held")
    await world.settled()
    assert world.engine.is_held("held")
    return world, running, held


async def ended(running: asyncio.Task[str]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("block", "timeout_s", "kind", "code"), [(False, 1, NoFreeSlot, "L001"), (True, LONG_S, AdapterNotFound, "L002")]
)
@runs
async def test_what_is_held_is_refused_when_the_time_is_up(
    block: bool, timeout_s: float, kind: type[LoRAPluginsError], code: str
) -> None:
    world, running, held = await one_runs_and_one_is_held()
    assert await world.lifecycle.unload("sql", block=block, timeout_s=timeout_s), "free, though another runs on"
    assert not running.done()
    with pytest.raises(kind) as caught:
        await held
    assert (caught.value.code, caught.value.adapter) == (code, "sql")
    assert world.server.aborted == []
    assert [event.aborted for event in world.told if isinstance(event, AdapterUnloaded)] == [0]
    assert world.in_workers == {"bb"}
    assert world.resolver.leased == {"bb"}
    await ended(running)


@runs
async def test_what_is_held_is_served_before_an_unload_ends() -> None:
    world = await serving_two(places=1)
    world.worker.delay_s = LONG_S / 2
    held = world.start("sql", 0, "held")
    while world.in_workers != {"aa"}:
        await asyncio.sleep(0.001)
    unloading = asyncio.create_task(world.lifecycle.unload("sql", block=False, timeout_s=LONG_S))
    assert await held == "/store/aa"
    assert await unloading
    assert world.in_workers == set()


@pytest.mark.parametrize("block", [False, True])
@runs
async def test_a_late_request_for_an_unloaded_adapter_leaves_nothing(block: bool) -> None:
    """It has read the table before."""
    world = World({"sql": "aa"})
    served = await world.load("sql")
    await world.lifecycle.unload("sql", block=block, timeout_s=LONG_S)
    with pytest.raises(AdapterNotFound) if block else nullcontext():
        await world.engine.run(served.request)
    await world.settled()
    assert world.in_workers == set()
    await world.lifecycle.load("sql")
    assert await world.ask("sql") == "/store/aa", "loaded again, it is another one"


@runs
async def test_a_takedown_reaches_what_drains() -> None:
    """vLLM's own unload has taken the name away, and ends nothing."""
    world, _, held = await one_runs_and_one_is_held()
    for name in ("sql", "chat"):
        await world.lifecycle.remove(name)
        assert [adapter.name for adapter in world.lifecycle.registry.draining.values()][-1] == name
        assert await world.lifecycle.unload(name, block=True, timeout_s=1)
    with pytest.raises(AdapterNotFound):
        await held
    assert (world.server.aborted, world.in_workers) == (["running"], set())


@runs
async def test_a_swap_refuses_nobody() -> None:
    world, running, held = await one_runs_and_one_is_held()
    world.resolver.has["sql"] = Version("cc")
    assert (await world.lifecycle.refresh("sql")).is_swap
    assert not held.done()
    await ended(running)
    assert await held == "/store/aa"


@runs
async def test_a_held_request_whose_client_leaves_is_forgotten() -> None:
    world, running, held = await one_runs_and_one_is_held()
    await ended(held)
    assert held_count(world.engine.planner) == 0
    assert await world.lifecycle.unload("sql", block=False, timeout_s=LONG_S)
    assert world.in_workers == {"bb"}
    await ended(running)


@runs
async def test_after_the_deadline_only_admitted_requests_are_ended() -> None:
    """Those of another adapter, and of the same name's next version, go on."""
    world = await serving_two(slots=2)
    old, other = world.start("sql", LONG_S, "old"), world.start("chat", LONG_S, "other")
    await world.settled()
    unloading = asyncio.create_task(world.lifecycle.unload("sql", block=False, timeout_s=1))
    await asyncio.sleep(0.5)
    await world.lifecycle.load("sql")
    new = world.start("sql", LONG_S, "new")
    assert await unloading
    assert world.server.aborted == ["old"]
    assert [event.aborted for event in world.told if isinstance(event, AdapterUnloaded)] == [1]
    assert old.cancelled()
    assert (await new, await other) == ("/store/aa", "/store/bb")
