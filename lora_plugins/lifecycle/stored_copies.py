"""The store's copies of served adapters: present, and with the bytes of their digests, before an engine reads them.

Runs in the event loop of each API server: `vllm_patches/api_server/async_llm.py` enters `using` for each request, and
`watch` looks for damage every few seconds. A follower has the subclass of `followed_copies.py`.

An engine may read an adapter's copy again for any request of the adapter, and at no other time. So each request leases
the copy, from before the request reaches the engine until the request has ended. The name has a lease too, which ends
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

# While a request waits for a copy, the name may get another version, or the copy may be damaged again: then try again.
TRIES = 3
LOOK_S = 2.0
_LOOKED_AT = 200  # copies in one `look`, which takes a thousand system calls
_RETRY_S = 15.0  # between two fetches of a missing copy that the engines need not read
_HASHED_S = 60.0  # after a failed load, a copy that was hashed within this time is not hashed again


class Copies:
    """The copies of one API server.

    Args:
        leader: has the followers, if any, end their leases too where a fetch needs room; None for a follower's copies.
    """

    def __init__(self, server: ApiServer, leader: Leader | None = None) -> None:
        self._server, self._leader = server, leader
        self._registry, self._resolver, self._store = server.registry, server.resolver, server.resolver.store
        # What all principals share: the smaller of the budgets of store and host memory; None where neither is set.
        budgets_bytes = (self._store.max_bytes, self._resolver.settings.host_max_bytes)
        max_bytes = min((it for it in budgets_bytes if it is not None), default=None)
        self._shares = Shares(server.vllm.host_places, max_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None  # of the server; damage may be found in another thread
        self._next = 0  # of the served digests in order: where the next `look` begins
        # When a process last needed room, as read by the last `look`; None before the first `look`.
        self._pressed_at: int | None = None
        self.idle = IdleAdapters(server)
        self._store.relieve = self.relieve
        # Names whose copies could not be fetched a moment ago.
        self._tried: TTLCache[str, None] = TTLCache(math.inf, _RETRY_S, timer=time.monotonic)
        noted = weakref.WeakMethod(self._noted)  # the events live as long as the process, which may outlive this server
        server.events.add(lambda event: None if (note := noted()) is None else note(event))

    @asynccontextmanager
    async def using(self, request: Any, share: Share = NO_LIMIT) -> AsyncIterator[Any]:
        """Inside, an engine may read the copy of the yielded request.

        The yielded request is the given one, or the name's present one where the given one's copy had to be replaced.

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
        """Inside, a principal's request uses the adapter of a name, which counts against the principal's `share`.

        Raises the errors of `Shares.using`.
        """
        adapter = self._registry.get(name)
        # The size of an adapter that only the workers have is not known.
        size_bytes = adapter.version.size_bytes if adapter is not None and adapter.version is not None else 0
        return self._shares.using(share, name, size_bytes)

    @asynccontextmanager
    async def keeping(self, adapter: ServedAdapter) -> AsyncIterator[Any]:
        """Do as `using` without a share, for the name's present version; the caller holds the name's lock."""
        holder = object()
        # `relieve` may end the name's lease between `_mend` and `share`, so try a few times.
        for _ in range(TRIES):
            await self._mend(adapter)
            # `holder` keeps the copy from here on, whatever happens to the name's lease.
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
        """Have a sound copy of a version that a follower's request needs; a missing or damaged copy is fetched again.

        Returns False where no copy can be had, and the engine goes on with the weights in memory.

        Raises:
            LoRAPluginsError: no copy can be had, and the engine would have to read one.
        """
        async with self._server.vllm.lock(name):
            adapter = self._registry.get(name)
            if adapter is None or adapter.version is None or adapter.engine_id != engine_id:
                return True  # the leader has already sent the follower what the name serves now, if anything
            return await self._mend_if_read(adapter)

    async def update(self, adapter: ServedAdapter, *, moves: bool = False, is_bound: bool = False) -> VersionChange:
        """Swap to the newest version at the source; a damaged copy is fetched and loaded again, even of this version.

        The caller holds the name's lock. With `is_bound`, a name with a fixed digest accepts only this digest. Without
        `is_bound`, any digest is accepted, and the name's digest is fixed no longer, except of a name loaded by a path.

        Raises:
            LoRAPluginsError: no version can be had; the name goes on serving the present version.
        """
        try:
            with updating(self._server, adapter):
                held = adapter.held_digest if is_bound else None
                newest = await self._newest_sound(adapter, held)
                # A name loaded by its path stays at the bytes read there, and the poller leaves the name alone.
                uri_and_held = adapter.uri, held if adapter.given_path is None else newest.digest
                # `updating` emits the event of a failure.
                made = await change(self._server, adapter, newest, *uri_and_held, moves=moves, is_noted=True)
        except LoRAPluginsError as error:
            # An outage does not prove that the source has lost the version; an answer about the adapter does.
            adapter.is_only_copy = adapter.is_only_copy or isinstance(error, OfAdapter)
            raise
        self._tried.pop(adapter.name, None)
        return made

    async def after_failure(self, request: Any, error: LoRAPluginsError) -> Any:
        """Return the request to try again with, where an engine failed to load because of the copy; else None.

        A damaged copy is flagged, and replaced when the caller tries again. A missing copy is replaced here, where the
        engine's own fetch has failed: the source may have another version by now.
        """
        digest = self._store.digest_at(request.lora_path)
        if digest is None:  # the path is outside the store
            return None
        is_missing = not self._store.is_marked(digest) and not self._store.has(Path(request.lora_path))
        if is_missing and isinstance(error, SourceUnavailable):
            with suppress(LoRAPluginsError):  # the engine has already asked the source: its error stands
                return await self._replaced(request)
        # Only an error about the adapter's bytes can come from a damaged copy.
        if is_missing or not isinstance(error, OfAdapter):
            return None
        try:
            if await asyncio.to_thread(self._store.is_sound, digest, max_age_s=_HASHED_S):
                return None
        except SourceUnavailable:  # the disk does not answer now, so the copy may be at fault: try again
            return request
        self._flag(digest)
        return request if self._registry.get(request.lora_name) is not None else None

    async def look(self) -> None:
        """Find damaged copies and load their adapters again; end leases where another process needs room.

        Any process of the store may mark a copy as damaged, or replace a damaged copy.
        """
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
            self._flag(digest)  # even if the copy is sound by now: the engines may have read the damaged bytes before
        # A new mark says that a fetch of another process needs room. The first look only learns the mark's time, which
        # may be of long ago.
        before, self._pressed_at = self._pressed_at, await asyncio.to_thread(self._store.pressed_at)
        if before not in (None, self._pressed_at):  # not the first look, and the mark is new
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
                return request  # the path is outside the store: there is nothing to lease
            async with self._server.vllm.lock(request.lora_name):
                adapter = self._registry.get(request.lora_name)
                if adapter is None or adapter.version is None:
                    # Unloaded meanwhile; the engine may have the weights, or else reads the copy, if there is one.
                    with suppress(LoRAPluginsError):
                        await self._lease(digest, holder, partial(self._store.release, holder, request.lora_path))
                    return request
                has_copy = await self._mend_if_read(adapter)
                request = adapter.request
            if not has_copy:
                return request
            # The next round leases the mended copy to `holder`.
        raise DamagedCopy.of(Path(request.lora_path).name)

    def _is_flagged(self, request: Any) -> bool:
        """Whether the copy of a request was found damaged, and its name has no other version yet."""
        adapter = self._registry.get(request.lora_name)
        return adapter is not None and adapter.is_damaged and adapter.engine_id == request.lora_int_id

    async def _mend_if_read(self, adapter: ServedAdapter) -> bool:
        """Mend the copy of a name's present version; the caller holds the name's lock.

        Returns whether there is a sound copy; False where none can be had, and the engine goes on with the weights in
        memory. After a failure the source is asked again only after `_RETRY_S`, not at each request.

        Raises:
            LoRAPluginsError: no copy can be had, and the engine would have to read one.
        """
        if adapter.name in self._tried and await self._is_in_memory(adapter):
            # Look into the store only: another process may have fetched the copy meanwhile.
            return adapter.version is not None and await self.has(adapter.name, adapter.version)
        try:
            await self._mend(adapter)
        except LoRAPluginsError as error:
            # A refusal is about the caller or the server's settings, and holds whatever is in memory.
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
        # Before `update`, which loads again where the adapter is flagged: `has` may have found damage.
        self._note_damage(adapter)
        await self.update(adapter, is_bound=True)

    async def _newest_sound(self, adapter: ServedAdapter, held_digest: str | None) -> ResolvedAdapter:
        """Return the newest version at the source, with sound bytes, leased for the name.

        With `held_digest`, the newest version must have this digest. Raises as `update`.
        """
        name, server = adapter.name, self._server
        self._note_damage(adapter)
        # The second try replaces a copy that `is_sound` has just found damaged.
        for _ in range(2):
            # `latest` asks the source again, even if an answer of a moment ago is remembered.
            newest = await self._resolver.latest(name, adapter.uri, server.vllm.base_path)
            if newest is None or held_digest not in (None, newest.digest):
                server.release(name, *([] if newest is None else [newest]))
                # The error says what the operator has to mend: the damaged copy that nothing replaces.
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
        """Lease the copy of a digest if its bytes are sound, and return whether.

        `end` releases the lease where the caller was cancelled: the thread takes the lease all the same.
        """
        leasing = asyncio.get_running_loop().run_in_executor(None, self._store.acquire_sound, digest, holder)
        try:
            return await asyncio.shield(leasing) is not None
        except asyncio.CancelledError:  # the thread goes on, perhaps until after an unload of the name
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
        """Flag a copy that an event says is damaged, from any thread.

        The flag must come before a fetch replaces the copy: a load after the replacement needs no flag.
        """
        if isinstance(event, StoreDamaged) and self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
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
        del there  # while this task sleeps, its reference must not keep the copies alive
