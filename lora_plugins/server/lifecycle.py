"""Changing what one API server serves while requests run: load, unload, refresh, roll back, pin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, VersionMismatch
from lora_plugins.resolvers.single_flight import SingleFlight
from lora_plugins.resolvers.sources.pushed import PushedAdapter
from lora_plugins.resolvers.sources.uri import absolute, is_path
from lora_plugins.resolvers.versions import ResolvedAdapter
from lora_plugins.server.api_server import ABORT_S, ApiServer
from lora_plugins.server.copies import Copies
from lora_plugins.server.desired import DesiredAdapter
from lora_plugins.server.finding import find, find_version
from lora_plugins.server.registry import ServedAdapter, no_longer_served, not_served
from lora_plugins.server.swapping import KEPT_VERSIONS, ChangeReason, VersionChange, swap, updating
from lora_plugins.store.blocks import blocked
from lora_plugins.store.errors import store_errors
from lora_plugins.store.layout import is_digest, is_prefix

ANY_VERSION = "*"
_FREED_S = 0.02  # what is idle is free by then; a block is answered without waiting for more, unless it is asked to


class Lifecycle:
    """The operations behind the admin API, vLLM's own endpoints and the poller for new versions.

    Each holds the name's lock while it decides, so that one name changes one step at a time; none holds it while it
    waits for running requests.

    Attributes:
        on_change: called after every change of what is served.
        copies: of what is served, in the store.
        resolving: requests that have a name resolved, by name.
    """

    def __init__(self, server: ApiServer, copies: Copies | None = None) -> None:
        self.server = server
        self.registry, self.planner = server.registry, server.planner
        self.copies = copies or Copies(server)
        self.on_change: Callable[[], None] = lambda: None
        self.resolving: SingleFlight[str, Any] = SingleFlight()
        server.resolver.on_abandoned = lambda resolved: server.forget(resolved.name, resolved)

    async def load(self, name: str, uri: str | None = None, *, expects: str | None = None) -> VersionChange:
        """Serve a name; from `uri`, or from wherever the server's sources have it.

        Loaded already, it stays as it is; from another URI, it is swapped. Its own block ends. `expects`, here and
        below: the digest that must be served now, or `ANY_VERSION`.

        Raises:
            VersionMismatch: it is not. LoRAPluginsError: it cannot be served. Nothing has changed then.
        """
        self._check_name(name)
        async with self.ending_block(name), self.server.vllm.lock(name):
            adapter = self.registry.get(name)
            _require_version(name, adapter, expects)
            if adapter is None:
                adapter = await self._load(name, uri, await find(self.server, name, uri))
                change = VersionChange(None, adapter.digest, ChangeReason.LOADED)
            elif uri not in (None, adapter.uri):
                change = await swap(self.server, adapter, await find(self.server, name, uri), uri)
                adapter.uri, adapter.held_digest = uri, None
            else:
                change = VersionChange(adapter.digest, adapter.digest, ChangeReason.UNCHANGED)
        self.on_change()
        return change

    async def declare(
        self, name: str, uri: str | None, digest: str | None = None, *, is_noted: bool = False
    ) -> ServedAdapter:
        """Serve a name from just this place, in the version of the whole `digest` where one is given, and stay there.

        `uri` None stands for wherever the server's sources have the name, and may be the path of a `load_by_path`. What
        is served otherwise is swapped. `is_noted`, as of `PlannerClient.load`.

        Raises:
            LoRAPluginsError: it cannot be served so; nothing has changed then.
        """
        self.registry.blocked.refuse(name)
        if not is_path(uri):
            self._check_name(name)
        async with self.server.vllm.lock(name):
            adapter = self.registry.get(name)
            if adapter is None:
                version = await find_version(self.server, name, uri, digest)
                adapter = await self._load(name, uri, version, is_noted=is_noted)
            elif adapter.uri != uri or (digest is not None and not _has_digest(adapter, digest)):
                version = await find_version(self.server, name, uri, digest)
                before, adapter.uri = adapter.uri, uri
                try:
                    await swap(self.server, adapter, version, is_noted=is_noted)
                except BaseException:
                    adapter.uri = before
                    raise
            adapter.held_digest = None if digest is None else adapter.digest
        self.on_change()
        return adapter

    async def restore(self, adapter: DesiredAdapter) -> ServedAdapter | None:
        """Serve a name in the version that a server before this one served, from the store, without asking a source.

        What is served under the name already stays. None where the version is gone from the store or damaged,
        does not fit the model, or came from where this server does not look.

        Raises:
            LoRAPluginsError: it is blocked, or the engine cannot load it.
        """
        name, uri, digest = adapter.name, adapter.uri, adapter.last_digest
        self.registry.blocked.refuse(name)
        async with self.server.vllm.lock(name):
            served = self.registry.get(name)
            if served is None and digest is not None:
                try:
                    version = await self.server.resolver.restored(name, uri, digest, adapter.last_place)
                except LoRAPluginsError:
                    return None
                if version is not None:
                    served = await self._load(name, uri, version)
        self.on_change()
        return served

    async def load_by_path(self, request: Any, *, moves: bool = False) -> bool:
        """Serve what lies now at the path of a request that vLLM is about to put into its table, under the name's lock.

        What is served under the name is swapped, as `swap` says. Returns False where there is nothing but what
        the workers may find.

        Raises:
            LoRAPluginsError: it cannot be served; what was served goes on.
        """
        name, path = request.lora_name, absolute(request.lora_path)
        request.load_inplace = False  # else the workers would read it again; its path says which bytes it means
        adapter = self.registry.get(name)
        if adapter is None:
            version = await self.server.resolver.snapshot(name, path, self.server.vllm.base_path)
            if version is None:
                return False
            adapter = await self._load(name, path, version)
        else:
            with updating(self.server, adapter):
                version = await self.server.resolver.snapshot(name, path, self.server.vllm.base_path)
                uri = None if version is None else path
                await swap(self.server, adapter, version, uri, request, moves=moves, is_noted=True)
        adapter.uri, adapter.held_digest = (None, None) if version is None else (path, version.digest)
        served = adapter.request
        request.lora_int_id, request.lora_path = served.lora_int_id, served.lora_path
        request.is_3d_lora_weight = served.is_3d_lora_weight
        adapter.request = request
        self.registry.put(adapter)
        return True

    async def take(
        self,
        name: str,
        pushed: PushedAdapter,
        *,
        expects: str | None = None,
        moves: bool = False,
        kept_versions: int = KEPT_VERSIONS,
    ) -> VersionChange:
        """Serve what was pushed as the next version of a name, until it is refreshed, rolled back or pushed again.

        Raises:
            VersionMismatch: another version is served than expected.
            LoRAPluginsError: it cannot be served; what was served goes on.
        """
        async with self.ending_block(name), self.server.vllm.lock(name):
            adapter = self.registry.get(name)
            _require_version(name, adapter, expects)
            if adapter is None:
                version = await self.server.resolver.pushed(pushed, self.server.vllm.base_path)
                adapter = await self._load(name, None, version)
                change = VersionChange(None, version.digest, ChangeReason.LOADED)
            else:
                with updating(self.server, adapter):
                    version = await self.server.resolver.pushed(pushed, self.server.vllm.base_path)
                    change = await swap(
                        self.server, adapter, version, moves=moves, kept_versions=kept_versions, is_noted=True
                    )
            adapter.uri, adapter.held_digest = None, version.digest
        self.on_change()
        return change

    def check_pushed(self, name: str, expects: str | None) -> None:
        """Refuse a push before its bytes are read.

        Raises:
            InvalidAdapter: no adapter can have this name, or it names a version.
            VersionMismatch: another version is served than expected.
        """
        self._check_name(name)
        if "@" in name:
            raise InvalidAdapter(
                "a name with a revision",
                expected="a name without '@'",
                remedy="push the name; each version is served as NAME@DIGEST too",
                adapter=name,
            )
        _require_version(name, self.registry.get(name), expects)

    @asynccontextmanager
    async def ending_block(self, name: str) -> AsyncIterator[None]:
        """Inside, an operator has just this name loaded, which ends its block.

        Raises:
            AdapterNotFound: it is blocked by its name without the revision, or was blocked since.
            SourceUnavailable: the block cannot be taken from the store.
        """
        self.registry.blocked.refuse(name, but_itself=True)
        blocks = self.registry.blocked
        seen = blocks.present(name)
        yield
        with store_errors():
            has_ended = blocks.lift(name, None) if seen is None else await asyncio.to_thread(blocks.lift, name, seen)
        if not has_ended:
            raise blocked(name)

    async def prefetch(self, name: str, *, expects: str | None = None) -> ServedAdapter:
        """Bring an adapter into host memory before it is asked for.

        Raises:
            VersionMismatch: another version is served than expected.
            LoRAPluginsError: it cannot be served, or there is no room.
        """
        self.registry.blocked.refuse(name)
        change = await self.load(name, expects=expects)
        adapter = self.registry.require(name)
        if change.reason is not ChangeReason.LOADED:
            async with self.copies.using(adapter.request) as request:
                await self.planner.load(request, uri=adapter.uri, wants_slot=False)
        return adapter

    async def load_version(self, text: str) -> ServedAdapter | None:
        """Serve `name@digest`, the digest's first 8 characters or more, as a name of its own, beside `name`.

        None where the name has had no such version in this process, the store has it no more, or the text is no such
        name.

        Raises:
            LoRAPluginsError: it cannot be served.
        """
        name, _, prefix = text.partition("@")
        if not is_prefix(prefix):
            return None
        async with self.server.vllm.lock(text):
            adapter = self.registry.get(text)
            if adapter is not None:
                return adapter
            found = await self.server.resolver.of_digest(name, prefix)
            if found is None:
                return None
            try:
                version = await self.server.resolver.of_digest(text, found.digest, of_any_name=True)
            finally:
                self.server.release(name, found)
            if version is None:
                return None
            adapter = await self._load(text, None, version)
            adapter.held_digest = version.digest
        self.on_change()
        return adapter

    async def unload(
        self, name: str, *, block: bool, timeout_s: float | None = None, expects: str | None = None
    ) -> bool:
        """Serve a name no longer, and free its slot, host memory and lease once its running requests have left.

        They have `timeout_s` for that, then they are ended; those that are not admitted yet are refused at once.
        Returns whether all is free; if not, it will be as soon as the last has left. Where it is not `block`ed, a later
        request has it resolved again.

        A block is of all revisions. It holds before anything is waited for, and is on disk before this returns; where
        `timeout_s` is None, nobody waits for what has the name's lock, or for running requests.

        Raises:
            AdapterNotFound: there is no such name to unload.
            VersionMismatch: another version is served than expected; nothing has changed then.
            SourceUnavailable, OutOfMemory: the block holds in this server only, as it cannot be written.
        """
        if not block:
            freed = await self._free(name, no_longer_served(name), timeout_s, expects)
            if freed is None:
                raise not_served(name)
            return freed
        self._check_name(name)
        _require_version(name, self.registry.get(name), expects)
        blocks, refusal = self.registry.blocked, blocked(name)
        blocks.hold(name)
        served = [adapter for adapter in self.registry.all() if adapter.name in blocks]
        for adapter in served:
            self.server.retire(adapter.engine_id, refusal)  # what is held, or on its way to the engine
        names = {name, *(adapter.name for adapter in served)}
        freeing = [self.server.in_background(self._free(one, refusal, timeout_s)) for one in names]
        with store_errors():
            await asyncio.to_thread(blocks.write, name)
        done, pending = await asyncio.wait(freeing, timeout=_FREED_S if timeout_s is None else timeout_s + ABORT_S)
        return not pending and all(task.result() is not False for task in done)

    def load_failed(self, request: Any) -> None:
        """What was resolved, and is in vLLM's table, cannot be loaded after all: serve it no longer.

        Else it would be listed, and refused at every request.
        """
        adapter = self.registry.get(request.lora_name)
        if adapter is None or adapter.request is not request:
            return
        self.registry.remove(adapter.name)
        self.server.release(adapter.name, *adapter.versions)
        self.server.retire(adapter.engine_id)  # another engine may have it
        self.on_change()

    async def refresh(self, name: str, *, expects: str | None = None, moves: bool = False) -> VersionChange:
        """Look for a new version at the source and swap to it.

        One whose copy in the store is damaged is fetched and loaded again, as the same version.

        `moves`, here and below: what runs goes on with it too.

        Raises:
            VersionMismatch: another version is served than expected.
            LoRAPluginsError: there is one that cannot be served, or the source is unavailable; the old one goes on.
        """
        async with self.server.vllm.lock(name):
            adapter = self.registry.require(name)
            _require_version(name, adapter, expects)
            if adapter.given_path is None:
                adapter.held_digest = None
            return await self._refresh(adapter, moves=moves)

    async def poll(self, name: str) -> None:
        """As `refresh`, for the poller: what was rolled back stays, and errors are noted only.

        What has left the store is not fetched before it is asked for. What another server has blocked is unloaded.
        """
        if name in self.registry.blocked:
            self.server.in_background(self._free(name, blocked(name)))
            return
        async with self.server.vllm.lock(name):
            adapter = self.registry.get(name)
            if adapter is None or adapter.version is None or adapter.held_digest is not None:
                return
            if not self.server.resolver.store.is_leased(name, adapter.version.path):
                return
            try:
                await self._refresh(adapter)
            except LoRAPluginsError:
                return

    async def roll_back(
        self, name: str, digest: str | None = None, *, expects: str | None = None, moves: bool = False
    ) -> VersionChange:
        """Go back to the version before, or to the one whose digest begins with `digest`, and stay there.

        Kept are the last two versions; the store may have older ones still. Only of versions that this name has had may
        it be a beginning.

        Raises:
            VersionMismatch: another version is served than expected. AdapterNotFound: there is none to go back to.
            LoRAPluginsError: it cannot be loaded; the present one goes on.
        """
        async with self.server.vllm.lock(name):
            adapter = self.registry.require(name)
            _require_version(name, adapter, expects)
            version = next((v for v in adapter.previous if digest is None or v.digest.startswith(digest)), None)
            if version is not None and not await self.copies.has(name, version):
                version = None
            if version is None and digest is not None:
                version = await self.server.resolver.of_digest(name, digest, of_any_name=is_digest(digest))
            if version is None:
                kept = ", ".join(version.digest[:12] for version in adapter.previous) or "none"
                raise AdapterNotFound(
                    "no such version in the store" if digest else "no version before this one",
                    expected=f"one of those kept: {kept}",
                    remedy="load it from its source",
                    adapter=name,
                )
            change = await swap(self.server, adapter, version, moves=moves)
            adapter.held_digest = version.digest
        self.on_change()
        return change

    async def pin(self, name: str, *, expects: str | None = None) -> ServedAdapter:
        """Keep an adapter in host memory and in a slot until it is unpinned or unloaded; one slot stays for others.

        Raises:
            AdapterNotFound: it is not served. NoFreeSlot: there would be no slot left for all others.
            VersionMismatch: another version is served than expected.
        """
        async with self.server.vllm.lock(name):
            adapter = self.registry.require(name)
            _require_version(name, adapter, expects)
            if not adapter.is_pinned:
                async with self.copies.keeping(adapter) as request:
                    await self.planner.pin(request, uri=adapter.uri)
                adapter.is_pinned = True
        self.on_change()
        return adapter

    async def unpin(self, name: str) -> ServedAdapter:
        """Let it be evicted like any other.

        Raises:
            AdapterNotFound: it is not served.
        """
        async with self.server.vllm.lock(name):
            adapter = self.registry.require(name)
            adapter.is_pinned = False
            await self.planner.unpin(adapter.engine_id)
        self.on_change()
        return adapter

    async def _load(
        self, name: str, uri: str | None, version: ResolvedAdapter, *, is_noted: bool = False
    ) -> ServedAdapter:
        request = self.server.vllm.new_request(name, str(version.path), is_3d=version.is_3d)
        try:
            await self.planner.load(request, uri=uri, is_noted=is_noted)
        except BaseException:
            self.server.retire(request.lora_int_id)  # nobody will ask for this id again
            self.server.release(name, version)
            raise
        adapter = ServedAdapter(name, request, version, uri)
        self.registry.put(adapter)
        return adapter

    async def _free(
        self, name: str, refusal: LoRAPluginsError, timeout_s: float | None = None, expects: str | None = None
    ) -> bool | None:
        """What `unload` does with what is served under just this name; None where nothing is."""
        async with self.server.vllm.lock(name):
            _require_version(name, self.registry.get(name), expects)
            adapter = self.registry.remove(name)
        if adapter is None:
            return None
        self.on_change()
        return await self.server.drain(adapter, refusal, timeout_s)

    async def _refresh(self, adapter: ServedAdapter, *, moves: bool = False) -> VersionChange:
        if adapter.version is None:
            raise InvalidAdapter(
                "an adapter that was loaded by its Hub id",
                expected="one that comes from a source or a directory",
                remedy="load it with POST /v1/loras",
                adapter=adapter.name,
            )
        change = await self.copies.update(adapter, moves=moves)
        if adapter.given_path is not None:
            adapter.held_digest = adapter.version.digest
        if change.is_swap:
            self.on_change()
        return change

    def _check_name(self, name: str) -> None:
        if self.server.vllm.is_base_model(name):
            raise InvalidAdapter(
                "the name of the served base model", expected="another name", remedy="choose another", adapter=name
            )
        try:
            AdapterName.parse(name)
        except AdapterNotFound as error:
            raise InvalidAdapter(error.found, expected=error.expected, remedy="choose another name") from None


def _require_version(name: str, adapter: ServedAdapter | None, expects: str | None) -> None:
    if expects is None or (adapter is not None and _has_digest(adapter, expects)):
        return
    served = "no version" if adapter is None or adapter.version is None else f"version {adapter.version.digest}"
    raise VersionMismatch(
        served, expected=expects, remedy="look at what is served now (GET /v1/loras), and decide again", adapter=name
    )


def _has_digest(adapter: ServedAdapter, digest: str) -> bool:
    return adapter.version is not None and digest in (adapter.version.digest, ANY_VERSION)
