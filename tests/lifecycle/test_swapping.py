"""vLLM's own load: what lies at a path becomes a version, and with `load_inplace` it is swapped as every other is."""

from __future__ import annotations

import asyncio

import pytest

from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.events import AdapterSwapped, NotServed
from lora_plugins.lifecycle.registry import ServedAdapter
from lora_plugins.lifecycle.swapping import ChangeReason, VersionChange
from tests.lifecycle.world import Version, World, serving
from tests.virtual_time import runs

ELSEWHERE = "/only/on/workers/adapter"


async def load_in_place(world: World, name: str, path: str) -> VersionChange:
    """What vLLM's endpoint does."""
    async with world.server.lock(name):
        return await world.lifecycle.load_by_path(name, path)


def served(world: World, name: str = "sql") -> ServedAdapter:
    adapter = world.lifecycle.registry.get(name)
    assert adapter is not None
    return adapter


async def gone(world: World) -> None:
    while world.lifecycle.registry.draining or len(world.in_workers) > 1:
        await asyncio.sleep(0.001)


@runs
async def test_what_lies_at_a_path_is_served_as_a_version() -> None:
    world = World({"/by/hand": "aa"})
    await load_in_place(world, "sql", "/by/hand")
    adapter = served(world)
    assert (adapter.version, adapter.given_path) == (world.resolver.has["/by/hand"], "/by/hand")
    assert adapter.held_digest == "aa"
    assert adapter.request is world.table.lora_requests["sql"]
    assert await world.ask("sql") == "/store/aa"
    assert world.worker.uris == {"/store/aa": "/by/hand"}, "for workers that lack its files"


@runs
async def test_new_files_at_the_same_path_are_a_swap() -> None:
    world = World({"/by/hand": "aa"})
    await load_in_place(world, "sql", "/by/hand")
    running, old_id = world.start("sql", 30), served(world).engine_id
    while not world.engine.is_running("running"):
        await asyncio.sleep(0.001)
    world.resolver.has["/by/hand"] = Version("bb")
    assert await world.ask("sql") == "/store/aa", "files that change underneath change nothing"
    await load_in_place(world, "sql", "/by/hand")
    assert (await world.ask("sql"), served(world).held_digest) == ("/store/bb", "bb")
    assert served(world).engine_id != old_id
    assert await running == "/store/aa", "the weights that it began with"
    await gone(world)
    assert world.in_workers == {"bb"}
    assert world.resolver.leased == {"aa", "bb"}, "for a rollback"
    (told,) = [event for event in world.told if isinstance(event, AdapterSwapped)]
    assert (told.name, told.before, told.after) == ("sql", "aa", "bb")
    await world.lifecycle.roll_back("sql")
    assert await world.ask("sql") == "/store/aa"


@runs
async def test_the_same_files_again_change_nothing() -> None:
    world = World({"/by/hand": "aa"})
    await load_in_place(world, "sql", "/by/hand")
    engine_id = served(world).engine_id
    assert (await load_in_place(world, "sql", "/by/hand")).reason is ChangeReason.UNCHANGED
    assert (served(world).engine_id, served(world).request) == (engine_id, world.table.lora_requests["sql"])
    assert (await world.ask("sql"), world.worker.loads.total(), world.told) == ("/store/aa", 1, [])


@runs
async def test_a_refresh_reads_the_path_again_and_polls_do_not() -> None:
    world = World({"/by/hand": "aa"})
    await load_in_place(world, "a name of its own", "/by/hand")
    world.resolver.has["/by/hand"] = Version("bb")
    await world.lifecycle.poll("a name of its own")
    assert await world.ask("a name of its own") == "/store/aa"
    assert (await world.lifecycle.refresh("a name of its own", expects="aa")).is_swap
    assert await world.ask("a name of its own") == "/store/bb"
    world.resolver.has["/by/hand"] = Version("cc")
    await world.lifecycle.poll("a name of its own")
    assert await world.ask("a name of its own") == "/store/bb"


@pytest.mark.parametrize("is_refused_by", ["resolver", "worker"])
@runs
async def test_weights_that_cannot_be_served_leave_the_old_ones(is_refused_by: str) -> None:
    world, refusal = World(), IncompatibleAdapter("shape")
    before = await world.serve("aa")
    world.resolver.has["/by/hand"] = refusal if is_refused_by == "resolver" else Version("bb")
    world.worker.broken = refusal
    with pytest.raises(IncompatibleAdapter):
        await load_in_place(world, "sql", "/by/hand")
    world.worker.broken = None
    assert await world.ask("sql") == "/store/aa"
    assert before.last_error is not None
    assert [(type(event), event.stage) for event in world.told] == [(NotServed, "update")]
    assert world.resolver.leased == {"aa"}
    while world.in_workers != {"aa"}:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("path", ["/by/hand", ELSEWHERE])
@runs
async def test_what_was_pinned_is_pinned_again(path: str) -> None:
    world = World({"/by/hand": "bb"}, slots=3)
    await world.serve("aa")
    await world.lifecycle.pin("sql")
    await load_in_place(world, "sql", path)
    assert served(world).is_pinned
    await world.settled()
    assert world.engine.pinned == {served(world).engine_id}


# --- a directory that only workers have ---


@runs
async def test_what_only_workers_have_takes_a_versions_place() -> None:
    world, _ = await serving("aa")
    for name in ("sql", "new"):
        await load_in_place(world, name, ELSEWHERE)
        adapter = served(world, name)
        assert (await world.ask(name), adapter.version, adapter.given_path) == (ELSEWHERE, None, None)
    await world.lifecycle.unload("new", block=False)
    await gone(world)
    assert world.in_workers == {"adapter"}
    world.resolver.has["/by/hand"] = Version("bb")
    await load_in_place(world, "sql", "/by/hand")
    assert await world.ask("sql") == "/store/bb"
