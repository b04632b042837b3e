"""Copies of several API servers: a follower leases its own, and has the leader fetch those that lack."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.events import Events
from lora_plugins.lifecycle.api_server import ApiServer
from lora_plugins.lifecycle.followed_copies import FollowedCopies
from lora_plugins.lifecycle.leader import Frame
from lora_plugins.lifecycle.planner_client import PlannerClient
from lora_plugins.lifecycle.registry import Registry
from lora_plugins.lifecycle.stored_copies import Copies
from lora_plugins.store.leases import Leases
from lora_plugins.store.store import Store
from tests.lifecycle.bed import GOOD, LAST_BIT, Bed
from tests.lifecycle.world import Server
from tests.make import adapter_files
from tests.resolvers.sources.contract import content
from tests.resolvers.test_damage import flip
from tests.virtual_time import let_threads_take, runs


async def leases(store: Store, digest: str) -> bool:
    """Whether this process leases it, once threads have removed the leases that have ended."""
    for _ in range(4):
        await asyncio.sleep(0)
    return store.leases.is_ours(digest)


class Following:
    """The leader without a socket between: a follower's table is its table, and calls are made at once."""

    def __init__(self, leader: Bed) -> None:
        self.leader = leader
        self.asked: list[str] = []
        self.uses: list[int] = []

    @property
    def table(self) -> dict[str, Any]:
        return self.leader.world.table.lora_requests

    def used(self, engine_id: int) -> None:
        self.uses.append(engine_id)

    async def call(self, what: str, /, *, name: str, engine_id: int) -> Frame:
        self.asked.append(f"{what} {name}")
        return {"is_had": await self.leader.copies.have(name, engine_id)}


class Beside:
    """A leader with `sql` served, and a follower that has a store of its own at the same place."""

    def __init__(self, root: Path) -> None:
        self.leader = Bed(root)
        self.following = Following(self.leader)
        self.store = Store(root)
        resolver = self.leader.resolver.__class__(root, self.leader.source)
        resolver.store = self.store
        registry = Registry(self.leader.world.table, lambda _: None, self.store.blocks)
        planner = PlannerClient(self.leader.world.engine.ask, Events())
        server = ApiServer(registry, planner, Server(), resolver, Events())
        self.copies = FollowedCopies(server, self.following)  # type: ignore[arg-type]
        self.led = Copies(self.leader.world.lifecycle.server, self)  # type: ignore[arg-type]

    async def relieve(self) -> None:
        """As the leader has its only follower do."""
        await self.copies.relieve()

    @property
    def request(self) -> Any:
        return self.following.table["sql"]

    @property
    def leases(self) -> Leases:
        return self.store.leases


@pytest.fixture
def beside(tmp_path: Path) -> Beside:
    return Beside(tmp_path / "store")


@runs
async def test_a_request_leases_its_copy_without_asking_the_leader(beside: Beside) -> None:
    adapter = await beside.leader.load()
    for _ in range(2):
        async with beside.copies.using(beside.request) as taken:
            assert taken is adapter.request
            assert beside.leases.is_ours(adapter.digest)
    assert beside.leases.is_held(adapter.digest, "sql"), "a name's lease makes the next request's a moment"
    assert beside.following.asked == []
    assert beside.following.uses == [adapter.engine_id] * 2


@runs
async def test_a_name_that_stands_for_another_version_ends_its_lease(beside: Beside) -> None:
    adapter = await beside.leader.load()
    before, request = adapter.digest, beside.request
    async with beside.copies.using(request):
        beside.leader.source.answers["sql"] = adapter_files(revision="2")
        assert (await beside.leader.world.lifecycle.refresh("sql")).is_swap
        beside.copies.changed("sql", request)
        assert beside.leases.is_ours(before), "for the request that still runs"
    assert not await leases(beside.store, before)
    async with beside.copies.using(request) as taken:
        assert taken is request, "it was given its version before the swap"
    assert not await leases(beside.store, before), "the name does not stand for it"


@runs
async def test_room_is_made_by_ending_what_no_request_uses(beside: Beside) -> None:
    adapter = await beside.leader.load()
    digest, of_leader = adapter.digest, beside.leader.resolver.store.leases
    async with beside.copies.using(beside.request):
        await beside.led.relieve()
        assert beside.leases.is_ours(digest)
        assert not of_leader.is_ours(digest)
    assert not await leases(beside.store, digest)
    async with beside.copies.using(beside.request):
        pass
    await beside.led.relieve()
    assert not await leases(beside.store, digest)


@runs
async def test_a_copy_that_is_gone_is_fetched_by_the_leader(beside: Beside) -> None:
    adapter = await beside.leader.load()
    shutil.rmtree(adapter.version.path)
    async with beside.copies.using(beside.request) as taken:
        assert content(Path(taken.lora_path)) == GOOD
    assert beside.following.asked == ["have sql"]
    assert beside.leader.source.fetched == ["sql"] * 2


@runs
async def test_a_damaged_copy_is_replaced_before_the_engine_reads_it(beside: Beside) -> None:
    adapter = await beside.leader.load()
    before = beside.request
    async with beside.copies.using(before):
        pass
    flip(adapter.version.path / WEIGHTS_FILE, LAST_BIT)
    assert not beside.store.verify(adapter.digest)
    async with beside.copies.using(before) as taken:
        assert content(Path(taken.lora_path)) == GOOD
        assert taken is beside.request
        assert taken.lora_int_id != before.lora_int_id, "the engine loads it again"
    assert beside.following.asked == ["have sql"]


@runs
async def test_what_cannot_be_had_again_is_the_sources_error(beside: Beside) -> None:
    adapter = await beside.leader.load()
    shutil.rmtree(adapter.version.path)
    del beside.leader.source.answers["sql"]
    await beside.leader.world.planner.retire(adapter.engine_id)
    with pytest.raises(LoRAPluginsError, match="no such adapter at its source"):
        async with beside.copies.using(beside.request):
            pass


@runs
async def test_what_was_unloaded_meanwhile_is_the_engines_to_answer(beside: Beside) -> None:
    adapter = await beside.leader.load()
    request = beside.request
    await beside.leader.world.lifecycle.unload("sql", block=False)
    shutil.rmtree(adapter.version.path)
    async with beside.copies.using(request) as taken:
        assert taken is request


@runs
async def test_a_request_that_leaves_leaves_no_lease(beside: Beside) -> None:
    """A thread goes on, and leased the copy after the name had ended its leases: nobody ever ended this one."""
    adapter = await beside.leader.load()
    request = beside.request
    let_threads_take(0.01)
    asking = asyncio.create_task(beside.copies.using(request).__aenter__())
    await asyncio.sleep(0.015)
    asking.cancel()
    del beside.following.table["sql"]
    beside.copies.changed("sql", request)
    await asyncio.sleep(1)
    assert asking.cancelled()
    assert not beside.leases.is_ours(adapter.digest)
