"""What all changes of what is served share: the names, the gate, the sources, and how a version enters and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from lora_plugins.events import Events
from lora_plugins.server.gate import Gate
from lora_plugins.server.served import Catalogue, Place, Served, Version, not_served
from lora_plugins.server.staging import Rpc


class Sources(Protocol):
    """Where versions come from (`SourceChain`)."""

    async def resolve(self, text: str, base_path: str) -> Version | None: ...
    async def resolve_uri(self, name: str, uri: str, base_path: str) -> Version: ...
    async def latest(self, name: str, uri: str | None, base_path: str) -> Version | None: ...
    async def of_digest(self, name: str, digest_prefix: str, *, of_any_name: bool = False) -> Version | None: ...
    def release(self, name: str, path: Any) -> None: ...


class Engine(Protocol):
    """What an API server can do with its engine, beside sending requests."""

    @property
    def base_path(self) -> str: ...
    @property
    def slots(self) -> int: ...
    def is_base_model(self, name: str) -> bool: ...
    def lock(self, name: str) -> Any: ...
    def new_request(self, name: str, path: str) -> Any: ...
    async def abort(self, request_ids: list[str]) -> None: ...


class Serving:
    """What one API server serves, with what it takes to change it.

    Attributes:
        changed: called after every change of what is served.
    """

    def __init__(
        self, catalogue: Catalogue, gate: Gate, rpc: Rpc, *, engine: Engine, sources: Sources, events: Events
    ) -> None:
        self.catalogue = catalogue
        self.gate = gate
        self.changed: Callable[[], None] = lambda: None
        self._rpc = rpc
        self._engine = engine
        self._sources = sources
        self._events = events
        self._retiring: set[asyncio.Task[None]] = set()
        self._pinning: list[str] = []  # names that are about to be pinned

    async def places(self) -> Callable[[Served], Place]:
        """Where each adapter is now, asked of all workers at once."""
        workers = await self._rpc("lora_plugins_residency", ())
        return lambda served: Place.of(served.request.lora_int_id, workers)

    def _known(self, name: str) -> Served:
        served = self.catalogue.get(name)
        if served is None:
            raise not_served(name)
        return served

    async def _enter(self, name: str, uri: str | None, version: Version) -> Served:
        request = self._request(name, version, uri)
        try:
            async with self.gate.held(request):
                served = Served(name, request, version, uri)
                self.catalogue.put(served)
        except BaseException:
            self._in_background(self.gate.retire(request.lora_int_id))  # nobody will ask for this id again
            self._release(name, version)
            raise
        return served

    def _request(self, name: str, version: Version, uri: str | None) -> Any:
        request = self._engine.new_request(name, str(version.path))
        if uri is not None:
            self.gate.uris[request.lora_int_id] = uri
        return request

    def _release(self, name: str, version: Version) -> None:
        if not self.catalogue.needs(name, version.path):
            self._sources.release(name, version.path)

    def _let_go(self, served: Served, then: Callable[[], None] = lambda: None) -> asyncio.Task[None]:
        """Free what the table has no more, once its last request has left: slots, host memory and leases."""
        engine_id = served.request.lora_int_id
        self.catalogue.draining[engine_id] = served

        async def all_of_it() -> None:
            await self.gate.retire(engine_id)
            del self.catalogue.draining[engine_id]
            for version in (served.version, *served.previous):
                if version is not None:
                    self._release(served.name, version)
            then()

        return self._in_background(all_of_it())

    def _in_background(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task
