"""Requests that wait at the gate for an adapter which is unloaded: refused at once, not served and not left waiting."""

from __future__ import annotations

import asyncio

import pytest

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot
from lora_plugins.events import AdapterUnloaded
from lora_plugins.server.refusals import Refusals
from tests.server.test_changes import Version, World
from tests.virtual_time import runs

NEVER_S = 3600.0


async def one_runs_and_one_waits(world: World) -> tuple[asyncio.Task[str], asyncio.Task[str]]:
    """Of one slot, `chat` has it until its request is ended, and a request for `sql` waits for its turn."""
    world.sources.has |= {"sql": Version("aa"), "chat": Version("bb")}
    for name in ("sql", "chat"):
        await world.changes.load(name)
    gate, requests = world.workers.gate, world.table.lora_requests
    running = world.start("chat", NEVER_S, "running")
    while gate.in_flight(requests["chat"].lora_int_id) != ["running"]:
        await asyncio.sleep(0.001)
    waiting = world.start("sql", 0, "waiting")
    while not gate._turns._waiting:
        await asyncio.sleep(0.001)
    return running, waiting


async def ended(running: asyncio.Task[str]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(("block", "kind", "code"), [(False, NoFreeSlot, "L001"), (True, AdapterNotFound, "L002")])
@runs
async def test_what_waits_for_its_turn_is_refused_when_the_unload_begins(
    block: bool, kind: type[LoRAPluginsError], code: str
) -> None:
    world = World(slots=1)
    running, waiting = await one_runs_and_one_waits(world)
    assert await world.changes.unload("sql", block=block, timeout_s=NEVER_S), "free, though another adapter runs on"
    assert not running.done()
    with pytest.raises(kind) as caught:
        await waiting
    assert (caught.value.code, caught.value.adapter) == (code, "sql")
    assert world.server.aborted == []
    assert [event.aborted for event in world.told if isinstance(event, AdapterUnloaded)] == [0]
    assert world.in_workers == {"bb"}
    assert world.sources.leased == {"bb"}
    await ended(running)


@runs
async def test_what_waits_for_the_staging_is_refused_too() -> None:
    world = World()
    world.sources.has["sql"] = Version("aa")
    served, _ = await world.changes.load("sql")
    await world.settled()
    world.worker.forget(served.request.lora_int_id)
    world.worker.delay_s = NEVER_S
    waiting = world.start("sql", 0)
    while not world.worker.paths:
        await asyncio.sleep(0.001)
    assert await world.changes.unload("sql", block=False, timeout_s=NEVER_S)
    with pytest.raises(NoFreeSlot):
        await waiting


@runs
async def test_one_that_comes_late_with_what_was_unloaded_is_refused() -> None:
    """It has read the table before; its adapter's lease in the store has ended, so it must not be staged again."""
    world = World()
    world.sources.has["sql"] = Version("aa")
    served, _ = await world.changes.load("sql")
    await world.changes.unload("sql", block=False, timeout_s=NEVER_S)
    with pytest.raises(NoFreeSlot):
        await world.workers.gate.enter(served.request, "late")
    assert world.in_workers == set()
    await world.changes.load("sql")
    assert await world.ask("sql") == "/store/aa", "loaded again, it is another one"


@runs
async def test_a_swap_refuses_nobody() -> None:
    world = World(slots=1)
    running, waiting = await one_runs_and_one_waits(world)
    world.sources.has["sql"] = Version("cc")
    assert await world.changes.refresh("sql")
    assert not waiting.done()
    await ended(running)
    assert await waiting == "/store/aa"


@runs
async def test_a_client_that_goes_away_while_it_is_refused_has_gone_away() -> None:
    refusals = Refusals()

    async def wait() -> None:
        with refusals.refusing(1):
            await asyncio.sleep(NEVER_S)

    left, refused = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    left.cancel()
    refusals.refuse(1, NoFreeSlot("x"))
    results = await asyncio.gather(left, refused, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError, NoFreeSlot]
    assert refused.cancelling() == 0
    assert results[1] is not refusals._refused[1], "raised many times over, one error's traceback would grow"
    assert refusals._waiting == {}
