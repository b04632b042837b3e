"""Changes of a version in flight, in a server with two engines: whole in every engine, or nothing in any.

What running requests are computed with is `tests/vllm_patches/engine_core/test_moves_between_ids.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_plugins.errors import NoFreeSlot, OutOfMemory
from tests.lifecycle.simulated_engine import SimulatedEngine, ask_all
from tests.lifecycle.world import Version, World
from tests.virtual_time import runs


async def two_engines(**options: Any) -> tuple[World, SimulatedEngine, Any]:
    """A server of `sql`, its second engine, and the name's request, before another version is at the source."""
    world, second = World(**options), SimulatedEngine(**options)
    world.planner._ask = ask_all([world.engine, second])
    served = await world.serve("aa")
    world.resolver.has["sql"] = Version("bb")
    return world, second, served.request


async def begun(engine: SimulatedEngine, request: Any) -> asyncio.Task[str]:
    """A long request in one engine, which has begun."""
    running = asyncio.create_task(engine.run(request, 30, f"running-{id(engine)}"))
    while not engine.is_running(f"running-{id(engine)}"):
        await asyncio.sleep(0.001)
    return running


async def answers(engines: Iterable[SimulatedEngine], request: Any) -> set[str]:
    """The weights that the engines begin a request with."""
    return {await engine.run(request) for engine in engines}


def in_workers(engine: SimulatedEngine) -> set[str]:
    return {Path(path).name for path in engine.worker.paths.values()}


@runs
async def test_what_runs_moves_in_every_engine() -> None:
    world, second, old = await two_engines(slots=1)
    running = [await begun(engine, old) for engine in (world.engine, second)]
    await world.lifecycle.refresh("sql", moves=True)
    for engine in (world.engine, second):
        assert await answers([engine], world.table.lora_requests["sql"]) == {"/store/bb"}, "one slot for both"
        assert in_workers(engine) == {"bb"}
    assert await answers((world.engine, second), old) == {"/store/bb"}, "taken from the table before"
    await asyncio.gather(*running)
    await world.lifecycle.unload("sql", block=False)
    assert (in_workers(world.engine), in_workers(second), world.resolver.leased) == (set(), set(), set())


@runs
async def test_an_engine_that_cannot_load_leaves_all_as_they_were() -> None:
    world, second, old = await two_engines()
    running = await begun(world.engine, old)
    second.worker.broken, second.worker.broken_paths = OutOfMemory("no room"), {"/store/bb"}
    with pytest.raises(OutOfMemory):
        await world.lifecycle.refresh("sql", moves=True)
    await world.settled()
    assert world.table.lora_requests["sql"] is old
    assert await answers((world.engine, second), old) == {"/store/aa"}
    assert (in_workers(world.engine), in_workers(second), world.resolver.leased) == ({"aa"}, {"aa"}, {"aa"})
    assert await running == "/store/aa"


@pytest.mark.parametrize("after_s", [0.0, 0.0012, 0.004, 0.05, 0.1])
@pytest.mark.parametrize("pins", [False, True])
@runs
async def test_a_caller_who_leaves_leaves_one_version(after_s: float, pins: bool) -> None:
    """The table, the engines, the lease and the pin agree, however far the change had come."""
    world, second, old = await two_engines(delay_s=0.05)
    running = await begun(second, old)
    pushing = world.lifecycle.take("sql", SimpleNamespace(name="sql"), moves=True, pins=pins)  # type: ignore[arg-type]
    change = asyncio.create_task(pushing)
    await asyncio.sleep(after_s)
    change.cancel()
    await asyncio.wait([change])
    await asyncio.sleep(1)
    served = world.lifecycle.registry.require("sql")
    engines = (world.engine, second)
    assert await answers(engines, served.request) == await answers(engines, old) == {f"/store/{served.digest}"}
    assert [in_workers(engine) for engine in engines] == [{served.digest}] * 2
    assert world.resolver.leased == {"aa", served.digest}
    assert [engine.pinned for engine in engines] == [{served.engine_id} if served.is_pinned else set()] * 2
    assert served.is_pinned == (pins and served.digest == "bb")
    running.cancel()


@runs
async def test_who_leaves_during_the_move_has_changed_the_version() -> None:
    world, second, old = await two_engines()
    change, written = asyncio.create_task(world.lifecycle.refresh("sql", moves=True)), world.written
    while not world.engine.asked["lora_plugins_move"]:
        await asyncio.sleep(0.0001)
    change.cancel()
    await asyncio.wait([change])
    assert (change.cancelled(), world.written > written) == (True, True), "it is written down for the next start"
    await world.settled()
    assert await answers((world.engine, second), old) == {"/store/bb"}
    assert (in_workers(world.engine), in_workers(second)) == ({"bb"}, {"bb"})


@runs
async def test_a_rollback_in_flight_takes_the_pin_back() -> None:
    world, second, _ = await two_engines(slots=2)
    await world.lifecycle.pin("sql")
    running = await begun(second, world.table.lora_requests["sql"])
    for digest in ("bb", "aa"):
        change = world.lifecycle.refresh if digest == "bb" else world.lifecycle.roll_back
        await change("sql", moves=True)
        await world.settled()
        served = world.lifecycle.registry.require("sql")
        assert (served.digest, served.is_pinned) == (digest, True)
        for engine in (world.engine, second):
            assert (engine.pinned, in_workers(engine)) == ({served.engine_id}, {digest})
    running.cancel()


@runs
async def test_a_pinned_version_needs_room_beside_it() -> None:
    """As in every swap; the documentation says so."""
    world, second, _ = await two_engines(max_bytes=15)
    await world.lifecycle.pin("sql")
    with pytest.raises(NoFreeSlot):
        await world.lifecycle.refresh("sql", moves=True)
    served = world.lifecycle.registry.require("sql")
    assert (served.digest, served.is_pinned, second.pinned) == ("aa", True, {served.engine_id})
    await world.lifecycle.unpin("sql")
    await world.lifecycle.refresh("sql", moves=True)
    assert world.lifecycle.registry.require("sql").digest == "bb"
