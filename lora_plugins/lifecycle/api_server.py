"""The parts that serve adapters in one API server, and what all changes share: freeing a version, pausing a name.

Runs in the API server's event loop; `vllm_patches/api_server/server_lifecycle.py` makes the one `ApiServer` of a
process. `lifecycle.py`, `swapping.py` and `stored_copies.py` call it with an adapter that leaves the registry, and
the adapter's slots, host memory and leases are freed in the background.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.events import AdapterUnloaded, Events
from lora_plugins.lifecycle.background_tasks import background
from lora_plugins.lifecycle.planner_client import PlannerClient
from lora_plugins.lifecycle.registry import Registry, ServedAdapter
from lora_plugins.resolvers.known_versions import ResolvedAdapter
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.store.disk_errors import store_errors

ABORT_S = 10.0  # engines take so long at most to end requests, or to evict an adapter without requests


class VllmServer(Protocol):
    """The calls to vLLM's own objects, which `vllm_patches/api_server/server_lifecycle.py` implements.

    `base_path`: the base model's path or Hub id. `host_places`: vLLM's `max_cpu_loras`. `lock`: vLLM's asyncio lock of
    a name, which a resolver call holds too. `new_request`: a `LoRARequest` with a new engine id.
    """

    @property
    def base_path(self) -> str: ...
    @property
    def host_places(self) -> int: ...
    def is_base_model(self, name: str) -> bool: ...
    def lock(self, name: str) -> Any: ...
    def new_request(self, name: str, path: str, base_name: str | None = None) -> Any: ...
    async def abort(self, request_ids: list[str]) -> None: ...


@dataclass(eq=False)
class ApiServer:
    """One API server.

    Attributes:
        drain_timeout_s: seconds that requests get to end, where an operator's unload does not say.
        on_change: called after every change of the served names or versions.
    """

    registry: Registry
    planner: PlannerClient
    vllm: VllmServer
    resolver: AdapterResolver
    events: Events
    drain_timeout_s: float = 60.0
    on_change: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        # The registry itself ends mixtures of a part that has changed: nobody else would free them.
        self.registry.on_stale = self.drain

    async def engine_path(self, name: str, version: ResolvedAdapter, *, other_than: str = "") -> str:
        """`Store.engine_path` of a version leased for a name; after an error, the lease has ended."""
        with self.released_on_error(name, version), store_errors():
            return await asyncio.to_thread(self.resolver.store.engine_path, version.digest, other_than=other_than)

    @contextmanager
    def released_on_error(self, name: str, version: ResolvedAdapter) -> Iterator[None]:
        """Inside, a version leased for a name is not served yet: where the block raises, the lease ends."""
        try:
            yield
        except BaseException:
            self.release(name, version)
            raise

    def release(self, name: str, *versions: ResolvedAdapter) -> list[asyncio.Future[None]]:
        """End the leases of versions, unless the name needs the version; return futures for the leases' files."""
        store, ending = self.resolver.store, list[asyncio.Future[None]]()
        for version in versions:
            # A running request, or a rollback, may need the files.
            if not self.registry.needs(name, version):
                # The store removes what was not used for longest: first mixtures, which are made again of their parts.
                ended = store.release(name, version.path, used_at=0.0 if version.parts else None)
                ending += [] if ended is None else [ended]
        return ending

    def forget(self, name: str, version: ResolvedAdapter) -> None:
        """End the lease of a version whose client has left, unless the name needs the version.

        The check waits for the name's lock: a concurrent resolve of the same version has then registered the version.
        """

        async def release() -> None:
            async with self.vllm.lock(name):
                self.release(name, version)

        background(release())

    def retire(self, engine_id: int, refusal: LoRAPluginsError | None = None) -> None:
        """Do as the planner's `retire`: engines evict the adapter once no request uses it; the caller does not wait."""
        background(self.planner.retire(engine_id, refusal))

    def drain(self, adapter: ServedAdapter) -> asyncio.Task[None]:
        """Free slots, host memory and leases of an adapter outside the registry, once its last request has left.

        Requests that were accepted before end by themselves. The returned task is done when all is free.
        """
        # The id as of now: a mixture may leave the registry while a change of its own loads another version.
        started, engine_id = time.perf_counter(), adapter.engine_id

        async def free() -> None:
            await self.planner.retire(engine_id)
            async with self.vllm.lock(adapter.name):  # a concurrent load has registered its version by then
                # Before `release`, which keeps the versions of draining adapters.
                del self.registry.draining[engine_id]
                leases = self.release(adapter.name, *adapter.versions)
            self.events.emit(AdapterUnloaded(adapter.name, time.perf_counter() - started, adapter.ended))
            await asyncio.gather(*leases)

        async def end_rollbacks() -> None:
            async with self.vllm.lock(adapter.name):  # as above
                # The last request may run for hours, and no room is made of leased versions.
                previous, adapter.previous = adapter.previous, []
                self.release(adapter.name, *previous)

        # At once: `needs` must see the adapter without a gap.
        self.registry.draining[engine_id] = adapter
        task = adapter.freeing = background(free())
        background(end_rollbacks())
        if adapter.name in self.registry.paused:
            self.registry.paused.discard(adapter.name)
            background(self.planner.resume(adapter.name))
        return task

    async def end(self, adapter: ServedAdapter, refusal: LoRAPluginsError, timeout_s: float) -> bool:
        """End the requests of a draining adapter that are left after `timeout_s`; those that have not run are refused.

        Returns whether all is free; if not, all will be free as soon as the last request has left.
        """
        if (task := adapter.freeing) is None:
            return True
        # asyncio.wait, unlike wait_for, does not cancel the task at its time-out: the engines must free the slot
        # anyway.
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            self.retire(adapter.engine_id, refusal)
            # A task too, so that the engines refuse first: what waits after the refusal has run before.
            state = (await background(self.planner.states()))(adapter.engine_id)
            left = [*state.running, *state.held]
            adapter.ended += len(left)
            await self.vllm.abort(left)
            done, _ = await asyncio.wait([task], timeout=ABORT_S)
        return bool(done)

    async def pause(self, name: str, mode: PauseMode) -> bool:
        """Hold new requests for a name, and return once none runs; False where a resume came meanwhile.

        A pause is of a request's name, so the pause outlives every swap of the name; an unload of the name ends the
        pause, and so does the end of the server. A version asked for by digest, `name@digest`, is a name of its own.

        Raises:
            AdapterNotFound: the name is blocked, or not served.
        """
        self.registry.require(name)
        # Before the engines know: a resume that comes during the calls below takes the name out again, and the last
        # line sees the resume.
        self.registry.paused.add(name)
        requests = await self.planner.pause(name, mode)
        if mode is PauseMode.ABORT:
            await self.vllm.abort(list(requests.request_ids))
        await self.planner.paused(name, requests.clients)
        return name in self.registry.paused

    async def resume(self, name: str) -> bool:
        """Let held requests for a name go on; False where the name was not paused.

        Raises:
            AdapterNotFound: the name is neither paused nor served.
        """
        if name not in self.registry.paused:
            self.registry.require(name)
            return False
        self.registry.paused.discard(name)
        await self.planner.resume(name)
        return True
