"""Changing what is served while requests run: load, unload, pin, swap to a new version, roll back.

A name points to a version through vLLM's table of names. A new version gets an engine id of its own, is staged beside
the old one, and takes its place in the table in one step: requests that run go on with the old one, and every later one
gets the new one. When the last request of the old one has left, it is removed from slots and host memory. Its prefix
cache is not used for the new one, as vLLM's cache keys hold the adapter's path (0.30: see the ledger).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, NoFreeSlot
from lora_plugins.events import AdapterSwapped, AdapterUnloaded, Events, UpdateFailed
from lora_plugins.names import AdapterName
from lora_plugins.server.gate import Gate, Rpc
from lora_plugins.server.served import KEPT_VERSIONS, Catalogue, Place, Served, Version, not_served

_ABORT_S = 10.0
_DIGEST = re.compile("[0-9a-f]{8,64}")


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


class Changes:
    """The operations behind the admin API, vLLM's unload endpoint and the look-out for new versions.

    Each holds the name's lock while it decides, so that one name changes one step at a time; none holds it while it
    waits for running requests.

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

    # --- load and unload ---

    async def load(self, name: str, uri: str | None = None) -> tuple[Served, bool]:
        """Serve a name; from `uri`, or from wherever the server's sources have it. Returns whether it is new.

        Loaded already, it stays as it is; from another URI, it is swapped.

        Raises:
            LoRAPluginsError: it cannot be served; nothing has changed then.
        """
        self._check_name(name)
        async with self._engine.lock(name):
            served = self.catalogue.get(name)
            is_new = served is None
            if served is None:
                served = await self._enter(name, uri, await self._find(name, uri))
            elif uri not in (None, served.uri):
                await self._swap(served, await self._find(name, uri), uri)
                served.uri = uri
            self.catalogue.blocked.discard(name)
        self.changed()
        return served, is_new

    def _check_name(self, name: str) -> None:
        if self._engine.is_base_model(name):
            raise InvalidAdapter(
                "the name of the served base model", expected="another name", remedy="choose another", adapter=name
            )
        try:
            AdapterName.parse(name)
        except AdapterNotFound as error:
            raise InvalidAdapter(error.found, expected=error.expected, remedy="choose another name") from None

    async def _find(self, name: str, uri: str | None) -> Version:
        if uri is not None:
            return await self._sources.resolve_uri(name, uri, self._engine.base_path)
        found = await self._sources.resolve(name, self._engine.base_path)
        if found is None:
            raise AdapterNotFound(
                "no such adapter at any source",
                expected="one that a source of this server has",
                remedy="correct its name, or say where it is with source.uri",
                adapter=name,
            )
        return found

    async def _enter(self, name: str, uri: str | None, version: Version) -> Served:
        request = self._request(name, version, uri)
        try:
            async with self.gate.held(request):
                served = Served(name, request, version, uri)
                self.catalogue.put(served)
        except BaseException:
            self._release(name, version)
            raise
        return served

    def _request(self, name: str, version: Version, uri: str | None) -> Any:
        request = self._engine.new_request(name, str(version.path))
        if uri is not None:
            self.gate.uris[request.lora_int_id] = uri
        return request

    async def unload(self, name: str, *, block: bool, timeout_s: float) -> bool:
        """Serve a name no longer, and free its slot, host memory and lease once its running requests have left.

        They have `timeout_s` for that, then they are ended. Returns whether all is free; if not, it will be as soon as
        the last has left. Where it is not `block`ed, a later request has it resolved anew.

        Raises:
            AdapterNotFound: there is no such name to unload.
        """
        async with self._engine.lock(name):
            if block:
                self._check_name(name)
                self.catalogue.blocked.add(name)
            served = self.catalogue.take_out(name)
        if served is None:
            if block:
                return True
            raise not_served(name)
        self.changed()
        return await self.free(served, timeout_s)

    async def free(self, served: Served, timeout_s: float) -> bool:
        """Free what was taken out of the table; as for `unload`."""
        started, engine_id = time.perf_counter(), served.request.lora_int_id
        self.catalogue.draining[engine_id] = served
        aborted = 0

        async def all_of_it() -> None:
            await self.gate.retire(engine_id)
            del self.catalogue.draining[engine_id]
            for version in (served.version, *served.previous):
                if version is not None:
                    self._release(served.name, version)
            self._events.emit(AdapterUnloaded(served.name, time.perf_counter() - started, aborted))

        task = self._in_background(all_of_it())
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            running = [request_id for request_id in self.gate.in_flight(engine_id) if request_id]
            aborted = len(running)
            await self._engine.abort(running)
            done, _ = await asyncio.wait([task], timeout=_ABORT_S)
        return bool(done)

    # --- versions ---

    async def load_version(self, text: str) -> Served | None:
        """Serve `name@digest`, the digest's first 8 characters or more, as a name of its own, beside `name`.

        None where the name has had no such version in this process, or the text is no such name.

        Raises:
            LoRAPluginsError: it cannot be served.
        """
        name, _, digest = text.partition("@")
        if not _DIGEST.fullmatch(digest):
            return None
        async with self._engine.lock(text):
            served = self.catalogue.get(text)
            if served is not None:
                return served
            found = await self._sources.of_digest(name, digest)
            if found is None:
                return None
            try:
                version = await self._sources.of_digest(text, found.digest, of_any_name=True)
            finally:
                self._release(name, found)
            if version is None:
                return None
            served = await self._enter(text, None, version)
            served.held_digest = version.digest
        self.changed()
        return served

    async def refresh(self, name: str) -> bool:
        """Look for a new version at the source and swap to it; returns whether there was one.

        Raises:
            LoRAPluginsError: there is one that cannot be served, or the source cannot say; the old one goes on.
        """
        async with self._engine.lock(name):
            served = self._known(name)
            served.held_digest = None
            return await self._refresh(served)

    async def revalidate(self, name: str) -> None:
        """As `refresh`, for the look-out: what was rolled back stays, and errors are noted only."""
        async with self._engine.lock(name):
            served = self.catalogue.get(name)
            if served is None or served.version is None or served.held_digest is not None:
                return
            try:
                await self._refresh(served)
            except LoRAPluginsError:
                return

    async def _refresh(self, served: Served) -> bool:
        current = self._version(served)
        try:
            newest = await self._sources.latest(served.name, served.uri, self._engine.base_path)
            if newest is None:
                raise AdapterNotFound(
                    "no such adapter at its source any more",
                    expected="the one that is served, or a newer one",
                    remedy="put it back, or unload it",
                    adapter=served.name,
                )
            if newest.digest == current.digest:
                served.version, served.last_error = newest, None
                return False
            await self._swap(served, newest)
        except LoRAPluginsError as error:
            served.failed(error)
            self._events.emit(UpdateFailed(served.name, error))
            raise
        self.changed()
        return True

    async def rollback(self, name: str, digest: str | None = None) -> Served:
        """Go back to the version before, or to the one whose digest begins with `digest`, and stay there.

        Kept are the last two versions; the store may have older ones still.

        Raises:
            AdapterNotFound: there is none. LoRAPluginsError: it cannot be staged; the present one goes on.
        """
        async with self._engine.lock(name):
            served = self._known(name)
            wanted = next((v for v in served.previous if digest is None or v.digest.startswith(digest)), None)
            if wanted is None and digest is not None:
                wanted = await self._sources.of_digest(name, digest, of_any_name=True)
            if wanted is None:
                kept = ", ".join(version.digest[:12] for version in served.previous) or "none"
                raise AdapterNotFound(
                    "no such version in the store" if digest else "no version before this one",
                    expected=f"one of those kept: {kept}",
                    remedy="load it from its source",
                    adapter=name,
                )
            await self._swap(served, wanted)
            served.held_digest = wanted.digest
        self.changed()
        return served

    async def _swap(self, served: Served, version: Version, uri: str | None = None) -> None:
        """Have new requests for this name enter the engine with `version`; the lock of the name is held."""
        before, old_request = served.version, served.request
        if before is not None and before.digest == version.digest:
            served.version = version
            return
        started = time.perf_counter()
        request = self._request(served.name, version, uri or served.uri)
        try:
            await self.gate.stage(request)
            if served.is_pinned:
                await self._pin(request)
        except BaseException:
            self._in_background(self.gate.retire(request.lora_int_id))
            if version not in served.previous:
                self._release(served.name, version)
            raise
        served.request, served.version, served.last_error = request, version, None
        served.previous = [kept for kept in served.previous if kept.digest != version.digest]
        if before is not None:
            served.previous.insert(0, before)
        dropped, served.previous = served.previous[KEPT_VERSIONS:], served.previous[:KEPT_VERSIONS]
        self.catalogue.put(served)
        used_at = self.gate.last_used_at.get(old_request.lora_int_id)
        if used_at is not None:
            self.gate.last_used_at[request.lora_int_id] = used_at
        for old in dropped:
            self._release(served.name, old)
        self._in_background(self.gate.retire(old_request.lora_int_id))
        self._events.emit(
            AdapterSwapped(
                served.name, "" if before is None else before.digest, version.digest, time.perf_counter() - started
            )
        )

    # --- tiers ---

    async def prefetch(self, name: str) -> Served:
        """Bring an adapter into host memory before it is asked for.

        Raises:
            LoRAPluginsError: it cannot be served, or there is no room.
        """
        served, is_new = await self.load(name)
        if not is_new:
            await self.gate.stage(served.request)
        return served

    async def pin(self, name: str) -> Served:
        """Keep an adapter in host memory and in a slot until it is unpinned or unloaded.

        Raises:
            AdapterNotFound: it is not served. NoFreeSlot: there would be no slot left for all others.
        """
        async with self._engine.lock(name):
            served = self._known(name)
            if not served.is_pinned:
                await self._pin(served.request)
                served.is_pinned = True
        self.changed()
        return served

    async def unpin(self, name: str) -> Served:
        """Let it go when its turn comes.

        Raises:
            AdapterNotFound: it is not served.
        """
        async with self._engine.lock(name):
            served = self._known(name)
            served.is_pinned = False
            await self._rpc("lora_plugins_unpin", (served.request.lora_int_id,))
        self.changed()
        return served

    async def _pin(self, request: Any) -> None:
        pinned = sum(served.is_pinned and served.name != request.lora_name for served in self.catalogue.all())
        if pinned + 1 >= self._engine.slots:
            raise NoFreeSlot(
                f"{self._engine.slots} slots, of which {pinned} are pinned",
                expected="one slot at least that is left for all others",
                remedy="unpin an adapter, or raise --max-loras",
                adapter=request.lora_name,
            )
        async with self.gate.held(request):
            await self._rpc("lora_plugins_pin", (request.lora_int_id,))

    # --- reading ---

    async def places(self) -> Callable[[Served], Place]:
        """Where each adapter is now, asked of all workers at once."""
        workers = await self._rpc("lora_plugins_residency", ())
        return lambda served: Place.of(served.request.lora_int_id, workers)

    def _known(self, name: str) -> Served:
        served = self.catalogue.get(name)
        if served is None:
            raise not_served(name)
        return served

    @staticmethod
    def _version(served: Served) -> Version:
        if served.version is None:
            raise InvalidAdapter(
                "an adapter that was loaded by its path",
                expected="one that comes from a source",
                remedy="load it with POST /v1/loras",
                adapter=served.name,
            )
        return served.version

    def _release(self, name: str, version: Version) -> None:
        if not self.catalogue.needs(name, version.path):
            self._sources.release(name, version.path)

    def _in_background(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task
