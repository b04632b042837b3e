"""To another version of what is served, and back, while requests run.

A name points to a version through vLLM's table of names. A new version gets an engine id of its own, is loaded beside
the old one, and takes its place in the table in one step: requests that run go on with the old one, and every later one
gets the new one. When the last request of the old one has left, it is removed from slots and host memory. Its prefix
cache is not used for the new one, as vLLM's cache keys hold the adapter's path (0.30: see lora_request.py).
"""

from __future__ import annotations

import time
from typing import Any

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.events import AdapterSwapped, Events, UpdateFailed
from lora_plugins.resolvers.versions import ResolvedAdapter
from lora_plugins.server.draining import Draining
from lora_plugins.server.engine import Engine
from lora_plugins.server.planner_client import PlannerClient
from lora_plugins.server.registry import Registry, ServedAdapter

KEPT_VERSIONS = 2


class Swapping:
    """Exchanges what a name stands for; the caller holds the name's lock."""

    def __init__(
        self, registry: Registry, planner: PlannerClient, draining: Draining, *, engine: Engine, events: Events
    ) -> None:
        self._registry = registry
        self._planner = planner
        self._draining = draining
        self._engine = engine
        self._events = events

    async def swap(self, adapter: ServedAdapter, version: ResolvedAdapter, uri: str | None = None) -> None:
        """Have new requests for this name enter the engine with `version`, which is leased for it.

        Raises:
            LoRAPluginsError: it cannot be loaded; the old one goes on, and the lease has ended.
        """
        before = adapter.version
        if before is not None and before.digest == version.digest:
            adapter.version = version
            return
        started, old_id = time.perf_counter(), adapter.engine_id
        request = self._engine.new_request(adapter.name, str(version.path), is_3d=version.is_3d)
        try:
            await self._load_beside(adapter, request, uri or adapter.uri)
        except BaseException:
            self._draining.release(adapter.name, version)
            raise
        previous = [kept for kept in adapter.versions if kept.digest != version.digest]
        adapter.request, adapter.version, adapter.last_error = request, version, None
        adapter.previous = previous[:KEPT_VERSIONS]
        self._registry.put(adapter)
        used_at = self._planner.used_at.get(old_id)
        if used_at is not None:
            self._planner.used_at[adapter.engine_id] = used_at
        self._draining.release(adapter.name, *previous[KEPT_VERSIONS:])
        self._draining.retire(old_id)
        self._report(adapter.name, "" if before is None else before.digest, version.digest, started)

    async def swap_in_place(self, request: Any) -> bool:
        """Load what vLLM will put into the place of a served name at once.

        `request`, vLLM's `LoRARequest` with `load_inplace`, gets an engine id of its own, so that what runs goes on
        with the weights that it began with. What was served before goes when its last request has left. Returns False
        where nothing is served under the name: it is no swap then, and nothing was done.

        Raises:
            LoRAPluginsError: it cannot be loaded; the old one goes on.
        """
        request.load_inplace = False  # else the workers would read it again
        before = self._registry.get(request.lora_name)
        if before is None:
            return False
        started = time.perf_counter()
        request.lora_int_id = self._engine.new_request(request.lora_name, request.lora_path).lora_int_id
        try:
            await self._load_beside(before, request, None)
        except LoRAPluginsError as error:
            self.failed(before, error)
            raise
        self._registry.expect(ServedAdapter(before.name, request, is_pinned=before.is_pinned))
        self._draining.begin(before)
        digest_or_path = before.request.lora_path if before.version is None else before.version.digest
        self._report(before.name, digest_or_path, request.lora_path, started)
        return True

    def failed(self, adapter: ServedAdapter, error: LoRAPluginsError) -> None:
        """Note that an adapter could not be updated; the old version goes on."""
        adapter.failed(error)
        self._events.emit(UpdateFailed(adapter.name, error))

    async def _load_beside(self, adapter: ServedAdapter, request: Any, uri: str | None) -> None:
        """Load what will take the place of `adapter`, pinned if that is; a failure leaves nothing in the workers."""
        try:
            await self._planner.load(request, uri=uri, wants_slot=False)
            if adapter.is_pinned:
                await self._planner.pin(request, uri=uri)
        except BaseException:
            self._draining.retire(request.lora_int_id)
            raise

    def _report(self, name: str, before: str, after: str, started: float) -> None:
        self._events.emit(AdapterSwapped(name, before, after, time.perf_counter() - started))
