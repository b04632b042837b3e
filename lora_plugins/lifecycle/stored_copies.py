"""The store's copies of served adapters: present, and with the bytes of their digests, before an engine reads them.

Runs in the event loop of each API server: `vllm_patches/api_server/async_llm.py` enters `using` for each request, and
`watch` looks for damage every few seconds. A follower has the subclass of `followed_copies.py`.

An engine may read an adapter again for any request of the adapter, but for no other request. So each request has a
lease of its own, from before the request reaches the engine until the request has ended; the name's own lease ends
where a fetch needs the room. A missing copy is fetched again before the request goes on, and so is a damaged copy,
whichever process finds the damage. The engines then read the new copy under another engine id and another spelling of
the path, because keys of cached prefixes hold the path: no request finds prefixes computed with damaged weights.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from cachetools import TTLCache

from lora_plugins.errors import ErrorKind, LoRAPluginsError, OfAdapter, SourceUnavailable, kind_of
from lora_plugins.events import Event, StoreDamaged
from lora_plugins.lifecycle.api_server import ApiServer
from lora_plugins.lifecycle.idle_adapters import MOST_BY_DIGEST, IdleAdapters
from lora_plugins.lifecycle.leader import Leader
from lora_plugins.lifecycle.principal_limits import NO_LIMIT, Share, Shares
from lora_plugins.lifecycle.registry import ServedAdapter, gone_from_source
from lora_plugins.lifecycle.swapping import VersionChange, change, updating
from lora_plugins.log import logger
from lora_plugins.resolvers.known_versions import ResolvedAdapter
from lora_plugins.store.disk_errors import DamagedCopy

TRIES = 3  # while a request waits for a copy, the name may get another version, or the copy may be damaged again
LOOK_S = 2.0
_LOOKED_AT = 200  # copies in one look: a thousand system calls
_RETRY_S = 15.0  # between two fetches of a missing copy that the engines need not read
_HASHED_S = 60.0  # a copy hashed so lately is not hashed again because an engine could not load it


class Copies:
    """The copies of one API server.

    Args:
        leader: with followers, which end leases too where room is needed; None for a follower's copies.
    """

    def __init__(self, server: ApiServer, leader: Leader | None = None) -> None:
        self._server, self._leader = server, leader
        self._registry, self._resolver, self._store = server.registry, server.resolver, server.resolver.store
        budgets_bytes = (self._store.max_bytes, self._resolver.settings.host_max_bytes)
        max_bytes = min((it for it in budgets_bytes if it is not None), default=None)
        self._shares = Shares(server.vllm.host_places, max_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None  # of the server; damage may be found in another thread
        self._next = 0  # of the served digests in order: where the next `look` begins
        self._pressed_at: int | None = None  # when a process needed room, as of the last `look`
        self.idle = IdleAdapters(server)
        self._store.relieve = self.relieve
        # Names whose copies could not be fetched a moment ago.
        self._tried: TTLCache[str, None] = TTLCache(math.inf, _RETRY_S, timer=time.monotonic)
        noted = weakref.WeakMethod(self._noted)  # the events live as long as the process, which may outlive this server
        server.events.add(lambda event: None if (note := noted()) is None else note(event))

    @asynccontextmanager
    async def using(self, request: Any, share: Share = NO_LIMIT) -> AsyncIterator[Any]:
        """Inside, an engine may read the copy of the yielded request: the given request, or the name's present request.

        Raises:
            NoFreeSlot: the adapter would exceed the `share`.
            LoRAPluginsError: the copy is missing or damaged, and no source replaces the copy.
        """
        holder = object()
        async with self.sharing(share, request.lora_name):
            request = await self._readable(request, holder)
            try:
                yield request
            finally:
                self._store.release(holder, request.lora_path)

    def sharing(self, share: Share, name: str) -> AbstractAsyncContextManager[object]:
        """Inside, a request of `share` uses the adapter of a name; raises the errors of `Shares.using`."""
        adapter = self._registry.get(name)
        size_bytes = adapter.version.size_bytes if adapter is not None and adapter.version is not None else 0
        return self._shares.using(share, name, size_bytes)

    @asynccontextmanager
    async def keeping(self, adapter: ServedAdapter) -> AsyncIterator[Any]:
        """Do as `using`, for the present version, for a caller with the name's lock."""
        holder = object()
        # `relieve` may end the name's lease between `_mend` and `share`, so try a few times.
        for _ in range(TRIES):
            await self._mend(adapter)
            # From here the request's own lease keeps the copy, whatever happens to the name's lease.
            if self._store.share(adapter.request.lora_path, holder):
                break
        request = adapter.request
        try:
            yield request
        finally:
            self._store.release(holder, request.lora_path)

    async def has(self, name: str, version: ResolvedAdapter) -> bool:
        """Whether the store still has a version with sound bytes; leases the version for the name if so."""
        return await self._lease(version.digest, name, lambda: self._server.forget(name, version))

    async def have(self, name: str, engine_id: int) -> bool:
        """Fetch the copy of a version again for a follower; False where the engine goes on with the weights in memory.

        Raises:
            LoRAPluginsError: no copy can be had, and the engine would have to read one.
        """
        async with self._server.vllm.lock(name):
            adapter = self._registry.get(name)
            if adapter is None or adapter.version is None or adapter.engine_id != engine_id:
                return True  # the leader has already told the follower the name's new version
            return await self._mend_if_read(adapter)

    async def update(self, adapter: ServedAdapter, *, moves: bool = False, is_bound: bool = False) -> VersionChange:
        """Swap to the newest version at the source; replace and load a damaged copy again, even by the same version.

        The caller holds the name's lock. With `is_bound`, only the name's fixed digest is accepted, if the name has
        one; without, the digest is fixed no longer, except by a path.

        Raises:
            LoRAPluginsError: no version can be had; the name goes on serving the present version.
        """
        try:
            with updating(self._server, adapter):
                held = adapter.held_digest if is_bound else None
                newest = await self._newest_sound(adapter, held)
                # A name loaded by its path stays at the bytes read there, and the poller leaves the name alone.
                place = adapter.uri, held if adapter.given_path is None else newest.digest
                made = await change(self._server, adapter, newest, *place, moves=moves, is_noted=True)
        except LoRAPluginsError as error:
            # An outage does not prove that the source has lost the version; an answer about the adapter does.
            adapter.is_only_copy = adapter.is_only_copy or isinstance(error, OfAdapter)
            raise
        self._tried.pop(adapter.name, None)
        return made

    async def after_failure(self, request: Any, error: LoRAPluginsError) -> Any:
        """Return the request to try again with, where the copy is why an engine failed to load; None where not.

        A damaged copy is flagged. A missing copy, of which the source has another version by now, is replaced here.
        """
        digest = self._store.digest_at(request.lora_path)
        if digest is None:
            return None
        is_missing = not self._store.is_marked(digest) and not self._store.has(Path(request.lora_path))
        if is_missing and isinstance(error, SourceUnavailable):
            with suppress(LoRAPluginsError):  # the engine has already asked the source: its error stands
                return await self._replaced(request)
        if is_missing or not isinstance(error, OfAdapter):
            return None
        try:
            if await asyncio.to_thread(self._store.is_sound, digest, max_age_s=_HASHED_S):
                return None
        except SourceUnavailable:  # nobody can tell now whether the copy is at fault
            return request
        self._flag(digest)
        return request if self._registry.get(request.lora_name) is not None else None

    async def look(self) -> None:
        """Find damaged copies, whichever process has marked them, and load their adapters again; make room if asked."""
        self._loop = asyncio.get_running_loop()
        served = {adapter.version.digest for adapter in self._registry.all() if adapter.version is not None}
        # A window that moves on at each look, so that all copies are looked at in turn.
        some = sorted(served)[self._next : self._next + _LOOKED_AT]
        self._next = self._next + _LOOKED_AT if self._next + _LOOKED_AT < len(served) else 0
        marked, replaced = await asyncio.to_thread(self._store.changed, served, some)
        for digest in marked:
            if self._flag(digest):
                self._server.events.emit(StoreDamaged(digest))
        for digest in replaced:
            with suppress(SourceUnavailable):
                await asyncio.to_thread(self._store.is_sound, digest)
            self._flag(digest)  # even if sound by now: the engines may have read the bytes in between
        # A new mark says that a fetch of another process needs room. The first look only learns the mark's time, which
        # may be of long ago.
        before, self._pressed_at = self._pressed_at, await asyncio.to_thread(self._store.pressed_at)
        if before not in (None, self._pressed_at):
            await self.relieve()
        await self.idle.unload_by_digest(MOST_BY_DIGEST)
        due = [it for it in self._registry.all() if it.is_damaged and it.name not in self._tried]
        await asyncio.gather(*(self._mend_damaged(adapter) for adapter in due))

    async def relieve(self) -> None:
        """End leases of adapters without running requests: the store calls this where leases are in a fetch's way."""
        await self.idle.relieve()
        if self._leader is not None:
            with suppress(SourceUnavailable):  # a follower that does not answer ends its leases later
                await self._leader.relieve()

    async def _readable(self, request: Any, holder: object) -> Any:
        """Return a request whose copy an engine may read now: the given request, or the name's present request.

        The copy is leased to `holder`, unless the engine need not read a copy: it has the weights, or the path is
        outside the store.
        """
        self._loop = self._loop or asyncio.get_running_loop()
        for _ in range(TRIES):
            if not self._is_flagged(request) and self._store.share(request.lora_path, holder):
                return request
            if (digest := self._store.digest_at(request.lora_path)) is None:
                return request  # outside the store, so nothing to lease
            async with self._server.vllm.lock(request.lora_name):
                adapter = self._registry.get(request.lora_name)
                if adapter is None or adapter.version is None:
                    # Unloaded meanwhile; the engine may have the weights, or else reads the copy, if there is one.
                    with suppress(LoRAPluginsError):
                        await self._lease(digest, holder, partial(self._store.release, holder, request.lora_path))
                    return request
                must_read = await self._mend_if_read(adapter)
                request = adapter.request
            if not must_read:
                return request
        raise DamagedCopy.of(Path(request.lora_path).name)

    def _is_flagged(self, request: Any) -> bool:
        """Whether the copy of a request was found damaged, and its name has no other version yet."""
        adapter = self._registry.get(request.lora_name)
        return adapter is not None and adapter.is_damaged and adapter.engine_id == request.lora_int_id

    async def _mend_if_read(self, adapter: ServedAdapter) -> bool:
        """Mend a copy; False where no copy can be had, and the engine goes on with the weights in memory.

        After a failure the source is asked again only after `_RETRY_S`, not at each request.

        Raises:
            LoRAPluginsError: no copy can be had, and the engine would have to read one.
        """
        if adapter.name in self._tried and await self._is_in_memory(adapter):
            return adapter.version is not None and await self.has(adapter.name, adapter.version)
        try:
            await self._mend(adapter)
        except LoRAPluginsError as error:
            if kind_of(error) is ErrorKind.REFUSAL or not await self._is_in_memory(adapter):
                raise
            self._tried[adapter.name] = None
            return False
        return True

    async def _is_in_memory(self, adapter: ServedAdapter) -> bool:
        """Whether the engines have the weights in host memory, from a sound copy."""
        return not adapter.is_damaged and (await self._server.planner.states())(adapter.engine_id).is_loaded

    async def _mend_damaged(self, adapter: ServedAdapter) -> None:
        async with self._server.vllm.lock(adapter.name):
            if self._registry.get(adapter.name) is adapter and adapter.is_damaged:
                self._tried[adapter.name] = None
                with suppress(LoRAPluginsError):  # `update` has noted the error
                    await self._mend(adapter)

    async def _mend(self, adapter: ServedAdapter) -> None:
        """Have a sound copy leased for a name; a missing or damaged copy is replaced, perhaps by a newer version."""
        if adapter.version is None or (not adapter.is_damaged and await self.has(adapter.name, adapter.version)):
            return
        self._note_damage(adapter)
        await self.update(adapter, is_bound=True)

    async def _newest_sound(self, adapter: ServedAdapter, held_digest: str | None) -> ResolvedAdapter:
        """Return the newest version at the source, with sound bytes, leased for the name; raises as `update`."""
        name, server = adapter.name, self._server
        self._note_damage(adapter)
        # The second try replaces a copy that `is_sound` has just found damaged.
        for _ in range(2):
            # `latest` asks the source, whatever the source answered a moment ago.
            newest = await self._resolver.latest(name, adapter.uri, server.vllm.base_path)
            if newest is None or held_digest not in (None, newest.digest):
                server.release(name, *([] if newest is None else [newest]))
                if adapter.is_damaged and adapter.version is not None:
                    raise DamagedCopy.of(adapter.version.digest, "its source does not have them any more")
                raise gone_from_source(name)
            with server.released_on_error(name, newest):
                if await asyncio.to_thread(self._store.is_sound, newest.digest):
                    return newest
            server.release(name, newest)
            self._note_damage(adapter)
            digest = newest.digest
        raise DamagedCopy.of(digest, "it cannot be replaced")

    async def _replaced(self, request: Any) -> Any:
        """Return the present request of a name whose copy is missing; None where the name is served no more."""
        await self.have(request.lora_name, request.lora_int_id)
        adapter = self._registry.get(request.lora_name)
        return None if adapter is None else adapter.request

    async def _lease(self, digest: str, holder: Hashable, end: Callable[[], object]) -> bool:
        """Lease the copy of a digest, if its bytes are sound; `end` ends the lease of a caller who has left."""
        leasing = asyncio.get_running_loop().run_in_executor(None, self._store.acquire_sound, digest, holder)
        try:
            return await asyncio.shield(leasing) is not None
        except asyncio.CancelledError:  # the thread goes on, perhaps behind an unload of the name
            leasing.add_done_callback(lambda _: end())
            raise

    def _note_damage(self, adapter: ServedAdapter) -> None:
        if adapter.version is not None and self._store.is_marked(adapter.version.digest):
            self._flag(adapter.version.digest)

    def _flag(self, digest: str) -> bool:
        """Flag adapters with this digest: engines may have loaded damaged bytes. Returns whether any flag is new."""
        found = [adapter for adapter in self._registry.all() if adapter.version and adapter.version.digest == digest]
        new = [adapter for adapter in found if not adapter.is_damaged]
        for adapter in new:
            adapter.is_damaged = True
            adapter.failed(DamagedCopy.of(digest))
        return bool(new)

    def _noted(self, event: Event) -> None:
        """Schedule the flag at once, from any thread: a load after the replacement reads a sound copy."""
        if isinstance(event, StoreDamaged) and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._flag, event.digest)


async def watch(copies: weakref.ref[Copies], interval_s: float = LOOK_S) -> None:
    """Call `look` every `interval_s` seconds, as long as another owner keeps `copies` alive."""
    while True:
        await asyncio.sleep(interval_s)
        there = copies()
        if there is None:
            return
        try:
            await there.look()
        except ReferenceError:
            return  # vLLM's server is gone
        except Exception:  # noqa: BLE001 - the next look may succeed
            logger.exception("Looking after the copies in the store failed")
        del there
