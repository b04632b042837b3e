"""Load, unload, swap and roll back, with the real planner before a made-up worker and made-up sources."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.adapter.names import adapter_id
from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    LoRAPluginsError,
    NoFreeSlot,
    SourceUnavailable,
)
from lora_plugins.events import AdapterReady, AdapterSwapped, AdapterUnloaded, Events, LoadRefused, UpdateFailed
from lora_plugins.server.lifecycle import Lifecycle
from lora_plugins.server.planner_client import PlannerClient
from lora_plugins.server.registry import Registry, ServedAdapter
from lora_plugins.server.swapping import KEPT_VERSIONS
from tests.server.simulated_engine import SimulatedEngine
from tests.virtual_time import runs


@dataclass(frozen=True)
class Version:
    digest: str
    version: str = "1"
    source: str = "filesystem"
    uri: str = "file:///adapters/x"
    size_bytes: int = 10
    rank: int = 8

    @property
    def path(self) -> Path:
        return Path("/store") / self.digest


@dataclass(frozen=True)
class Request:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class Sources:
    """Names and URIs with the version that each has now; leases are held by path."""

    has: dict[str, Version | LoRAPluginsError] = field(default_factory=dict)
    served_under: dict[str, Version] = field(default_factory=dict)
    needed: set[tuple[str, str]] = field(default_factory=set)
    had: dict[str, set[str]] = field(default_factory=dict)
    store: dict[str, Version] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def resolve(self, text: str, base_path: str) -> Version | None:
        return await self.latest(text, None, base_path)

    async def resolve_uri(self, name: str, uri: str, base_path: str) -> Version:
        found = await self.latest(name, uri, base_path)
        if found is None:
            raise AdapterNotFound("nothing there", adapter=name)
        return found

    async def latest(self, name: str, uri: str | None, base_path: str) -> Version | None:
        assert base_path == "/base"
        self.asked.append(uri or name)
        await asyncio.sleep(0.001)
        found = self.has.get(uri or name)
        if isinstance(found, LoRAPluginsError):
            raise found
        if found is not None:
            self.needed.add((name, found.digest))
            self.served_under[name] = found
            self.store[found.digest] = found
            self.had.setdefault(name, set()).add(found.digest)
        return found

    async def of_digest(self, name: str, digest_prefix: str, *, of_any_name: bool = False) -> Version | None:
        known = self.store if of_any_name else self.had.get(name, ())
        found = next((self.store[digest] for digest in known if digest.startswith(digest_prefix)), None)
        if found is not None:
            self.needed.add((name, found.digest))
        return found

    def release(self, name: str, path: Path) -> None:
        self.needed.remove((name, path.name))

    @property
    def leased(self) -> set[str]:
        return {digest for _, digest in self.needed}


class Server:
    def __init__(self) -> None:
        self.base_path = "/base"
        self.ids = itertools.count(1)
        self.locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.aborted: list[str] = []
        self.running: dict[str, asyncio.Task[None]] = {}

    def is_base_model(self, name: str) -> bool:
        return name == "base"

    def lock(self, name: str) -> asyncio.Lock:
        return self.locks[name]

    def new_request(self, name: str, path: str) -> Request:
        return Request(name, next(self.ids), path)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running[request_id].cancel()


class Table:
    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}


class World:
    def __init__(self, *, drain_timeout_s: float = 60.0, **options: Any) -> None:
        self.engine = SimulatedEngine(**options)
        self.worker = self.engine.worker
        self.sources = Sources()
        self.table = Table()
        self.server = Server()
        self.told: list[Any] = []
        self.written = 0
        registry = Registry(self.table, self.sources.served_under.get)
        self.planner = PlannerClient(self.engine.ask, Events(self.tell))
        self.lifecycle = Lifecycle(
            registry,
            self.planner,
            engine=self.server,
            sources=self.sources,
            events=Events(self.tell),
            drain_timeout_s=drain_timeout_s,
        )
        self.lifecycle.on_change = self.count

    def tell(self, event: Any) -> None:
        """Note what happens, but for loads, of which there are many."""
        if not isinstance(event, AdapterReady | LoadRefused):
            self.told.append(event)

    def count(self) -> None:
        self.written += 1

    async def ask(self, name: str, seconds: float = 0.0, request_id: str | None = None) -> str:
        """What a request does: take what the table says, enter, run; returns the path of the weights."""
        request = self.table.lora_requests[name]
        self.planner.used(request)
        await self.engine.run(request, seconds, request_id)
        return str(request.lora_path)

    def start(self, name: str, seconds: float, request_id: str = "running") -> asyncio.Task[str]:
        task = asyncio.create_task(self.ask(name, seconds, request_id))
        self.server.running[request_id] = task  # type: ignore[assignment]
        return task

    async def settled(self) -> None:
        await asyncio.sleep(0.1)

    @property
    def in_workers(self) -> set[str]:
        return {Path(path).name for path in self.worker.paths.values()}


# --- load ---


@runs
async def test_a_loaded_name_is_served_from_its_source() -> None:
    world = World()
    world.sources.has["sql"] = Version("aa")
    served, is_new = await world.lifecycle.load("sql")
    assert (served.name, is_new, served.version, served.uri) == ("sql", True, Version("aa"), None)
    assert await world.ask("sql") == "/store/aa"
    assert (await world.lifecycle.load("sql")) == (served, False)
    assert world.sources.asked == ["sql"], "asked once"
    assert world.worker.loads.total() == 1


@runs
async def test_from_a_uri_and_from_another_one() -> None:
    world = World()
    world.sources.has |= {"s3://b/1": Version("aa"), "s3://b/2": Version("bb")}
    served, _ = await world.lifecycle.load("sql", "s3://b/1")
    assert served.uri == "s3://b/1"
    await world.lifecycle.load("sql", "s3://b/1")
    assert world.sources.asked == ["s3://b/1"]
    again, is_new = await world.lifecycle.load("sql", "s3://b/2")
    assert (again is served, is_new, again.uri) == (True, False, "s3://b/2")
    assert await world.ask("sql") == "/store/bb"


@pytest.mark.parametrize("at", ["source", "worker", "uri"])
@runs
async def test_a_load_that_fails_leaves_nothing_behind(at: str) -> None:
    world = World(broken=IncompatibleAdapter("rank 99") if at == "worker" else None)
    world.sources.has["sql"] = SourceUnavailable("down") if at == "source" else Version("aa")
    with pytest.raises(LoRAPluginsError):
        await world.lifecycle.load("sql", "s3://b/none" if at == "uri" else None)
    await world.settled()
    assert world.table.lora_requests == {}
    assert world.lifecycle.registry.all() == []
    assert world.sources.leased == set()
    assert world.in_workers == set()
    assert world.written == 0


@pytest.mark.parametrize("name", ["base", "../x", "", "a//b", "x" * 300])
@runs
async def test_a_name_that_nobody_can_have_is_refused(name: str) -> None:
    world = World()
    with pytest.raises(InvalidAdapter):
        await world.lifecycle.load(name, "s3://b/1")
    assert world.sources.asked == []


@runs
async def test_loads_at_once_are_one() -> None:
    world = World(delay_s=0.02)
    world.sources.has["sql"] = Version("aa")
    results = await asyncio.gather(*(world.lifecycle.load("sql") for _ in range(20)))
    assert sum(is_new for _, is_new in results) == 1
    assert world.worker.loads.total() == 1


@runs
async def test_a_load_whose_caller_goes_away_leaves_nothing_behind() -> None:
    world = World(delay_s=5)
    world.sources.has["sql"] = Version("aa")
    task = asyncio.create_task(world.lifecycle.load("sql"))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert world.table.lora_requests == {}
    assert world.sources.leased == set()
    await asyncio.sleep(6)  # what a thread has begun to load comes to its end
    assert world.in_workers == set()
    assert world.engine.planner.adapters == {}


# --- unload ---


@runs
async def test_unload_waits_for_what_runs_and_frees_everything() -> None:
    world = World()
    world.sources.has["sql"] = Version("aa")
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
    assert world.in_workers == set()
    assert world.sources.leased == set()
    assert world.lifecycle.registry.draining == {}
    (told,) = [event for event in world.told if isinstance(event, AdapterUnloaded)]
    assert (told.name, told.aborted) == ("sql", 0)
    assert told.drain_s >= 0.05


@runs
async def test_after_the_deadline_what_runs_is_ended() -> None:
    world = World()
    world.sources.has["sql"] = Version("aa")
    await world.lifecycle.load("sql")
    running = world.start("sql", 30, "r1")
    await asyncio.sleep(0.02)
    assert await world.lifecycle.unload("sql", block=False, timeout_s=0.05)
    assert world.server.aborted == ["r1"]
    assert running.cancelled()
    assert world.in_workers == set()
    assert next(event for event in world.told if isinstance(event, AdapterUnloaded)).aborted == 1


@runs
async def test_unloading_what_is_not_there_says_so() -> None:
    world = World()
    with pytest.raises(AdapterNotFound):
        await world.lifecycle.unload("sql", block=False, timeout_s=1)
    assert await world.lifecycle.unload("sql", block=True, timeout_s=1), "to block a name, it need not be there"
    assert world.lifecycle.registry.blocked == {"sql"}


@runs
async def test_a_blocked_name_is_free_again_when_it_is_loaded_and_only_then() -> None:
    world = World()
    world.sources.has["sql"] = Version("aa")
    await world.lifecycle.load("sql")
    await world.lifecycle.unload("sql", block=True, timeout_s=1)
    world.sources.has["sql"] = SourceUnavailable("down")
    with pytest.raises(SourceUnavailable):
        await world.lifecycle.load("sql")
    assert world.lifecycle.registry.blocked == {"sql"}
    world.sources.has["sql"] = Version("aa")
    await world.lifecycle.load("sql")
    assert world.lifecycle.registry.blocked == set()


@runs
async def test_loaded_again_while_it_drains_it_keeps_its_lease() -> None:
    world = World()
    world.sources.has["sql"] = Version("aa")
    await world.lifecycle.load("sql")
    running = world.start("sql", 0.1)
    await asyncio.sleep(0.02)
    unloading = asyncio.create_task(world.lifecycle.unload("sql", block=False, timeout_s=5))
    await asyncio.sleep(0.02)
    await world.lifecycle.load("sql")
    await asyncio.gather(running, unloading)
    assert world.sources.leased == {"aa"}
    assert await world.ask("sql") == "/store/aa"


@runs
async def test_one_version_under_two_names_is_leased_until_both_are_gone() -> None:
    world = World()
    world.sources.has |= {"sql": Version("aa"), "also": Version("aa")}
    await world.lifecycle.load("sql")
    await world.lifecycle.load("also")
    await world.lifecycle.unload("sql", block=False, timeout_s=1)
    assert world.sources.leased == {"aa"}
    await world.lifecycle.unload("also", block=False, timeout_s=1)
    assert world.sources.leased == set()


# --- versions ---


async def serving(world: World, *digests: str) -> ServedAdapter:
    """The name `sql`, which had these versions one after the other."""
    world.sources.has["sql"] = Version(digests[0], version=digests[0])
    served, _ = await world.lifecycle.load("sql")
    for digest in digests[1:]:
        world.sources.has["sql"] = Version(digest, version=digest)
        assert await world.lifecycle.refresh("sql")
    return served


@runs
async def test_a_swap_lets_what_runs_go_on_and_gives_the_new_one_to_the_next() -> None:
    world = World()
    served = await serving(world, "aa")
    running = world.start("sql", 0.15)
    await asyncio.sleep(0.02)
    world.sources.has["sql"] = Version("bb", version="2")
    assert await world.lifecycle.refresh("sql")
    assert world.planner.used_at[served.request.lora_int_id] > 0, "the name has been used"
    assert await world.ask("sql") == "/store/bb"
    assert not running.done()
    assert world.in_workers == {"aa", "bb"}
    assert await running == "/store/aa"
    await world.settled()
    assert world.in_workers <= {"bb"}
    assert [kept.digest for kept in served.previous] == ["aa"]
    assert world.sources.leased == {"aa", "bb"}, "the old one stays in the store for a rollback"
    (told,) = [event for event in world.told if isinstance(event, AdapterSwapped)]
    assert (told.name, told.before, told.after) == ("sql", "aa", "bb")


@runs
async def test_nothing_new_is_no_swap() -> None:
    world = World()
    served = await serving(world, "aa")
    world.sources.has["sql"] = Version("aa", version="touched")
    assert not await world.lifecycle.refresh("sql")
    assert served.version is not None
    assert served.version.version == "touched"
    assert world.told == []
    assert served.request.lora_int_id == 1


@pytest.mark.parametrize("found", [IncompatibleAdapter("rank 99"), SourceUnavailable("down"), None])
@runs
async def test_an_update_that_cannot_be_served_leaves_the_old_one(found: LoRAPluginsError | None) -> None:
    world = World()
    served = await serving(world, "aa")
    if found is None:
        del world.sources.has["sql"]
    else:
        world.sources.has["sql"] = found
    with pytest.raises(LoRAPluginsError):
        await world.lifecycle.refresh("sql")
    assert await world.ask("sql") == "/store/aa"
    assert served.last_error is not None
    assert served.last_error[0].code == (found.code if found else "L002")
    assert [type(event) for event in world.told] == [UpdateFailed]
    world.sources.has["sql"] = Version("bb")
    assert await world.lifecycle.refresh("sql")
    assert served.last_error is None


@runs
async def test_an_update_that_no_worker_can_load_leaves_the_old_one_and_nothing_else() -> None:
    world = World()
    await serving(world, "aa")
    world.worker.broken = IncompatibleAdapter("shape")
    world.sources.has["sql"] = Version("bb")
    with pytest.raises(IncompatibleAdapter):
        await world.lifecycle.refresh("sql")
    world.worker.broken = None
    await world.settled()
    assert world.sources.leased == {"aa"}
    assert world.in_workers == {"aa"}
    assert await world.ask("sql") == "/store/aa"


@runs
async def test_a_rollback_is_one_call_and_holds_until_the_next_refresh() -> None:
    world = World()
    served = await serving(world, "aa", "bb")
    await world.lifecycle.roll_back("sql")
    assert (served.held_digest, await world.ask("sql")) == ("aa", "/store/aa")
    assert [kept.digest for kept in served.previous] == ["bb"]
    await world.lifecycle.poll("sql")
    assert await world.ask("sql") == "/store/aa", "the poller leaves it alone"
    assert await world.lifecycle.refresh("sql")
    assert (served.held_digest, await world.ask("sql")) == (None, "/store/bb")


@runs
async def test_a_rollback_to_a_version_by_its_digest() -> None:
    world = World()
    served = await serving(world, "aa11", "bb22", "cc33")
    await world.lifecycle.roll_back("sql", "aa")
    assert served.held_digest == "aa11"
    world.sources.store["dd44"] = Version("dd44")
    await world.lifecycle.roll_back("sql", "dd4")
    assert await world.ask("sql") == "/store/dd44"
    with pytest.raises(AdapterNotFound, match="no such version in the store"):
        await world.lifecycle.roll_back("sql", "ee")


@runs
async def test_with_nothing_before_it_there_is_no_rollback() -> None:
    world = World()
    await serving(world, "aa")
    with pytest.raises(AdapterNotFound, match="no version before"):
        await world.lifecycle.roll_back("sql")


@runs
async def test_only_so_many_versions_are_kept() -> None:
    world = World()
    digests = [f"{number:02x}" for number in range(8)]
    served = await serving(world, *digests)
    await world.settled()
    assert [kept.digest for kept in served.previous] == digests[-2 : -2 - KEPT_VERSIONS : -1]
    assert world.sources.leased == set(digests[-1 - KEPT_VERSIONS :])
    assert world.in_workers <= {digests[-1]}


@pytest.mark.parametrize("is_instant", [True, False])
@runs
async def test_two_hundred_swaps_under_load_fail_nobody_and_leave_nothing(is_instant: bool) -> None:
    world = World(delay_s=0.002, slots=2, is_instant=is_instant)
    served = await serving(world, "v0")
    stop = asyncio.Event()
    answers: list[str] = []

    async def traffic() -> None:
        while not stop.is_set():
            answers.append(await world.ask("sql", 0.004))

    tasks = [asyncio.create_task(traffic()) for _ in range(5)]
    for number in range(1, 201):
        world.sources.has["sql"] = Version(f"v{number}")
        assert await world.lifecycle.refresh("sql")
    stop.set()
    await asyncio.gather(*tasks)
    await world.settled()
    order = [int(Path(answer).name[1:]) for answer in answers]
    assert len(set(order)) > 50
    assert max(max(order[:at]) - order[at] for at in range(1, len(order))) <= 5, "old ones end soon"
    assert world.in_workers <= {"v200"}
    assert world.sources.leased == {"v198", "v199", "v200"}
    assert len(world.engine.planner.adapters) <= 1
    assert served.request.lora_int_id == 201


@runs
async def test_what_was_loaded_by_path_has_no_versions_to_look_for() -> None:
    world = World()
    world.table.lora_requests["mine"] = Request("mine", 99, "/by/hand")
    with pytest.raises(InvalidAdapter, match="loaded by its path"):
        await world.lifecycle.refresh("mine")
    await world.lifecycle.poll("mine")
    assert world.sources.asked == []
    assert await world.lifecycle.unload("mine", block=False, timeout_s=1)
    assert world.table.lora_requests == {}


@runs
async def test_a_version_has_a_name_of_its_own() -> None:
    world = World()
    old, new, other = "aa" * 16, "bb" * 16, "cc" * 16
    await serving(world, old, new)
    world.sources.store[other] = Version(other)  # of another name
    pinned = await world.lifecycle.load_version(f"sql@{old[:8]}")
    assert pinned is not None
    assert await world.ask(pinned.name) == f"/store/{old}"
    assert await world.lifecycle.load_version(f"sql@{old[:8]}") is pinned
    for text in (f"sql@{other[:8]}", "sql@aa", "sql@v3", "sql", "sql@", f"nobody@{old}"):
        assert await world.lifecycle.load_version(text) is None
    await world.lifecycle.poll(pinned.name)
    await world.lifecycle.unload("sql", block=False, timeout_s=1)
    assert world.sources.needed == {(pinned.name, old)}
    await world.lifecycle.unload(pinned.name, block=False, timeout_s=1)
    assert world.sources.needed == set()


# --- tiers ---


@runs
async def test_pins_leave_one_slot_for_all_others() -> None:
    world = World(slots=2)
    world.sources.has |= {name: Version(name) for name in ("aa", "bb")}
    await world.lifecycle.load("aa")
    await world.lifecycle.load("bb")
    served = await world.lifecycle.pin("aa")
    assert served.is_pinned
    assert (await world.planner.places())(served.request.lora_int_id).pinned
    with pytest.raises(NoFreeSlot, match="2 slots, of which 1 are pinned"):
        await world.lifecycle.pin("bb")
    await world.lifecycle.unpin("aa")
    assert not (await world.planner.places())(served.request.lora_int_id).pinned
    await world.lifecycle.pin("bb")
    for change in (world.lifecycle.pin, world.lifecycle.unpin):
        with pytest.raises(AdapterNotFound):
            await change("nobody")


@runs
async def test_a_pinned_one_is_pinned_in_its_new_version_too() -> None:
    world = World(slots=3)
    served = await serving(world, "aa")
    await world.lifecycle.pin("sql")
    world.sources.has["sql"] = Version("bb")
    await world.lifecycle.refresh("sql")
    await world.settled()
    assert world.engine.pinned == {served.request.lora_int_id}
    assert served.is_pinned


@runs
async def test_prefetch_serves_and_loads_again() -> None:
    world = World(places=1)
    world.sources.has |= {name: Version(name) for name in ("aa", "bb")}
    served = await world.lifecycle.prefetch("aa")
    await world.lifecycle.prefetch("aa")
    assert world.worker.loads["/store/aa"] == 1
    await world.lifecycle.prefetch("bb")
    assert not (await world.planner.places())(served.request.lora_int_id).host
    assert await world.lifecycle.prefetch("aa") is served
    assert (await world.planner.places())(served.request.lora_int_id).host
    assert world.worker.loads["/store/aa"] == 2


@runs
async def test_a_prefetch_for_which_there_is_no_room_says_so() -> None:
    world = World(max_bytes=25)
    world.sources.has |= {name: Version(name) for name in ("aa", "bb")}
    await world.lifecycle.load("aa")
    await world.lifecycle.pin("aa")
    world.worker.size_bytes = 20
    with pytest.raises(NoFreeSlot, match="1 pinned adapters with 10 bytes"):
        await world.lifecycle.prefetch("bb")
    await world.settled()
    assert (world.in_workers, world.sources.leased) == ({"aa"}, {"aa"})


@runs
async def test_workers_are_told_what_an_adapter_came_from() -> None:
    world = World()
    world.sources.has |= {"aa": Version("aa"), "s3://b/1": Version("bb"), "s3://b/2": Version("cc")}
    await world.lifecycle.load("aa")
    await world.lifecycle.load("sql", "s3://b/1")
    await world.lifecycle.load("sql", "s3://b/2")
    assert world.worker.uris == {"/store/aa": None, "/store/bb": "s3://b/1", "/store/cc": "s3://b/2"}


def test_the_catalogue_follows_vllms_table() -> None:
    table, versions = Table(), {"sql": Version("aa")}
    registry = Registry(table, versions.get)
    table.lora_requests["sql"] = Request("sql", 1, "/store/aa")
    first = registry.get("sql")
    assert first is not None
    assert first.version == Version("aa")
    assert registry.get("sql") is first
    table.lora_requests["sql"] = Request("sql", 2, "/by/hand")
    second = registry.get("sql")
    assert second is not None
    assert (second.version, second is first) == (None, False)
    del table.lora_requests["sql"]
    assert (registry.get("sql"), registry.all()) == (None, [])


def test_two_names_never_have_one_id() -> None:
    seen: dict[int, str] = {}
    names = (f"adapter-{number}" for number in itertools.count())
    second = next(name for name in names if seen.setdefault(adapter_id(name), name) != name)
    first = seen[adapter_id(second)]
    registry = Registry(Table(), {}.get)
    ids = [registry.adapter_id(name) for name in (first, second, "sql", first, second)]
    assert ids[0] == adapter_id(first) == adapter_id(second)
    assert len({*ids}) == 3
    assert ids[:2] == ids[3:]
    assert all(1 <= number < 2**31 for number in ids)
