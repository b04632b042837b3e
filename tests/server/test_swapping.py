"""vLLM's `load_inplace`: other weights under a served name, loaded beside the old ones as every swap is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.events import AdapterSwapped, UpdateFailed
from tests.server.world import World, serving
from tests.virtual_time import runs


@dataclass
class InPlace:
    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = True


async def load_in_place(world: World, name: str, path: str) -> bool:
    """What vLLM's endpoint does: the id that the name has, and the table once the engine has it."""
    async with world.server.lock(name):
        before = world.table.lora_requests.get(name)
        request = InPlace(name, 99 if before is None else before.lora_int_id, path)
        taken = await world.lifecycle.swapping.swap_in_place(request)
        if taken:
            world.table.lora_requests[name] = request
        assert not request.load_inplace, "vLLM 0.32 keeps the request with its flag"
        return taken


@runs
async def test_what_runs_goes_on_and_the_next_gets_new_weights() -> None:
    world = World()
    served = await serving(world, "aa", "bb")
    old_id = served.request.lora_int_id
    running = world.start("sql", 30)
    while not world.engine.is_running("running"):
        await asyncio.sleep(0.001)
    assert await load_in_place(world, "sql", "/by/hand")
    assert await world.ask("sql") == "/by/hand"
    assert world.table.lora_requests["sql"].lora_int_id != old_id
    assert world.worker.paths[old_id] == "/store/bb", "what runs keeps its weights"
    assert world.resolver.leased == {"aa", "bb"}
    assert [old.request.lora_int_id for old in world.lifecycle.registry.draining.values()] == [old_id]
    assert await running == "/store/bb"
    while world.lifecycle.registry.draining:
        await asyncio.sleep(0.001)
    assert world.in_workers == {"hand"}
    assert world.resolver.leased == set()
    told = [event for event in world.told if isinstance(event, AdapterSwapped)][-1]
    assert (told.name, told.before, told.after) == ("sql", "bb", "/by/hand")


@runs
async def test_again_and_again_leaves_nothing_of_what_was_before() -> None:
    world = World()
    await serving(world, "aa")
    for number in range(20):
        assert await load_in_place(world, "sql", f"/by/hand-{number}")
        assert await world.ask("sql") == f"/by/hand-{number}"
    while world.lifecycle.registry.draining:
        await asyncio.sleep(0.001)
    assert world.in_workers == {"hand-19"}
    assert sum(isinstance(event, AdapterSwapped) for event in world.told) == 20


@runs
async def test_weights_that_no_worker_can_load_leave_the_old_ones() -> None:
    world = World()
    served = await serving(world, "aa")
    world.worker.broken = IncompatibleAdapter("shape")
    with pytest.raises(IncompatibleAdapter):
        await load_in_place(world, "sql", "/by/hand")
    world.worker.broken = None
    assert await world.ask("sql") == "/store/aa"
    assert served.last_error is not None
    assert [type(event) for event in world.told] == [UpdateFailed]
    assert world.resolver.leased == {"aa"}
    while world.in_workers != {"aa"}:
        await asyncio.sleep(0.001)


@runs
async def test_what_was_pinned_is_pinned_again() -> None:
    world = World(slots=3)
    await serving(world, "aa")
    await world.lifecycle.pin("sql")
    assert await load_in_place(world, "sql", "/by/hand")
    served = world.lifecycle.registry.get("sql")
    assert served is not None
    assert served.is_pinned
    await world.settled()
    assert world.engine.pinned == {served.request.lora_int_id}


@runs
async def test_name_that_is_not_served_yet_is_loaded() -> None:
    world = World()
    assert not await load_in_place(world, "sql", "/by/hand")
    assert world.told == []
    assert world.worker.paths == {}
