"""Freeing what is no longer served: slots, host memory and leases, once the last request for it has left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.events import AdapterUnloaded, Events
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.versions import ResolvedAdapter
from lora_plugins.server.engine import Engine
from lora_plugins.server.planner_client import PlannerClient
from lora_plugins.server.registry import Registry, ServedAdapter

_ABORT_S = 10.0


class Draining:
    """Frees versions, engine ids and whole adapters of one API server."""

    def __init__(
        self, registry: Registry, planner: PlannerClient, *, engine: Engine, resolver: AdapterResolver, events: Events
    ) -> None:
        self._registry = registry
        self._planner = planner
        self._engine = engine
        self._resolver = resolver
        self._events = events
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, name: str, *versions: ResolvedAdapter) -> None:
        """End the leases of versions that the name does not need any more."""
        for version in versions:
            if not self._registry.needs(name, version):
                self._resolver.store.release(name, version.path)

    def forget(self, name: str, version: ResolvedAdapter) -> None:
        """End the lease of a version that was resolved for a client who has left, unless the name has it all the same.

        Under the name's lock: whoever resolves it at this moment, too, has registered it by then.
        """

        async def release() -> None:
            async with self._engine.lock(name):
                self.release(name, version)

        self._in_background(release())

    def retire(self, engine_id: int) -> None:
        """Have the engines evict what new requests do not ask for any more; nobody waits for it."""
        self._in_background(self._planner.retire(engine_id))

    def begin(
        self,
        adapter: ServedAdapter,
        refusal: LoRAPluginsError | None = None,
        when_free: Callable[[], None] = lambda: None,
    ) -> asyncio.Task[None]:
        """Free all of an adapter that the registry has no more, once its last request has left.

        With a `refusal`, requests that are not admitted yet, or still come, are refused with it.
        """
        self._registry.draining[adapter.engine_id] = adapter

        async def free() -> None:
            await self._planner.retire(adapter.engine_id, refusal)
            del self._registry.draining[adapter.engine_id]
            self.release(adapter.name, *adapter.versions)
            when_free()

        return self._in_background(free())

    async def drain(self, adapter: ServedAdapter, refusal: LoRAPluginsError, timeout_s: float) -> bool:
        """As `begin`, and after `timeout_s` end the requests that still run; returns whether all is free."""
        started, aborted = time.perf_counter(), 0

        def report() -> None:
            self._events.emit(AdapterUnloaded(adapter.name, time.perf_counter() - started, aborted))

        task = self.begin(adapter, refusal, report)
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            running = (await self._planner.places())(adapter.engine_id).running
            aborted = len(running)
            await self._engine.abort(list(running))
            done, _ = await asyncio.wait([task], timeout=_ABORT_S)
        return bool(done)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task
