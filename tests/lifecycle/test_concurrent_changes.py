"""Lifecycle of one server that meet each other: what one waits for, another one may do first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_plugins import process as process_module
from lora_plugins.errors import AdapterNotFound, NoFreeSlot, SourceUnavailable
from lora_plugins.events import Events
from lora_plugins.lifecycle.reconciler import Reconciler
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.lifecycle.served_file import ServedFile
from lora_plugins.lifecycle.swapping import ChangeReason
from lora_plugins.process import Process
from lora_plugins.settings import Settings
from lora_plugins.store.blocked_names import Blocks
from lora_plugins.vllm_patches.api_server import openai_serving_models
from tests.lifecycle.world import Request, Version, World, serving
from tests.virtual_time import let_threads_take, runs


@runs
async def test_pins_at_once_leave_a_slot_for_all_others() -> None:
    world = World({name: name for name in ("sql", "chat", "other")}, slots=2)
    await asyncio.gather(*map(world.lifecycle.load, world.resolver.has))
    outcomes = await asyncio.gather(*(world.lifecycle.pin(name) for name in ("sql", "chat")), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if isinstance(outcome, Exception)] == [NoFreeSlot]
    assert len(world.engine.pinned) == 1
    pinned = next(served.name for served in world.lifecycle.registry.all() if served.is_pinned)
    await world.lifecycle.unpin(pinned)
    for name in ("chat", "sql"):
        await world.lifecycle.pin(name)
        await world.lifecycle.unpin(name)


@runs
async def test_pins_are_restored_as_far_as_slots_allow(tmp_path: Path) -> None:
    world, file = World(slots=2), ServedFile(tmp_path / "served.json")
    names = ("sql", "chat", "other")
    world.resolver.has |= {name: Version(name) for name in names}
    file.write(map(astuple, [DesiredAdapter(name, is_pinned=True) for name in names]))
    await Reconciler(world.lifecycle, Settings(restore="1"), file, Events()).start()
    assert len(world.engine.pinned) == 1
    assert [await world.ask(name) for name in names] == [f"/store/{name}" for name in names]


@runs
async def test_a_block_waits_for_no_look_up_of_the_name() -> None:
    world = World()
    digest = "aa" * 32
    await world.serve(digest)
    await world.lifecycle.load_version(f"sql@{digest}")
    asked = asyncio.get_running_loop().time()
    async with world.server.lock("sql"), world.server.lock(f"sql@{digest}"):  # the poller's, while its source is slow
        assert not await world.lifecycle.unload("sql", block=True), "not all is free"
        assert asyncio.get_running_loop().time() - asked <= 0.05
        for name in ("sql", f"sql@{digest}"):
            with pytest.raises(AdapterNotFound, match="blocked"):
                await world.ask(name)
        assert Blocks(world.resolver.store.layout).names() == {"sql"}
    await world.settled()
    world.assert_empty()


@runs
async def test_a_block_is_answered_while_requests_run() -> None:
    world, _ = await serving("aa", drain_timeout_s=1)
    running, asked = world.start("sql", 30, "r1"), asyncio.get_running_loop().time()
    await asyncio.sleep(0.02)
    assert not await world.lifecycle.unload("sql", block=True)
    assert asyncio.get_running_loop().time() - asked <= 0.05
    await asyncio.sleep(2)
    assert (running.cancelled(), world.in_workers) == (True, set()), "ended behind it, as without a block"


@runs
async def test_a_name_blocked_during_its_load_stays_blocked() -> None:
    world = World({"sql": "aa"})
    load = asyncio.create_task(world.lifecycle.load("sql"))
    await asyncio.sleep(0)
    assert await world.lifecycle.unload("sql", block=True, timeout_s=1)
    with pytest.raises(AdapterNotFound, match="blocked"):
        await load
    assert world.lifecycle.registry.blocked.names() == {"sql"}
    assert world.lifecycle.registry.all() == []


@runs
@pytest.mark.parametrize("comes", ["a poll", "a block of another name"])
async def test_nothing_undoes_a_load_that_ends_a_block(comes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the load and the end of its block, the name is served and blocked."""
    world, _ = await serving("aa")
    await world.lifecycle.unload("sql", block=True, timeout_s=1)
    to_thread, disk = asyncio.to_thread, asyncio.Event()

    async def late(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if function == world.lifecycle.registry.blocked.lift:
            await disk.wait()
        return await to_thread(function, *arguments, **options)

    monkeypatch.setattr(asyncio, "to_thread", late)
    load = asyncio.create_task(world.lifecycle.load("sql"))
    while world.lifecycle.registry.get("sql") is None:
        await asyncio.sleep(0.001)
    if comes == "a poll":
        await world.lifecycle.poll("sql")
    else:
        await world.lifecycle.unload("other", block=True, timeout_s=1)
    disk.set()
    await load
    await world.settled()
    assert [served.name for served in world.lifecycle.registry.all()] == ["sql"]
    world.lifecycle.registry.blocked.refuse("sql")


class Unload:
    """vLLM's endpoint, on its own class, over a made-up server."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels

        monkeypatch.setattr(process_module, "_process", process := Process(Settings()))
        process.is_manager_patched = True
        openai_serving_models.patch()
        self._models = OpenAIServingModels.__new__(OpenAIServingModels)
        self._models.engine_client = SimpleNamespace(vllm_config=SimpleNamespace(lora_config="there"))
        self._models.lora_requests = world.table.lora_requests
        self._models.lora_resolver_lock = world.server.locks
        self._models.lora_plugins_lifecycle = world.lifecycle

    def __call__(self, name: str) -> asyncio.Task[Any]:
        return asyncio.create_task(self._models.unload_lora_adapter(SimpleNamespace(lora_name=name)))


@runs
async def test_unloading_frees_a_concurrent_load_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    unload = Unload(world, monkeypatch)
    await world.serve("aa")
    async with world.server.lock("sql"):
        task = unload("sql")
        await asyncio.sleep(0.01)
        world.resolver.has["/by/hand"] = Version("hand")
        await world.lifecycle.load_by_path("sql", "/by/hand")
    assert "removed successfully" in await task
    await world.settled()
    world.assert_empty()


@runs
async def test_unloading_frees_a_concurrently_resolved_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    unload = Unload(world, monkeypatch)
    async with world.server.lock("sql"):
        task = unload("sql")
        await asyncio.sleep(0.01)
        found = await world.resolver.resolve("sql", "/base") or Version("aa")
        world.resolver.needed.add(("sql", "aa"))
        world.resolver.served_under["sql"] = found
        request = world.server.new_request("sql", "/store/aa")
        await world.planner.load(request)
        world.table.lora_requests["sql"] = request
    assert "removed successfully" in await task
    await world.settled()
    world.assert_empty()


@runs
async def test_unloading_what_is_not_there_stays_vllms_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    unload = Unload(world, monkeypatch)
    assert (await unload("sql")).error.code == 404
    world.table.lora_requests["sql"] = Request("sql", 5, "/by/hand")
    assert "removed successfully" in await unload("sql")
    assert (await unload("sql")).error.code == 404
    with pytest.raises(AdapterNotFound):
        await world.lifecycle.unload("sql", block=False, timeout_s=1)


@runs
@pytest.mark.parametrize("fault", ["an outage", "no source", "a client that leaves"])
async def test_a_refresh_that_fails_leaves_a_version_fixed(fault: str) -> None:
    """Else the poller undid the rollback, and a fetch in need of room took the only copy of a pushed version."""
    world, served = await serving("aa", "bb")
    await world.lifecycle.roll_back("sql")
    if fault == "an outage":
        world.resolver.has["sql"] = SourceUnavailable("no answer")
        with pytest.raises(SourceUnavailable):
            await world.lifecycle.refresh("sql")
    elif fault == "no source":
        del world.resolver.has["sql"]
        with pytest.raises(AdapterNotFound, match="at its source any more"):
            await world.lifecycle.refresh("sql")
    else:
        world.resolver.hung.add("sql")
        refresh = asyncio.create_task(world.lifecycle.refresh("sql"))
        await asyncio.sleep(0.5)
        assert served.held_digest == "aa", "what the list for the next start says meanwhile"
        refresh.cancel()
        await asyncio.wait([refresh])
    assert (served.held_digest, await world.ask("sql")) == ("aa", "/store/aa")


@runs
async def test_loads_that_end_one_block_leave_one_another() -> None:
    """All have seen the block, which the first ended."""
    world, served = await serving("aa")
    await world.lifecycle.unload("sql", block=True, timeout_s=1)
    changes = await asyncio.gather(*(world.lifecycle.load("sql") for _ in range(3)))
    assert [change.reason for change in changes] == [ChangeReason.LOADED, *[ChangeReason.UNCHANGED] * 2]
    assert world.lifecycle.registry.require("sql") is not served


@runs
async def test_a_load_that_its_client_leaves_is_written_down() -> None:
    world, _ = await serving("aa")
    await world.lifecycle.unload("sql", block=True, timeout_s=1)
    let_threads_take(0.05)
    written = world.written
    load = asyncio.create_task(world.lifecycle.load("sql"))
    await asyncio.sleep(0.16)
    assert world.lifecycle.registry.get("sql") is not None
    load.cancel()
    await asyncio.sleep(1)
    assert (load.cancelled(), world.written) == (True, written + 1)
    assert await world.ask("sql") == "/store/aa"


@pytest.mark.parametrize("change", ["pin", "unpin"])
@runs
async def test_a_client_that_leaves_a_pin_or_unpin_pins_nothing(change: str) -> None:
    world, served = await serving("aa", "bb", slots=2)  # not in a slot yet
    if change == "unpin":
        await world.lifecycle.pin("sql")
    changing = asyncio.create_task(getattr(world.lifecycle, change)("sql"))
    await asyncio.sleep(0.001 if change == "pin" else 0)
    changing.cancel()
    await world.settled()
    assert (served.is_pinned, world.engine.pinned) == (False, set())


@runs
async def test_a_load_behind_a_block_of_the_same_moment_holds() -> None:
    """The load saw the block, and took the lock before the unload of the block, which then undid the load."""
    world, _ = await serving("aa")
    block = asyncio.create_task(world.lifecycle.unload("sql", block=True, timeout_s=1))
    load = asyncio.create_task(world.lifecycle.load("sql"))
    await asyncio.gather(block, load)
    await world.settled()
    world.lifecycle.registry.blocked.refuse("sql")
    assert await world.ask("sql") == "/store/aa"
    assert (world.in_workers, world.lifecycle.registry.draining) == ({"aa"}, {})
