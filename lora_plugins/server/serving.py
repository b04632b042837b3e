"""What all changes of what is served share: the names, the planners, the sources, how a version enters and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.events import Events
from lora_plugins.server.planner_client import PlannerClient
from lora_plugins.server.registry import Catalogue, Served, Version, not_served


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
        self, catalogue: Catalogue, planner: PlannerClient, *, engine: Engine, sources: Sources, events: Events
    ) -> None:
        self.catalogue = catalogue
        self.planner = planner
        self.changed: Callable[[], None] = lambda: None
        self._engine = engine
        self._sources = sources
        self._events = events
        self._retiring: set[asyncio.Task[None]] = set()

    def _known(self, name: str) -> Served:
        served = self.catalogue.get(name)
        if served is None:
            raise not_served(name)
        return served

    async def _enter(self, name: str, uri: str | None, version: Version) -> Served:
        request = self._engine.new_request(name, str(version.path))
        try:
            await self.planner.load(request, uri=uri)
        except BaseException:
            self._in_background(self.planner.retire(request.lora_int_id))  # nobody will ask for this id again
            self._release(name, version)
            raise
        served = Served(name, request, version, uri)
        self.catalogue.put(served)
        return served

    def not_loaded(self, request: Any) -> None:
        """What was resolved, and is in vLLM's table, cannot be loaded after all: serve it no longer."""
        served = self.catalogue.get(request.lora_name)
        if served is None or served.request is not request:
            return
        self.catalogue.take_out(served.name)
        if served.version is not None:
            self._release(served.name, served.version)
        self._in_background(self.planner.retire(request.lora_int_id))  # another engine may have it
        self.changed()

    def _release(self, name: str, version: Version) -> None:
        if not self.catalogue.needs(name, version.path):
            self._sources.release(name, version.path)

    def _let_go(
        self, served: Served, refusal: LoRAPluginsError | None = None, then: Callable[[], None] = lambda: None
    ) -> asyncio.Task[None]:
        """Free what the table has no more, once its last request has left: slots, host memory and leases.

        With a `refusal`, requests that are not admitted yet, or still come, are refused with it.
        """
        engine_id = served.request.lora_int_id
        self.catalogue.draining[engine_id] = served

        async def all_of_it() -> None:
            await self.planner.retire(engine_id, refusal)
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
