"""Requests that are held for an adapter which is unloaded: served before its time ends, or refused; none is left."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot
from lora_plugins.events import AdapterUnloaded
from tests.lifecycle.world import Version, World
from tests.scheduler.simulated import held_count
from tests.virtual_time import runs

LONG_S = 60.0


async def one_runs_and_one_is_held(world: World) -> tuple[asyncio.Task[str], asyncio.Task[str]]:
    """Of one slot, `chat` has it until its request is ended, and a request for `sql` is held."""
    world.resolver.has |= {"sql": Version("aa"), "chat": Version("bb")}
    for name in ("sql", "chat"):
        await world.lifecycle.load(name)
    running = world.start("chat", LONG_S, "running")
    while not world.engine.is_running("running"):
        await asyncio.sleep(0.001)
    held = world.start("sql", 0, "held")
    await world.settled()
    assert world.engine.is_held("held")
    return running, held


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
    world = World(slots=1)
    running, held = await one_runs_and_one_is_held(world)
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
    world = World(places=1)
    world.resolver.has |= {"sql": Version("aa"), "chat": Version("bb")}
    for name in ("sql", "chat"):
        await world.lifecycle.load(name)
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
    world = World()
    world.resolver.has["sql"] = Version("aa")
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
    world = World(slots=1)
    _, held = await one_runs_and_one_is_held(world)
    for name in ("sql", "chat"):
        await world.lifecycle.remove(name)
        assert [adapter.name for adapter in world.lifecycle.registry.draining.values()][-1] == name
        assert await world.lifecycle.unload(name, block=True, timeout_s=1)
    with pytest.raises(AdapterNotFound):
        await held
    assert (world.server.aborted, world.in_workers) == (["running"], set())


@runs
async def test_a_swap_refuses_nobody() -> None:
    world = World(slots=1)
    running, held = await one_runs_and_one_is_held(world)
    world.resolver.has["sql"] = Version("cc")
    assert (await world.lifecycle.refresh("sql")).is_swap
    assert not held.done()
    await ended(running)
    assert await held == "/store/aa"


@runs
async def test_a_held_request_whose_client_leaves_is_forgotten() -> None:
    world = World(slots=1)
    running, held = await one_runs_and_one_is_held(world)
    await ended(held)
    assert held_count(world.engine.planner) == 0
    assert await world.lifecycle.unload("sql", block=False, timeout_s=LONG_S)
    assert world.in_workers == {"bb"}
    await ended(running)


@runs
async def test_after_the_deadline_only_admitted_requests_are_ended() -> None:
    """Those of another adapter, and of the same name's next version, go on."""
    world = World(slots=2)
    world.resolver.has |= {"sql": Version("aa"), "chat": Version("bb")}
    await world.lifecycle.load("sql")
    await world.lifecycle.load("chat")
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
