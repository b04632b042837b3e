"""Served mixtures: they follow their parts, each caller has a few, and they leave before other adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_plugins.errors import AdapterNotFound, InvalidAdapter, NoFreeSlot
from lora_plugins.events import Events
from lora_plugins.lifecycle import idle_adapters
from lora_plugins.lifecycle.reconciler import Reconciler
from lora_plugins.lifecycle.served_file import ServedFile
from lora_plugins.settings import Settings
from tests.lifecycle.world import Version, World
from tests.virtual_time import runs

MIXTURE = "sql*0.7+style*0.3"


def mixture_of(world: World, sql: str = "aa", digest: str = "m1", name: str = MIXTURE) -> None:
    """Let the mixture be made of this version of `sql`."""
    world.resolver.has[name] = Version(digest, source="mixture", parts={"sql": sql, "style": "cc"})


async def mixing() -> World:
    world = World({"sql": "aa"})
    mixture_of(world)
    await world.load("sql")
    await world.lifecycle.resolve(MIXTURE)
    return world


@runs
async def test_a_swap_of_a_part_ends_its_mixtures() -> None:
    world = await mixing()
    running = world.start(MIXTURE, 5)
    await asyncio.sleep(1)
    world.resolver.has["sql"] = Version("bb", version="2")
    mixture_of(world, "bb", "m2")
    await world.lifecycle.refresh("sql")
    assert MIXTURE not in world.table.lora_requests
    await world.lifecycle.resolve(MIXTURE)
    assert await world.ask(MIXTURE) == "/store/m2"
    assert await running == "/store/m1", "it ends whole"
    await world.settled()
    assert world.in_workers == {"bb", "m2"}
    assert world.resolver.leased == {"aa", "bb", "m2"}, "aa for a rollback"


@runs
async def test_what_changes_no_part_ends_no_mixture() -> None:
    world = await mixing()
    world.resolver.has |= {"style": Version("cc"), "other": Version("dd")}
    before = world.table.lora_requests[MIXTURE]
    await world.load("style")
    await world.load("other")
    await world.lifecycle.refresh("sql")
    await world.lifecycle.remove("other")
    assert world.table.lora_requests[MIXTURE] is before


@pytest.mark.parametrize("how", ["remove", "unload", "roll_back", "take"])
@runs
async def test_other_changes_of_a_part_end_mixtures_too(how: str) -> None:
    world = await mixing()
    lifecycle = world.lifecycle
    if how == "roll_back":
        world.resolver.has["sql"] = Version("bb")
        await lifecycle.refresh("sql")
        mixture_of(world, "bb", "m2")
        await lifecycle.resolve(MIXTURE)
        await lifecycle.roll_back("sql")
    elif how == "take":
        world.resolver.has["sql"] = Version("bb")
        await lifecycle.take("sql", SimpleNamespace(name="sql"))  # type: ignore[arg-type]
    else:
        await (lifecycle.remove("sql") if how == "remove" else lifecycle.unload("sql", block=False))
    assert MIXTURE not in world.table.lora_requests
    await world.settled()
    assert not {"m1", "m2"} & world.resolver.leased


@runs
async def test_a_part_that_changes_meanwhile_is_mixed_again() -> None:
    """The second request comes after the swap, and joins the first, which has begun before."""
    world = await mixing()
    await world.lifecycle.remove(MIXTURE)
    world.resolver.hung.add(MIXTURE)
    asked = [asyncio.create_task(world.lifecycle.resolve(MIXTURE))]
    await asyncio.sleep(0.5)
    world.resolver.has["sql"] = Version("bb", version="2")
    await world.lifecycle.refresh("sql")
    asked.append(asyncio.create_task(world.lifecycle.resolve(MIXTURE)))
    world.resolver.hung.clear()
    while world.resolver.asked.count(MIXTURE) < 3:  # the version of before has been found, and is of before
        await asyncio.sleep(0.0001)
    mixture_of(world, "bb", "m2")
    assert {Path((await one).lora_path).name for one in asked} == {"m2"}
    await world.settled()
    assert "m1" not in world.resolver.leased


@runs
async def test_a_mixture_that_changes_itself_is_drained_once() -> None:
    """A part is swapped while the mixture's own refresh loads a version, made of the part of before."""
    world = await mixing()
    mixture_of(world, "aa", "m9")
    world.resolver.hung.add(MIXTURE)
    refreshing = asyncio.create_task(world.lifecycle.refresh(MIXTURE))
    await asyncio.sleep(0.5)
    world.resolver.has["sql"] = Version("bb", version="2")
    await world.lifecycle.refresh("sql")
    assert MIXTURE not in world.table.lora_requests
    world.resolver.hung.clear()
    await refreshing
    await world.settled()
    assert (list(world.table.lora_requests), world.lifecycle.registry.draining) == (["sql"], {})
    assert (world.in_workers, world.resolver.leased) == ({"bb"}, {"aa", "bb"})


@runs
async def test_a_block_of_a_part_ends_running_mixtures() -> None:
    world = await mixing()
    running = world.start(MIXTURE, 100)
    await asyncio.sleep(1)
    assert await world.lifecycle.unload("sql", block=True, timeout_s=2)
    assert world.server.aborted == ["running"]
    assert running.cancelled()
    with pytest.raises(AdapterNotFound, match="load 'sql' again"):
        world.lifecycle.registry.blocked.refuse(MIXTURE)
    await world.lifecycle.load("sql")
    world.lifecycle.registry.blocked.refuse(MIXTURE)


@runs
async def test_a_block_by_another_server_takes_mixtures_down() -> None:
    world = await mixing()
    blocks = world.lifecycle.registry.blocked
    blocks.hold("style")
    blocks.write("style")
    await world.lifecycle.poll(MIXTURE)
    await world.settled()
    assert list(world.table.lora_requests) == ["sql"]


@runs
async def test_a_block_while_a_mixture_is_made_holds() -> None:
    world = await mixing()
    await world.lifecycle.remove(MIXTURE)
    world.resolver.hung.add(MIXTURE)
    asked = asyncio.create_task(world.lifecycle.resolve(MIXTURE))
    await asyncio.sleep(0.5)
    await world.lifecycle.unload("sql", block=True, timeout_s=2)
    world.resolver.hung.clear()
    with pytest.raises(AdapterNotFound, match="load 'sql' again"):
        await asked
    await world.settled()
    world.assert_empty()


@runs
async def test_copies_of_unloaded_mixtures_leave_the_store_first() -> None:
    """The only copy of a pushed version is older than all mixtures of a flood."""
    world = await mixing()
    await world.lifecycle.remove(MIXTURE)
    await world.lifecycle.remove("sql")
    await world.settled()
    assert world.resolver.store.released == {"m1": 0.0, "aa": None}


def sourced(world: World, count: int) -> list[str]:
    """The names of so many mixtures, which the sources have."""
    names = [f"sql*0.{number}5" for number in range(count)]
    for name in names:
        mixture_of(world, "aa", f"m-{name}", name)
    return names


@runs
async def test_a_caller_has_a_bounded_number_of_mixtures() -> None:
    world, most = World(), idle_adapters._MOST_MIXTURES
    names = sourced(world, most + 2)
    for name in names[:most]:
        await world.lifecycle.resolve(name)
    world.planner.used_at.update({world.table.lora_requests[name].lora_int_id: 10.0 for name in names[:most]})
    oldest = names[3]
    world.planner.used_at[world.table.lora_requests[oldest].lora_int_id] = 1.0
    await world.lifecycle.resolve(names[most])
    assert {*names[: most + 1]} - {*world.table.lora_requests} == {oldest}
    world.resolver.principal = lambda: "team-a"
    await world.lifecycle.resolve(names[most + 1])
    assert len(world.table.lora_requests) == most + 1, "of another caller"
    world.resolver.principal = lambda: None
    running = [world.start(name, 10, name) for name in names[: most + 1] if name != oldest]
    await asyncio.sleep(1)
    with pytest.raises(NoFreeSlot, match="32 mixtures of one caller in use at once"):
        await world.lifecycle.resolve(oldest)
    assert f"m-{oldest}" not in world.resolver.leased
    await asyncio.gather(*running)
    await world.lifecycle.resolve(oldest)


@runs
async def test_a_mixture_stays_until_its_first_request_comes() -> None:
    """The request is still on its way to the engine, and older mixtures are idle."""
    world, most = World(), idle_adapters._MOST_MIXTURES
    names = sourced(world, most + 2)
    for name in names[:most]:
        await world.lifecycle.resolve(name)
        await world.ask(name)
    for name in names[most:]:
        await world.lifecycle.resolve(name)
    assert [*world.table.lora_requests] == names[2:]


@runs
async def test_mixtures_count_as_used_longest_ago() -> None:
    world = await mixing()
    world.planner.used_at.update({it.lora_int_id: 10.0 for it in world.table.lora_requests.values()})
    idle = [one for it in world.lifecycle.registry.all() for one in world.lifecycle.copies.idle._spare_leases(it)]
    assert idle == [("aa", "sql", 10.0), ("m1", MIXTURE, 0.0)]


@runs
async def test_a_mixtures_name_is_no_adapters_own() -> None:
    world = await mixing()
    world.resolver.has["/adapters/x"] = Version("dd")
    for refused in (world.lifecycle.load_by_path("sql*0.5", "/adapters/x"), world.lifecycle.roll_back(MIXTURE)):
        with pytest.raises(InvalidAdapter, match="the name of a mixture"):
            await refused
    with pytest.raises(InvalidAdapter, match="the name of a mixture"):
        world.lifecycle.check_pushed("sql*0.5", None)
    assert await world.lifecycle.load_version(f"{MIXTURE}@{'a' * 12}") is None


@runs
async def test_a_restart_forgets_mixtures_that_nobody_pinned(tmp_path: Path) -> None:
    world, file = await mixing(), ServedFile(tmp_path / "served.json")
    mixture_of(world, "aa", "m3", "sql*0.5")
    starting = Reconciler(world.lifecycle, Settings(preload=("sql*0.50",)), file, Events())
    await starting.start()
    assert list(world.table.lora_requests) == ["sql", MIXTURE, "sql*0.5"], "by its canonical name"
    await world.lifecycle.pin("sql*0.5")
    await world.lifecycle.written()
    assert [one.name for one in file.read()] == ["sql", "sql*0.5"]
