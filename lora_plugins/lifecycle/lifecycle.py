"""Change the served adapters of a server while requests run: load, unload, refresh, roll back, pin.

Runs in the event loop of the only API server, or of the leading one (`leader.py`). Calls come from the admin API
(`api/routes.py`), from vLLM's own load and unload calls, from vLLM's resolver for an unknown model name
(`vllm_patches/api_server/openai_serving_models.py`), and from `reconciler.py`. A call ends with the change made in
vLLM's table of names and in the engines, or raises and has changed nothing; only `resolve` returns while the engines
still load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Unpack

from lora_plugins.adapter.mixture import terms_of
from lora_plugins.adapter.names import AdapterName, is_prefix, refuse_mixture
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError
from lora_plugins.events import polling
from lora_plugins.lifecycle.api_server import ApiServer
from lora_plugins.lifecycle.background_tasks import background
from lora_plugins.lifecycle.finding import find, find_version
from lora_plugins.lifecycle.registry import DesiredAdapter, ServedAdapter, no_longer_served
from lora_plugins.lifecycle.stored_copies import TRIES, Copies
from lora_plugins.lifecycle.swapping import ChangeReason, SwapOptions, VersionChange, change, updating
from lora_plugins.lifecycle.unloading import block_name, block_to_end, ending_block, free
from lora_plugins.log import logger
from lora_plugins.resolvers.single_flight import SingleFlight
from lora_plugins.resolvers.sources.pushed import PushedAdapter
from lora_plugins.resolvers.sources.uri import is_by_path, place_by_path
from lora_plugins.store.blocked_names import blocked
from lora_plugins.store.layout import is_digest


class Lifecycle:
    """The changes of one server's served adapters.

    Each change holds the name's lock (`VllmServer.lock`) while deciding, so that one name changes one step at a time;
    none holds the lock while waiting for running requests. In all methods:

    - `expects` is the digest that the name must serve now, or `ANY_VERSION`; other callers may have changed the name.
    - `moves`: running requests go on with the new version too, instead of finishing on the old one.

    Attributes:
        written: returns once the list of served names is on disk for the next start; a reconciler sets `written`, and
            without a reconciler no list is written.
        copies: the store's copies of served adapters.
        resolving: resolves that requests wait for, by name.
    """

    def __init__(self, server: ApiServer, copies: Copies | None = None) -> None:
        self.server = server
        self.registry, self.planner = server.registry, server.planner
        self.copies = copies or Copies(server)
        self.written: Callable[[], Coroutine[Any, Any, None]] = lambda: asyncio.sleep(0)  # until a reconciler writes
        self.resolving: SingleFlight[str, Any] = SingleFlight()
        # A mixture is made of the versions that its parts' names serve now.
        server.resolver.lease_served = self._lease_served
        server.resolver.on_abandoned = lambda resolved: server.forget(resolved.name, resolved)

    async def resolve(self, name: str) -> Any:
        """Serve a name that a source has, and return vLLM's request for the name; None where no source has the name.

        The load goes on in the background: requests wait in the scheduler.

        Raises:
            LoRAPluginsError: the adapter cannot be served.
        """
        server = self.server
        async with server.vllm.lock(name):
            if (served := self.registry.get(name)) is not None:
                return served.request
            if not server.resolver.sources:  # a look-up would count the names of other packages' resolvers as unknown
                return None
            caller = server.resolver.principal()
            for tries_left in reversed(range(TRIES)):
                if (version := (await server.resolver.look_up(name, server.vllm.base_path)).version()) is None:
                    return None
                path = await server.engine_path(name, version)
                if version.parts:  # a mixture
                    with server.released_on_error(name, version):
                        await self.copies.idle.make_place(caller)
                        # A block of a part meanwhile has unloaded only the mixtures that were served then.
                        self.registry.blocked.refuse(name)
                # A part's name may have changed while the mixture was made, and this request may have come after the
                # change, so the mixture is made once more. At the last try, a stale mixture is served.
                if not (tries_left and self.registry.is_stale(version)):
                    break
                server.release(name, version)
            request = server.vllm.new_request(name, path)
            # Without a time of use, `make_place` would unload the new mixture first, before the mixture's request runs.
            self.planner.used(request)
            adapter = ServedAdapter(name, request, version, caller=caller)
            adapter.loading = background(self._loading(adapter, request))
            self.registry.put(adapter)
        server.on_change()
        return request

    async def load(self, name: str, uri: str | None = None, *, expects: str | None = None) -> VersionChange:
        """Serve a name; from `uri`, or from wherever the server's sources have the name.

        A served name stays as it is; with another URI, the name is swapped. The load ends a block of exactly this name.

        Raises:
            VersionMismatch: another version is served than expected.
            LoRAPluginsError: the adapter cannot be served. In both cases nothing has changed.
        """
        self._check_name(name)
        # Read once: the load ends only the block that is in force now. A later block refuses the load.
        seen = block_to_end(self.server, name)
        while True:
            async with self.server.vllm.lock(name), ending_block(self.server, name, seen):
                adapter = self._present(name, expects)
                if not adapter.is_served or uri not in (None, adapter.uri):
                    return await change(self.server, adapter, await find(self.server, name, uri), uri, held_digest=None)
            if adapter.loading is None:
                return VersionChange(adapter.digest, adapter.digest, ChangeReason.UNCHANGED)
            # A request's load is under way and may fail, so decide again after its end. Wait without the lock: an
            # unload must not wait for the load.
            await asyncio.wait([adapter.loading])

    async def load_version(self, text: str) -> ServedAdapter | None:
        """Serve `name@digest`, with at least the digest's first 8 characters, as a name of its own, beside `name`.

        Returns None where this process has not found the version under the name, where the store no longer has the
        version, and where `text` is not of this form.

        Raises:
            LoRAPluginsError: the version cannot be served.
        """
        name, _, prefix = text.partition("@")
        if not is_prefix(prefix) or terms_of(text) is not None:
            return None
        async with self.server.vllm.lock(text):
            adapter = self.registry.get(text)
            if adapter is not None:
                return adapter
            found = await self.server.resolver.of_digest(name, prefix)
            if found is None:
                return None
            # Lease the version for `text` before releasing the lease of `name`, so that no eviction comes between.
            try:
                version = await self.server.resolver.of_digest(text, found.digest, of_any_name=True)
            finally:
                self.server.release(name, found)
            if version is None:
                return None
            adapter = ServedAdapter(text)
            await change(self.server, adapter, version, uri=None, held_digest=version.digest)
        return adapter

    async def prefetch(self, name: str, *, expects: str | None = None) -> ServedAdapter:
        """Bring an adapter into host memory before any request.

        Raises:
            VersionMismatch: another version is served than expected.
            LoRAPluginsError: the adapter cannot be served, or host memory has no room.
        """
        self.registry.blocked.refuse(name)
        loaded = await self.load(name, expects=expects)
        adapter = self.registry.require(name)
        # The engines may have evicted an adapter that was served before this call. Host memory is enough: no slot.
        if loaded.reason is not ChangeReason.LOADED:
            async with self.copies.using(adapter.request) as request:
                await self.planner.load(request, uri=adapter.uri, wants_slot=False)
        return adapter

    async def load_by_path(
        self, name: str, path: str, base_name: str | None = None, *, moves: bool = False
    ) -> VersionChange:
        """Serve the adapter whose files are now at a path; the caller holds the name's lock.

        Where this host has no files at the path, only the workers read the path. A served name is swapped. `base_name`:
        as in `ServedAdapter`.

        Raises:
            LoRAPluginsError: the adapter cannot be served; the name goes on serving the present version.
        """
        refuse_mixture(name)
        adapter, place = self._present(name), place_by_path(path)
        adapter.base_name = base_name or adapter.base_name
        with updating(self.server, adapter):
            version = await self.server.resolver.snapshot(name, place, self.server.vllm.base_path)
            # Of an adapter that only the workers have, neither digest nor place is known.
            uri, held = (None, None) if version is None else (place, version.digest)
            # For a served name `updating` emits the event of a failure, so `change` must not emit another.
            is_noted = adapter.is_served
            return await change(self.server, adapter, version, uri, held, path=path, moves=moves, is_noted=is_noted)

    def check_pushed(self, name: str, expects: str | None) -> None:
        """Refuse a push before reading its bytes.

        Raises:
            InvalidAdapter: no adapter can have this name, or the name has a revision.
            VersionMismatch: another version is served than expected.
        """
        refuse_mixture(name)
        self._check_name(name)
        if "@" in name:
            raise InvalidAdapter(
                "a name with a revision",
                expected="a name without '@'",
                remedy="push the name; each version is served as NAME@DIGEST too",
                adapter=name,
            )
        self.registry.check_version(name, expects)

    async def take(
        self, name: str, pushed: PushedAdapter, *, expects: str | None = None, **options: Unpack[SwapOptions]
    ) -> VersionChange:
        """Serve a pushed adapter as the next version of a name, until a refresh, a rollback or the next push.

        Raises:
            VersionMismatch: another version is served than expected.
            LoRAPluginsError: the adapter cannot be served, or not be pinned; the name goes on serving the present
                version.
        """
        seen = block_to_end(self.server, name)
        async with self.server.vllm.lock(name), ending_block(self.server, name, seen):
            adapter = self._present(name, expects)
            with updating(self.server, adapter):
                version = await self.server.resolver.pushed(pushed, self.server.vllm.base_path)
                digest, is_noted = version.digest, adapter.is_served  # `is_noted`: as in `load_by_path`
                if options.get("pins") and digest == adapter.digest:  # `change` does not pin what is served already
                    await self._pin(adapter)
                # A push comes from no place (`uri` is None), and the name stays at its digest.
                return await change(self.server, adapter, version, None, digest, is_noted=is_noted, **options)

    async def declare(
        self, name: str, uri: str | None, digest: str | None = None, *, is_noted: bool = False
    ) -> ServedAdapter:
        """Serve a name from exactly this place, in the version of the whole `digest` if given, and stay there.

        `uri` is None for wherever the server's sources have the name; a path in the place of a URI comes from an
        earlier `load_by_path`. A name served from another place, or in another version, is swapped. `is_noted`: as in
        `PlannerClient.load`.

        Raises:
            LoRAPluginsError: the adapter cannot be served so; nothing has changed.
        """
        self.registry.blocked.refuse(name)
        if not is_by_path(uri):
            self._check_name(name)
        async with self.server.vllm.lock(name):
            adapter = self._present(name)
            if not adapter.is_served or adapter.uri != uri or digest not in (None, adapter.digest):
                version = await find_version(self.server, name, uri, digest)
                await change(self.server, adapter, version, uri, held_digest=None, is_noted=is_noted)
            # Also where the right version was served already: a digest fixed by a rollback or push is fixed no more.
            adapter.held_digest = None if digest is None else adapter.digest
        self.server.on_change()
        if adapter.loading is not None:  # a request's load may fail: decide again after its end, as in `load`
            await asyncio.wait([adapter.loading])
            return await self.declare(name, uri, digest, is_noted=is_noted)
        return adapter

    async def restore(self, adapter: DesiredAdapter) -> ServedAdapter | None:
        """Serve a name in the version that the server before this one served, from the store, without asking a source.

        Returns None where the name is served already, where no version was written down, and where the version is
        missing from the store or damaged, does not fit the model, or came from a source that this server does not have.

        Raises:
            LoRAPluginsError: the name is blocked, or the engine cannot load the version.
        """
        name, uri, digest = adapter.name, adapter.uri, adapter.last_digest
        self.registry.blocked.refuse(name)
        async with self.server.vllm.lock(name):
            if digest is None or self.registry.get(name) is not None:
                return None
            version = None
            with suppress(LoRAPluginsError):
                version = await self.server.resolver.restored(name, uri, digest, adapter.last_place)
            if version is None:
                return None
            served = ServedAdapter(name)
            await change(self.server, served, version, uri, held_digest=None)
        return served

    async def refresh(self, name: str, *, expects: str | None = None, moves: bool = False) -> VersionChange:
        """Look for a new version at the source and swap to the new version.

        A version whose copy in the store is damaged is fetched and loaded again, even if the source has no newer one.

        Raises:
            VersionMismatch: another version is served than expected.
            LoRAPluginsError: the new version cannot be served, or the source is unavailable; the old version goes on.
        """
        async with self._served(name, expects) as adapter:
            return await self._refresh(adapter, moves=moves)

    async def poll(self, name: str) -> None:
        """Refresh a name for the poller: as `refresh`, but nothing is raised, and a fixed digest stays.

        A version without a lease is not fetched before the next request. A name that another server has blocked in the
        shared store is unloaded.
        """
        if name in self.registry.blocked:
            background(free(self.server, name, blocked(name), if_blocked=True))
            return
        try:
            async with self.server.vllm.lock(name):
                adapter = self.registry.get(name)
                if adapter is None or adapter.version is None or adapter.held_digest is not None:
                    return
                # Without a lease no request uses the adapter: `Copies.relieve` has ended the lease. The next request
                # fetches the newest version.
                if self.server.resolver.store.is_leased(name, adapter.version.path):
                    with polling():
                        await self._refresh(adapter)
        except LoRAPluginsError:  # noted in the adapter's `last_error`
            return
        except Exception:  # noqa: BLE001 - look for the other names all the same
            logger.exception("Looking for a new version of adapter '%s' failed", name)

    async def roll_back(
        self,
        name: str,
        digest: str | None = None,
        *,
        expects: str | None = None,
        moves: bool = False,
        of_any_name: bool = True,
        admit: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> VersionChange:
        """Go back to the version before, or to the version whose digest begins with `digest`, and stay there.

        The name keeps its last `KEPT_VERSIONS`; the store may still have older versions. A beginning of a digest
        matches only versions that this name has had; a whole digest matches other names' versions too, if
        `of_any_name`. The name changes inside `admit(SIZE)`, with the version's bytes; `admit` raises where the
        caller's share of the store has no room for a version of this size.

        Raises:
            VersionMismatch: another version is served than expected. AdapterNotFound: no such version is left.
            LoRAPluginsError: the version cannot be loaded; the name goes on serving the present version.
        """
        # An earlier version of a mixture holds earlier versions of its parts, which the name no longer means.
        refuse_mixture(name)
        async with self._served(name, expects) as adapter:
            version = next((v for v in adapter.previous if digest is None or v.digest.startswith(digest)), None)
            if version is not None and not await self.copies.has(name, version):
                version = None
            # Only a whole digest proves that the caller knows the version.
            of_any_name = of_any_name and digest is not None and is_digest(digest)
            if version is None and digest is not None:
                version = await self.server.resolver.of_digest(name, digest, of_any_name=of_any_name)
            if version is None:
                where = "in the store" if of_any_name else "of this name since the start"
                kept = ", ".join(version.digest[:12] for version in adapter.previous) or "none"
                raise AdapterNotFound(
                    "no version before this one" if digest is None else f"no such version {where}",
                    expected=f"one of those kept: {kept}",
                    remedy="give all 64 characters of its digest, or load it from its source",
                    adapter=name,
                )
            with self.server.released_on_error(name, version), admit(version.size_bytes):
                return await change(self.server, adapter, version, adapter.uri, version.digest, moves=moves)

    async def pin(self, name: str, *, expects: str | None = None) -> ServedAdapter:
        """Keep an adapter in host memory and in a slot until an unpin or unload; one slot stays for other adapters.

        Raises:
            AdapterNotFound: the name is not served. NoFreeSlot: no slot would be left for other adapters.
            VersionMismatch: another version is served than expected.
        """
        async with self._served(name, expects) as adapter:
            await self._pin(adapter)
        return adapter

    async def unpin(self, name: str) -> ServedAdapter:
        """Let the adapter be evicted like any other.

        Raises:
            AdapterNotFound: the name is not served.
        """
        async with self._served(name) as adapter:
            adapter.is_pinned = False
            self.server.on_change()
            await asyncio.shield(background(self.planner.unpin(adapter.engine_id)))
        return adapter

    async def unload(
        self, name: str, *, block: bool, timeout_s: float | None = None, expects: str | None = None
    ) -> bool:
        """Serve a name no longer, and free slot, host memory and lease once the name's requests have left.

        Requests that were accepted before have `timeout_s`, or the server's drain timeout where None; then running
        requests are ended, and waiting requests are refused. Returns whether slot, host memory and lease are free; if
        not, the last request to leave frees them. Without `block`, a later request resolves the name again.

        With `block`, all revisions of the name are blocked, and waiting requests are refused at once. The block holds
        before any wait, and is on disk before the return. With `block` and without `timeout_s`, the call waits neither
        for the name's lock nor for running requests.

        Raises:
            AdapterNotFound: the name is not served.
            VersionMismatch: another version is served than expected; nothing has changed.
            SourceUnavailable, OutOfMemory: the block cannot be written, and holds in this server only.
        """
        if not block:
            freed = await free(self.server, name, no_longer_served(name), timeout_s, expects)
            if freed is None:  # there was nothing to unload
                raise self.registry.not_served(name)
            return freed
        self._check_name(name)
        self.registry.check_version(name, expects)
        return await block_name(self.server, name, timeout_s)

    async def remove(self, name: str) -> None:
        """Serve a name no longer, as vLLM's own unload call does: requests accepted before run to their own end.

        Unlike `unload`, this call waits for no request, and no drain timeout ends requests.

        Raises:
            AdapterNotFound: the name is not served.
        """
        async with self._served(name) as adapter:
            self.registry.remove(name)
            self.server.on_change()
            self.server.drain(adapter)

    async def _loading(self, adapter: ServedAdapter, request: Any) -> None:
        """Load a resolved adapter, and serve the adapter no longer where the engine cannot load it."""
        try:
            await self.planner.load(request)
        except LoRAPluginsError:  # the scheduler answers the waiting requests with the error, so do not raise
            # Where another version has taken the name meanwhile, the failure does not concern that version.
            if self.registry.get(adapter.name) is not adapter or adapter.request is not request:
                return
            self.registry.remove(adapter.name)
            for version in adapter.versions:
                self.server.forget(adapter.name, version)  # later: who has the lock may just lease the copy again
            self.server.retire(adapter.engine_id)  # with data parallelism another engine may have loaded the adapter
            self.server.on_change()
        finally:
            adapter.loading = None

    async def _lease_served(self, name: str, holder: Hashable) -> Path | None:
        """Lease, for `holder`, the version that a name serves now, and return its directory; None where not served.

        The name is a part of a mixture that is being made.
        """
        async with self.server.vllm.lock(name):
            if (adapter := self.registry.get(name)) is None:
                return None
            if adapter.version is None:
                raise _only_workers_have(name)
            async with self.copies.keeping(adapter) as request:
                self.server.resolver.store.share(request.lora_path, holder)
            return adapter.version.path

    def _present(self, name: str, expects: str | None = None) -> ServedAdapter:
        """The adapter served now, in the version expected, or a new one to load; the caller holds the name's lock."""
        adapter = self.registry.get(name)
        self.registry.check_version(name, expects)
        return adapter or ServedAdapter(name)

    @asynccontextmanager
    async def _served(self, name: str, expects: str | None = None) -> AsyncIterator[ServedAdapter]:
        """Hold the name's lock inside, and yield the adapter that is served in the version expected."""
        async with self.server.vllm.lock(name):
            adapter = self.registry.require(name)
            self.registry.check_version(name, expects)
            yield adapter

    async def _refresh(self, adapter: ServedAdapter, *, moves: bool = False) -> VersionChange:
        if adapter.version is None:
            raise _only_workers_have(adapter.name)
        return await self.copies.update(adapter, moves=moves)

    async def _pin(self, adapter: ServedAdapter) -> None:
        if not adapter.is_pinned:
            async with self.copies.keeping(adapter) as request:
                await self.planner.pin(request, uri=adapter.uri)
            adapter.is_pinned = True
            self.server.on_change()

    def _check_name(self, name: str) -> None:
        if self.server.vllm.is_base_model(name):
            raise InvalidAdapter(
                "the name of the served base model", expected="another name", remedy="choose another", adapter=name
            )
        try:
            AdapterName.parse(name)
        # A malformed name is not found where a request names it; an operator's call is told what is wrong with it.
        except AdapterNotFound as error:
            raise InvalidAdapter(error.found, expected=error.expected, remedy="choose another name") from None


def _only_workers_have(name: str) -> InvalidAdapter:
    return InvalidAdapter(
        "an adapter by a path that only the workers have",
        expected="one that comes from a source or a directory",
        remedy="load it with POST /v1/loras",
        adapter=name,
    )
