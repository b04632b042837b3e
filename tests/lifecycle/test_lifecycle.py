"""Load, unload, swap and roll back, with the real planner before a made-up worker and made-up sources."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    LoRAPluginsError,
    NoFreeSlot,
    SourceUnavailable,
    VersionMismatch,
)
from lora_plugins.events import AdapterSwapped, AdapterUnloaded, NotServed
from lora_plugins.lifecycle.registry import ANY_VERSION
from lora_plugins.lifecycle.swapping import ChangeReason, VersionChange
from lora_plugins.store.blocked_names import Blocks
from tests.lifecycle.world import Request, Version, World, serving
from tests.repetitions import times
from tests.virtual_time import runs

# --- load ---


@runs
async def test_a_loaded_name_is_served_from_its_source() -> None:
    world = World({"sql": "aa"})
    assert await world.lifecycle.load("sql") == VersionChange(None, "aa", ChangeReason.LOADED)
    served = world.lifecycle.registry.require("sql")
    assert (served.name, served.version, served.uri) == ("sql", Version("aa"), None)
    assert await world.ask("sql") == "/store/aa"
    assert await world.lifecycle.load("sql") == VersionChange("aa", "aa", ChangeReason.UNCHANGED)
    assert world.resolver.asked == ["sql"], "asked once"
    assert (world.worker.loads.total(), world.worker.uris) == (1, {"/store/aa": None})


@runs
async def test_from_a_uri_and_from_another_one() -> None:
    world = World({"s3://b/1": "aa", "s3://b/2": "bb"})
    served = await world.load("sql", "s3://b/1")
    assert served.uri == "s3://b/1"
    await world.lifecycle.load("sql", "s3://b/1")
    assert world.resolver.asked == ["s3://b/1"]
    assert await world.lifecycle.load("sql", "s3://b/2") == VersionChange("aa", "bb", ChangeReason.SWAPPED)
    assert (world.lifecycle.registry.get("sql"), served.uri) == (served, "s3://b/2")
    assert world.worker.uris == {"/store/aa": "s3://b/1", "/store/bb": "s3://b/2"}
    assert await world.ask("sql") == "/store/bb"


@pytest.mark.parametrize("at", ["source", "worker", "uri", "no source"])
@runs
async def test_a_load_that_fails_leaves_nothing_behind(at: str) -> None:
    world = World(broken=IncompatibleAdapter("rank 99") if at == "worker" else None)
    world.resolver.has["sql"] = SourceUnavailable("down") if at == "source" else Version("aa")
    if at == "no source":
        world.resolver.has.clear()
    with pytest.raises(LoRAPluginsError, match="at any source" if at == "no source" else ""):
        await world.lifecycle.load("sql", "s3://b/none" if at == "uri" else None)
    await world.settled()
    world.assert_empty()
    assert world.written == 0


@pytest.mark.parametrize("name", ["base", "../x", "", "a//b", "x" * 300])
@runs
async def test_a_name_that_nobody_can_have_is_refused(name: str) -> None:
    world = World()
    with pytest.raises(InvalidAdapter):
        await world.lifecycle.load(name, "s3://b/1")
    assert world.resolver.asked == []


@runs
async def test_a_load_waits_for_one_begun_by_a_request() -> None:
    """The answer said that the name was served, and then the engines refused what the request had found."""
    world = World({"sql": "aa"}, delay_s=1.0)
    world.worker.broken = IncompatibleAdapter("rank 99")
    await world.lifecycle.resolve("sql")
    with pytest.raises(IncompatibleAdapter):
        await world.lifecycle.load("sql")
    assert (world.lifecycle.registry.all(), world.resolver.leased) == ([], set())

    world.worker.broken = None
    await world.lifecycle.resolve("sql")
    assert (await world.lifecycle.load("sql")).reason is ChangeReason.UNCHANGED
    assert world.worker.loaded, "the answer waits for the load"


@runs
async def test_an_unload_waits_for_no_load_begun_by_a_request() -> None:
    world = World({"sql": "aa"}, delay_s=1_000.0)
    await world.lifecycle.resolve("sql")
    asked = asyncio.create_task(world.lifecycle.load("sql"))
    await asyncio.sleep(1)
    assert not asked.done()
    unloading = asyncio.create_task(world.lifecycle.unload("sql", block=False, timeout_s=0))
    await asyncio.sleep(1)
    assert world.lifecycle.registry.all() == [], "no request gets the name any more"
    for task in (asked, unloading):
        task.cancel()


@runs
async def test_a_load_that_waits_ends_no_later_block() -> None:
    """The load, which waits for the load of a request, began before: it ends no block that came since."""
    world = World({"sql": "aa"}, delay_s=1.0)
    await world.lifecycle.resolve("sql")
    asked = asyncio.create_task(world.lifecycle.load("sql"))
    await asyncio.sleep(0.1)
    await world.lifecycle.unload("sql", block=True)
    with pytest.raises(AdapterNotFound, match="blocked"):
        await asked
    await asyncio.sleep(10)
    assert "sql" in world.lifecycle.registry.blocked
    assert (world.lifecycle.registry.all(), world.resolver.leased) == ([], set())


@runs
async def test_loads_at_once_are_one() -> None:
    world = World({"sql": "aa"}, delay_s=0.02)
    changes = await asyncio.gather(*(world.lifecycle.load("sql") for _ in range(20)))
    assert sum(change.reason is ChangeReason.LOADED for change in changes) == 1
    assert world.worker.loads.total() == 1


@runs
async def test_a_load_whose_caller_goes_away_leaves_nothing_behind() -> None:
    world = World({"sql": "aa"}, delay_s=5)
    task = asyncio.create_task(world.lifecycle.load("sql"))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (world.table.lora_requests, world.resolver.leased) == ({}, set())
    await asyncio.sleep(6)  # what a thread has begun to load comes to its end
    world.assert_empty()


@runs
async def test_what_was_resolved_for_a_client_who_left_is_released() -> None:
    """It is in no registry, so that nothing else would end its lease."""
    world = World()
    world.resolver.needed.add(("sql", "aa"))
    world.resolver.on_abandoned(found_for_nobody("aa"))
    await world.settled()
    assert world.resolver.leased == set()


@runs
async def test_what_is_served_meanwhile_stays_leased() -> None:
    world = World({"sql": "aa"}, delay_s=5)
    loading = asyncio.create_task(world.lifecycle.load("sql"))
    await asyncio.sleep(0.05)
    world.resolver.on_abandoned(found_for_nobody("aa"))  # before the name is registered
    await loading
    await world.settled()
    assert world.resolver.leased == {"aa"}


def found_for_nobody(digest: str) -> Any:
    """A version of `sql` that was resolved for a client who has left."""
    return SimpleNamespace(name="sql", digest=digest, parts={}, path=Version(digest).path)


# --- unload ---


@runs
async def test_unload_waits_for_what_runs_and_frees_everything() -> None:
    world = World({"sql": "aa"})
    await world.lifecycle.load("sql")
    running = world.start("sql", 0.15)
    await asyncio.sleep(0.02)
    unloading = asyncio.create_task(world.lifecycle.unload("sql", block=False, timeout_s=5))
    await asyncio.sleep(0.02)
    assert "sql" not in world.table.lora_requests, "no new request gets it"
    assert [served.name for served in world.lifecycle.registry.draining.values()] == ["sql"]
    assert not unloading.done()
    assert await unloading
    assert await running == "/store/aa"
    world.assert_empty()
    (told,) = [event for event in world.told if isinstance(event, AdapterUnloaded)]
    assert (told.name, told.aborted) == ("sql", 0)
    assert told.drain_s >= 0.05


@runs
async def test_unloading_what_is_not_there_says_so() -> None:
    world = World()
    with pytest.raises(AdapterNotFound):
        await world.lifecycle.unload("sql", block=False, timeout_s=1)
    assert await world.lifecycle.unload("sql", block=True, timeout_s=1), "to block a name, it need not be there"
    assert world.lifecycle.registry.blocked.names() == {"sql"}


@runs
async def test_only_a_successful_load_unblocks_a_name() -> None:
    world = World({"sql": "aa"})
    await world.lifecycle.load("sql")
    await world.lifecycle.unload("sql", block=True, timeout_s=1)
    world.resolver.has["sql"] = SourceUnavailable("down")
    with pytest.raises(SourceUnavailable):
        await world.lifecycle.load("sql")
    assert world.lifecycle.registry.blocked.names() == {"sql"}
    world.resolver.has["sql"] = Version("aa")
    await world.lifecycle.load("sql")
    assert world.lifecycle.registry.blocked.names() == set()


DIGEST = "ab" * 32
REVISIONS = ("sql@main", f"sql@{DIGEST}", f"sql@{DIGEST[:8]}")


@runs
async def test_a_block_takes_every_revision_down() -> None:
    world = World({"sql@main": "cd" * 32, "other": "ef" * 32})
    await world.serve(DIGEST)
    await world.lifecycle.load("other")
    await world.lifecycle.load("sql@main")
    for name in REVISIONS[1:]:
        assert await world.lifecycle.load_version(name)
    assert await world.lifecycle.unload("sql", block=True, timeout_s=1)
    assert [one.name for one in world.lifecycle.registry.all()] == ["other"]
    assert world.in_workers == {"ef" * 32}


@runs
@pytest.mark.parametrize("name", ["sql", *REVISIONS])
async def test_no_way_but_its_own_load_serves_it(name: str) -> None:
    world = World()
    world.resolver.has |= dict.fromkeys(("sql", "sql@main"), Version(DIGEST))
    await world.serve(DIGEST)
    await world.lifecycle.unload("sql", block=True, timeout_s=1)
    asked = list(world.resolver.asked)
    ways: list[Any] = [
        world.lifecycle.prefetch,
        world.lifecycle.pin,
        world.lifecycle.refresh,
        world.lifecycle.roll_back,
    ]
    ways += [functools.partial(world.lifecycle.declare, uri=None), *[world.lifecycle.load] * (name != "sql")]
    for way in ways:
        with pytest.raises(AdapterNotFound, match=r"blocked.*load 'sql' again"):
            await way(name)
    assert (world.resolver.asked, world.lifecycle.registry.all()) == (asked, [])
    await world.lifecycle.load("sql")
    world.lifecycle.registry.blocked.refuse(name)


@runs
async def test_a_block_holds_on_every_server_of_the_store() -> None:
    one, other = World(), World()
    other.resolver.store.blocks = Blocks(one.resolver.store.layout)
    other.lifecycle.registry.blocked = other.resolver.store.blocks
    await other.serve(DIGEST)
    await one.lifecycle.unload("sql", block=True)
    with pytest.raises(AdapterNotFound, match="blocked"):
        other.lifecycle.registry.blocked.refuse(f"sql@{DIGEST}")
    await other.lifecycle.poll("sql")
    await other.settled()
    assert (other.in_workers, other.lifecycle.registry.all()) == (set(), [])
    one.resolver.has["sql"] = Version(DIGEST)
    await one.lifecycle.load("sql")
    other.lifecycle.registry.blocked.refuse("sql")


@runs
async def test_a_block_that_cannot_be_written_says_so() -> None:
    world, _ = await serving(DIGEST)
    root = world.resolver.store.layout.root
    root.rename(root.with_name(f"{root.name}-away"))
    with pytest.raises(SourceUnavailable, match="store that answers"):
        await world.lifecycle.unload("sql", block=True)
    root.with_name(f"{root.name}-away").rename(root)
    await world.settled()
    assert ("sql" in world.lifecycle.registry.blocked, world.in_workers) == (True, set()), "it holds in this server"


@runs
async def test_a_drain_ends_no_lease_of_a_load_under_way() -> None:
    for late in range(60):  # half a millisecond each, around the end of what runs
        world = World({"sql": "aa"})
        await world.lifecycle.load("sql")
        running = world.start("sql", 0.1)
        await asyncio.sleep(0.02)
        unloading = asyncio.create_task(world.lifecycle.unload("sql", block=False, timeout_s=5))
        await asyncio.sleep(0.065 + late * 0.0005)
        await world.lifecycle.load("sql")
        await asyncio.gather(running, unloading)
        await world.settled()
        assert world.resolver.leased == {"aa"}, late


@runs
async def test_a_version_of_two_names_is_leased_for_both() -> None:
    world = World({"sql": "aa", "also": "aa"})
    await world.lifecycle.load("sql")
    await world.lifecycle.load("also")
    await world.lifecycle.unload("sql", block=False, timeout_s=1)
    assert world.resolver.leased == {"aa"}
    await world.lifecycle.unload("also", block=False, timeout_s=1)
    assert world.resolver.leased == set()


# --- versions ---


@runs
async def test_running_requests_keep_their_version_through_a_swap() -> None:
    world, served = await serving("aa")
    running = world.start("sql", 0.15)
    await asyncio.sleep(0.02)
    world.resolver.has["sql"] = Version("bb", version="2")
    assert (await world.lifecycle.refresh("sql")).is_swap
    assert world.planner.used_at[served.request.lora_int_id] > 0, "the name has been used"
    assert await world.ask("sql") == "/store/bb"
    assert not running.done()
    assert world.in_workers == {"aa", "bb"}
    assert await running == "/store/aa"
    await world.settled()
    assert world.in_workers <= {"bb"}
    assert [kept.digest for kept in served.previous] == ["aa"]
    assert world.resolver.leased == {"aa", "bb"}, "the old one stays in the store for a rollback"
    (told,) = [event for event in world.told if isinstance(event, AdapterSwapped)]
    assert (told.name, told.before, told.after) == ("sql", "aa", "bb")


@runs
async def test_nothing_new_is_no_swap() -> None:
    world, served = await serving("aa")
    world.resolver.has["sql"] = Version("aa", version="touched")
    assert not (await world.lifecycle.refresh("sql")).is_swap
    assert served.version is not None
    assert served.version.version == "touched"
    assert world.told == []
    assert served.request.lora_int_id == 1


@pytest.mark.parametrize("found", [IncompatibleAdapter("rank 99"), SourceUnavailable("down"), None])
@runs
async def test_an_update_that_cannot_be_served_leaves_the_old_one(found: LoRAPluginsError | None) -> None:
    world, served = await serving("aa")
    if found is None:
        del world.resolver.has["sql"]
    else:
        world.resolver.has["sql"] = found
    with pytest.raises(LoRAPluginsError):
        await world.lifecycle.refresh("sql")
    assert await world.ask("sql") == "/store/aa"
    assert served.last_error is not None
    assert served.last_error[0].code == (found.code if found else "L002")
    assert [(type(event), event.stage) for event in world.told] == [(NotServed, "update")]
    world.resolver.has["sql"] = Version("bb")
    assert (await world.lifecycle.refresh("sql")).is_swap
    assert served.last_error is None


@runs
async def test_a_rollback_stays_until_the_next_refresh() -> None:
    world, served = await serving("aa", "bb")
    await world.lifecycle.roll_back("sql")
    assert (served.held_digest, await world.ask("sql")) == ("aa", "/store/aa")
    assert [kept.digest for kept in served.previous] == ["bb"]
    await world.lifecycle.poll("sql")
    assert await world.ask("sql") == "/store/aa", "the poller leaves it alone"
    assert (await world.lifecycle.refresh("sql")).is_swap
    assert (served.held_digest, await world.ask("sql")) == (None, "/store/bb")
    await world.lifecycle.roll_back("sql")
    world.resolver.has["s3://b/x"] = Version("cc")
    await world.lifecycle.load("sql", "s3://b/x")
    assert (served.held_digest, await world.ask("sql")) == (None, "/store/cc"), "another URI ends a rollback too"


@runs
async def test_a_rollback_to_a_version_by_its_digest() -> None:
    world, served = await serving("aa11")
    with pytest.raises(AdapterNotFound, match="no version before"):
        await world.lifecycle.roll_back("sql")
    for digest in ("bb22", "cc33"):
        world.resolver.has["sql"] = Version(digest)
        await world.lifecycle.refresh("sql")
    await world.lifecycle.roll_back("sql", "aa")
    assert served.held_digest == "aa11"
    elsewhere = "dd44" * 16
    world.resolver.versions[elsewhere] = Version(elsewhere)
    with pytest.raises(AdapterNotFound, match=r"no such version of this name since the start.*give all 64 characters"):
        await world.lifecycle.roll_back("sql", elsewhere[:63])
    await world.lifecycle.roll_back("sql", elsewhere)
    assert await world.ask("sql") == f"/store/{elsewhere}"
    with pytest.raises(AdapterNotFound, match="no such version in the store"):
        await world.lifecycle.roll_back("sql", "ee44" * 16)


@pytest.mark.parametrize("is_instant", [True, False])
@runs
async def test_many_swaps_under_load_leave_nothing(is_instant: bool) -> None:
    world, served = await serving("v0", delay_s=0.002, slots=2, is_instant=is_instant)
    stop, count = asyncio.Event(), times(200, short=100)
    answers: list[str] = []

    async def traffic() -> None:
        while not stop.is_set():
            answers.append(await world.ask("sql", 0.004))

    tasks = [asyncio.create_task(traffic()) for _ in range(5)]
    for number in range(1, count + 1):
        world.resolver.has["sql"] = Version(f"v{number}")
        assert (await world.lifecycle.refresh("sql")).is_swap
    stop.set()
    await asyncio.gather(*tasks)
    await world.settled()
    order = [int(Path(answer).name[1:]) for answer in answers]
    assert len(set(order)) > count / 4
    assert max(max(order[:at]) - order[at] for at in range(1, len(order))) <= 5, "old ones end soon"
    assert world.in_workers <= {f"v{count}"}
    assert world.resolver.leased == {f"v{number}" for number in range(count - 2, count + 1)}
    assert len(world.engine.planner.state.adapters) <= 1
    assert served.request.lora_int_id == count + 1


@runs
async def test_an_adapter_that_only_workers_have_is_not_refreshed() -> None:
    world = World()
    world.table.lora_requests["mine"] = Request("mine", 99, "/only/workers")
    with pytest.raises(InvalidAdapter, match="only the workers have"):
        await world.lifecycle.refresh("mine")
    await world.lifecycle.poll("mine")
    assert world.resolver.asked == []
    assert await world.lifecycle.unload("mine", block=False, timeout_s=1)
    assert world.table.lora_requests == {}


@runs
async def test_a_version_has_a_name_of_its_own() -> None:
    world = World()
    old, new, other = "aa" * 16, "bb" * 16, "cc" * 16
    await world.serve(old, new)
    world.resolver.versions[other] = Version(other)  # of another name
    pinned = await world.lifecycle.load_version(f"sql@{old[:8]}")
    assert pinned is not None
    assert await world.ask(pinned.name) == f"/store/{old}"
    assert await world.lifecycle.load_version(f"sql@{old[:8]}") is pinned
    for text in (f"sql@{other[:8]}", "sql@aa", "sql@v3", "sql", "sql@", f"nobody@{old}"):
        assert await world.lifecycle.load_version(text) is None
    await world.lifecycle.poll(pinned.name)
    await world.lifecycle.unload("sql", block=False, timeout_s=1)
    assert world.resolver.needed == {(pinned.name, old)}
    await world.lifecycle.unload(pinned.name, block=False, timeout_s=1)
    assert world.resolver.needed == set()


# --- tiers ---


@runs
async def test_pins_leave_one_slot_for_all_others() -> None:
    world = World({name: name for name in ("aa", "bb")}, slots=2)
    await world.lifecycle.load("aa")
    await world.lifecycle.load("bb")
    served = await world.lifecycle.pin("aa")
    assert served.is_pinned
    assert (await world.planner.states())(served.request.lora_int_id).is_pinned
    with pytest.raises(NoFreeSlot, match="2 slots, of which 1 are pinned"):
        await world.lifecycle.pin("bb")
    await world.lifecycle.unpin("aa")
    assert not (await world.planner.states())(served.request.lora_int_id).is_pinned
    await world.lifecycle.pin("bb")
    for change in (world.lifecycle.pin, world.lifecycle.unpin):
        with pytest.raises(AdapterNotFound):
            await change("nobody")


async def push(world: World, digest: str, **options: Any) -> VersionChange:
    world.resolver.has["sql"] = Version(digest)
    return await world.lifecycle.take("sql", SimpleNamespace(name="sql"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("kept_versions", [0, 1, 3])
@runs
async def test_a_push_keeps_so_many_earlier_versions(kept_versions: int, moves: bool) -> None:
    world, digests = World(), [f"{number}" * 64 for number in range(6)]
    for digest in digests:
        await push(world, digest, moves=moves, kept_versions=kept_versions)
    kept = digests[-1 - kept_versions : -1]
    assert [it.digest for it in world.lifecycle.registry.require("sql").previous] == kept[::-1]
    assert world.resolver.leased == {*kept, digests[-1]}, "the store may remove older ones"
    for digest in kept:
        assert await world.lifecycle.load_version(f"sql@{digest}")
        assert await world.ask(f"sql@{digest}") == f"/store/{digest}"


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("before", [None, "aa", "bb"])
@runs
async def test_a_push_that_cannot_be_pinned_serves_nothing(before: str | None, moves: bool) -> None:
    world = World({"chat": "cc"}, slots=2)
    await world.load("chat")
    await world.lifecycle.pin("chat")
    if before is not None:
        await push(world, before)
    with pytest.raises(NoFreeSlot, match="2 slots, of which 1 are pinned"):
        await push(world, "bb", moves=moves, pins=True)
    await world.settled()
    served = world.lifecycle.registry.get("sql")
    assert (served and (served.digest, served.is_pinned)) == (before and (before, False))
    assert world.in_workers == world.resolver.leased == {"cc", before} - {None}
    await world.lifecycle.unpin("chat")
    await push(world, "bb", moves=moves, pins=True)
    served = world.lifecycle.registry.require("sql")
    assert (served.digest, served.is_pinned, world.engine.pinned) == ("bb", True, {served.engine_id})


@runs
async def test_a_move_that_fails_leaves_no_pin() -> None:
    world = World()
    await push(world, "aa")
    world.worker.broken = IncompatibleAdapter("shape")
    with pytest.raises(IncompatibleAdapter):
        await push(world, "bb", moves=True, pins=True)
    assert (world.lifecycle.registry.require("sql").is_pinned, world.engine.pinned) == (False, set())


@runs
async def test_prefetch_serves_and_loads_again() -> None:
    world = World({name: name for name in ("aa", "bb")}, places=1)
    served = await world.lifecycle.prefetch("aa")
    await world.lifecycle.prefetch("aa")
    assert world.worker.loads["/store/aa"] == 1
    await world.lifecycle.prefetch("bb")
    assert not (await world.planner.states())(served.request.lora_int_id).is_loaded
    assert await world.lifecycle.prefetch("aa") is served
    assert (await world.planner.states())(served.request.lora_int_id).is_loaded
    assert world.worker.loads["/store/aa"] == 2


@runs
async def test_a_prefetch_without_room_fails() -> None:
    world = World({name: name for name in ("aa", "bb")}, max_bytes=25)
    await world.lifecycle.load("aa")
    await world.lifecycle.pin("aa")
    world.worker.size_bytes = 20
    with pytest.raises(NoFreeSlot, match="1 pinned adapters with 10 bytes"):
        await world.lifecycle.prefetch("bb")
    await world.settled()
    assert (world.in_workers, world.resolver.leased) == ({"aa"}, {"aa"})


# --- the version that a caller expects ---


@pytest.mark.parametrize("expected", ["bb" * 32, ANY_VERSION])
@pytest.mark.parametrize("change", ["load", "refresh", "roll_back"])
@runs
async def test_another_version_than_expected_changes_nothing(change: str, expected: str) -> None:
    world, _ = await serving("aa" * 32, "bb" * 32, slots=3)
    world.resolver.has |= {"sql": Version("cc" * 32), "s3://b/x": Version("dd" * 32)}
    call = {
        "load": lambda expects: world.lifecycle.load("sql", "s3://b/x", expects=expects),
        "refresh": lambda expects: world.lifecycle.refresh("sql", expects=expects),
        "roll_back": lambda expects: world.lifecycle.roll_back("sql", expects=expects),
    }[change]
    for other in ("aa" * 32, "bb" * 31, ""):
        with pytest.raises(VersionMismatch, match="bb" * 32):
            await call(other)
    assert await world.ask("sql") == f"/store/{'bb' * 32}"
    await call(expected)
    assert await world.ask("sql") != f"/store/{'bb' * 32}"


@runs
async def test_version_of_a_name_that_is_not_served_is_none() -> None:
    world = World({"sql": "aa"})
    for expects in ("aa", ANY_VERSION):
        with pytest.raises(VersionMismatch, match="no version"):
            await world.lifecycle.load("sql", expects=expects)
    assert world.lifecycle.registry.all() == []
