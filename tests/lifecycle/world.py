"""An API server around the real lifecycle and planner, with a made-up worker and made-up resolver."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from lora_plugins.adapter.names import near
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.events import AdapterLoaded, Events
from lora_plugins.lifecycle.api_server import ApiServer
from lora_plugins.lifecycle.lifecycle import Lifecycle
from lora_plugins.lifecycle.planner_client import PlannerClient
from lora_plugins.lifecycle.registry import Registry, ServedAdapter
from lora_plugins.resolvers.chats import Chats
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.search import LookedUp
from lora_plugins.settings import Settings
from lora_plugins.store.blocked_names import Blocks
from lora_plugins.store.layout import Layout
from tests.lifecycle.simulated_engine import SimulatedEngine


@dataclass(frozen=True)
class Version:
    digest: str
    version: str = "1"
    source: str = "filesystem"
    uri: str = "file:///adapters/x"
    size_bytes: int = 10
    rank: int = 8
    warnings: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def path(self) -> Path:
        return Path("/store") / self.digest


@dataclass
class Request:
    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None

    @property
    def path(self) -> str:
        return self.lora_path


class FakeStore:
    """Has every version, undamaged."""

    max_bytes = 1 << 40

    def __init__(self, needed: set[tuple[str, str]]) -> None:
        self.needed = needed
        self.released: dict[str, float | None] = {}  # last uses, as their leases have ended
        self._root = TemporaryDirectory()
        self.layout = Layout(Path(self._root.name))
        self.layout.create()
        self.blocks = Blocks(self.layout)

    def release(self, name: Hashable, path: Path | str, *, used_at: float | None = None) -> None:
        if isinstance(name, str):
            self.released[Path(path).name] = used_at
            self.needed.remove((name, Path(path).name))

    def is_leased(self, name: str, path: Path) -> bool:
        return (name, path.name) in self.needed

    def has(self, path: Path) -> bool:
        return True

    def engine_path(self, digest: str, *, other_than: str = "") -> str:
        return f"/store/{digest}"

    def share(self, path: str, holder: Hashable) -> bool:
        return True

    def acquire_sound(self, digest: str, name: str) -> Path | None:
        self.needed.add((name, digest))
        return Path("/store") / digest

    def is_sound(self, digest: str) -> bool:
        return True

    def is_marked(self, digest: str) -> bool:
        return False


@dataclass
class FakeResolver:
    """Names, URIs and paths with the version that each has now; leases are held by path."""

    has: dict[str, Version | Exception] = field(default_factory=dict)
    served_under: dict[str, Version] = field(default_factory=dict)
    needed: set[tuple[str, str]] = field(default_factory=set)
    had: dict[str, set[str]] = field(default_factory=dict)
    versions: dict[str, Version] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    hung: set[str] = field(default_factory=set)
    settings: Settings = field(default_factory=Settings)
    sources: tuple[str, ...] = ("fake",)
    principal: Callable[[], Hashable] = lambda: None

    def __post_init__(self) -> None:
        self.store = FakeStore(self.needed)
        self.chats = Chats(self.settings, self.store.layout)

    async def resolve(self, text: str, base_path: str) -> Version | None:
        return await self.latest(text, None, base_path)

    async def look_up(self, text: str, base_path: str, uri: str | None = None) -> LookedUp:
        try:
            found = await (self.resolve(text, base_path) if uri is None else self.latest(text, uri, base_path))
        except LoRAPluginsError as error:
            return LookedUp(error=error)
        if found is None and uri is not None:
            return LookedUp(error=AdapterNotFound("nothing there", adapter=text))
        return LookedUp(resolved=found)

    async def latest(self, name: str, uri: str | None, base_path: str) -> Version | None:
        assert base_path == "/base"
        self.asked.append(uri or name)
        await asyncio.sleep(0.001)
        while (uri or name) in self.hung:
            await asyncio.sleep(1)
        found = self.has.get(uri or name)
        if isinstance(found, Exception):
            raise found
        if found is not None:
            self.needed.add((name, found.digest))
            self.served_under[name] = found
            self.versions[found.digest] = found
            self.had.setdefault(name, set()).add(found.digest)
        return found

    async def pushed(self, adapter: Any, base_path: str) -> Version | None:
        return await self.latest(adapter.name, None, base_path)

    async def snapshot(self, name: str, path: str, base_path: str) -> Version | None:
        return await self.latest(name, path, base_path)

    async def of_digest(self, name: str, digest_prefix: str, *, of_any_name: bool = False) -> Version | None:
        known = self.versions if of_any_name else self.had.get(name, ())
        found = next((self.versions[digest] for digest in known if digest.startswith(digest_prefix)), None)
        if found is not None:
            self.needed.add((name, found.digest))
        return found

    async def restored(self, name: str, uri: str | None, digest: str, place: str) -> Version | None:
        return None if place != self.place_of(None) else await self.of_digest(name, digest, of_any_name=True)

    def place_of(self, version: Version | None) -> str:
        return "" if version is not None and version.source == "pushed" else "s3 (s3://adapters)"

    @property
    def places(self) -> dict[str, str]:
        return {self.place_of(None): "s3"}

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

        self.host_places = 100

    def is_base_model(self, name: str) -> bool:
        return name == "base"

    def lock(self, name: str) -> asyncio.Lock:
        return self.locks[name]

    def new_request(self, name: str, path: str, base_name: str | None = None) -> Request:
        return Request(name, next(self.ids), path, base_name)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running[request_id].cancel()


class NameTable:
    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}


class World:
    """See the module; `has` are names, URIs and paths with what the resolver finds there: a version, or its digest."""

    def __init__(
        self,
        has: Mapping[str, Any] = MappingProxyType({}),
        *,
        drain_timeout_s: float = 60.0,
        resolver: Any = None,
        **options: Any,
    ) -> None:
        self.engine = SimulatedEngine(**options)
        self.worker = self.engine.worker
        self.resolver = resolver or FakeResolver()
        if has:
            self.resolver.has |= {place: Version(it) if isinstance(it, str) else it for place, it in has.items()}
        self.table = NameTable()
        self.server = Server()
        self.told: list[Any] = []
        self.written = 0
        served = resolver.known.last if resolver else self.resolver.served_under.get
        registry = Registry(
            self.table, served, self.resolver.store.blocks, lambda name: near(name, self.table.lora_requests)
        )
        events = resolver.events if resolver else Events()
        events.add(self.tell)
        sizes_bytes = resolver.known.sizes_bytes if isinstance(resolver, AdapterResolver) else {}
        self.planner = PlannerClient(self.engine.ask, events, lambda path: sizes_bytes.get(Path(path).name, 0))
        server = ApiServer(registry, self.planner, self.server, self.resolver, events, drain_timeout_s)
        self.lifecycle = Lifecycle(server)
        self.lifecycle.server.on_change = self.count

    def tell(self, event: Any) -> None:
        """Note what happens, but for loads that succeed, of which there are many."""
        if not isinstance(event, AdapterLoaded):
            self.told.append(event)

    def count(self) -> None:
        self.written += 1

    async def ask(self, name: str, seconds: float = 0.0, request_id: str | None = None) -> str:
        """What a request does: take what the table says, enter, run; returns the path of the weights."""
        async with self.lifecycle.copies.using(self.table.lora_requests[name]) as request:
            self.planner.used(request)
            await self.engine.run(request, seconds, request_id)
        return str(request.lora_path)

    async def load(self, name: str, uri: str | None = None) -> ServedAdapter:
        await self.lifecycle.load(name, uri)
        return self.lifecycle.registry.require(name)

    async def serve(self, *digests: str) -> ServedAdapter:
        """Serve `sql` in these versions, one after the other."""
        for number, digest in enumerate(digests):
            self.resolver.has["sql"] = Version(digest, version=digest)
            if not number:
                served = await self.load("sql")
            else:
                assert (await self.lifecycle.refresh("sql")).is_swap
        return served

    def start(self, name: str, seconds: float, request_id: str = "running") -> asyncio.Task[str]:
        task = asyncio.create_task(self.ask(name, seconds, request_id))
        self.server.running[request_id] = task  # type: ignore[assignment]
        return task

    async def settled(self) -> None:
        await asyncio.sleep(0.1)

    def assert_empty(self) -> None:
        """Nothing is served, loaded, on its way out or leased."""
        registry = self.lifecycle.registry
        assert (self.table.lora_requests, registry.all(), registry.draining) == ({}, [], {})
        assert (self.in_workers, self.engine.planner.state.adapters, self.resolver.leased) == (set(), {}, set())

    @property
    def in_workers(self) -> set[str]:
        return {Path(path).name for path in self.worker.paths.values()}


async def serving(*digests: str, **options: Any) -> tuple[World, ServedAdapter]:
    """A server of the name `sql`, which had these versions one after the other."""
    world = World(**options)
    return world, await world.serve(*digests)
