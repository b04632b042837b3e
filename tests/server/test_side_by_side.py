"""Changes of one server that meet each other: what one waits for, another one may do first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lora_plugins.admin.start import Start
from lora_plugins.errors import IncompatibleAdapter, NoFreeSlot
from lora_plugins.server.remembered import Remembered, ServedSet
from lora_plugins.settings import Settings
from tests.server.test_changes import Version, World, serving
from tests.virtual_time import runs


@runs
async def test_pins_at_once_leave_a_slot_for_all_others() -> None:
    world = World(slots=2)
    world.sources.has |= {name: Version(name) for name in ("sql", "chat", "other")}
    for name in world.sources.has:
        await world.changes.load(name)
    outcomes = await asyncio.gather(*(world.changes.pin(name) for name in ("sql", "chat")), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if isinstance(outcome, Exception)] == [NoFreeSlot]
    assert len(world.worker.pinned) == 1
    pinned = next(served.name for served in world.changes.catalogue.all() if served.is_pinned)
    await world.changes.unpin(pinned)
    for name in ("chat", "sql"):
        await world.changes.pin(name)
        await world.changes.unpin(name)


@runs
async def test_pins_of_a_larger_server_are_restored_as_far_as_there_is_room(tmp_path: Path) -> None:
    world, file = World(slots=2), ServedSet(tmp_path / "served.json")
    names = ("sql", "chat", "other")
    world.sources.has |= {name: Version(name) for name in names}
    file.write([Remembered(name, is_pinned=True) for name in names])
    await Start(world.changes, Settings(restore=True), file).run()
    assert len(world.worker.pinned) == 1
    assert [await world.ask(name) for name in names] == [f"/store/{name}" for name in names]


@runs
async def test_another_uri_ends_the_effect_of_a_rollback() -> None:
    world = World()
    served = await serving(world, "aa", "bb")
    await world.changes.rollback("sql")
    assert served.held_digest == "aa"
    world.sources.has["s3://b/x"] = Version("cc")
    await world.changes.load("sql", "s3://b/x")
    assert (served.held_digest, await world.ask("sql")) == (None, "/store/cc")


@runs
async def test_what_could_not_be_loaded_from_a_uri_leaves_nothing_behind() -> None:
    world = World()
    world.sources.has["s3://b/x"] = Version("aa")
    world.worker.broken = IncompatibleAdapter("shape")
    for _ in range(3):
        with pytest.raises(IncompatibleAdapter):
            await world.changes.load("sql", "s3://b/x")
    await world.settled()
    assert world.workers.gate.uris == {}
    assert world.sources.leased == set()


@runs
async def test_a_blocked_name_is_refused_while_its_unload_waits_for_a_resolver() -> None:
    world = World()
    async with world.server.lock("sql"):
        unload = asyncio.create_task(world.changes.unload("sql", block=True, timeout_s=1))
        await asyncio.sleep(0.01)
        assert "sql" in world.changes.catalogue.blocked, "a request that comes now would have it resolved after it"
    assert await unload
    assert "sql" in world.changes.catalogue.blocked


@runs
async def test_a_name_that_is_blocked_while_it_is_loaded_stays_blocked() -> None:
    world = World()
    world.sources.has["sql"] = Version("aa")
    load = asyncio.create_task(world.changes.load("sql"))
    await asyncio.sleep(0)
    assert await world.changes.unload("sql", block=True, timeout_s=1)
    await load
    assert world.changes.catalogue.blocked == {"sql"}
    assert world.changes.catalogue.all() == []
