"""Give up adapters and leases that no request uses, so that the store has room, and the table of names stays short.

Runs in the event loop of the only API server, or of the leading one. `stored_copies.py` calls `relieve` where a fetch
finds no room for leases, and `unload_by_digest` every few seconds; `lifecycle.py` calls `make_place` before one more
mixture. Names stay served without their leases, unless the names are of a kind that a request makes and another makes
again: `NAME@DIGEST`, and mixtures.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Hashable, Iterable
from contextlib import suppress

from lora_plugins.errors import NoFreeSlot
from lora_plugins.lifecycle.api_server import ABORT_S, ApiServer
from lora_plugins.lifecycle.background_tasks import background
from lora_plugins.lifecycle.registry import ServedAdapter

MOST_BY_DIGEST = 1_000  # names `NAME@DIGEST`: a digest has 57 spellings, and a name has many versions
# A digest, the name that leases its copy, and the last use in seconds since 1970; None where unknown.
_Lease = tuple[str, str, float | None]
_MOST_MIXTURES = 32  # of one caller: each request may name another one


class IdleAdapters:
    """The adapters of one API server that no request uses."""

    def __init__(self, server: ApiServer) -> None:
        self._server, self._registry, self._planner = server, server.registry, server.planner
        self._store, self._lock = server.resolver.store, server.vllm.lock
        self._ending: set[str] = set()  # names whose earlier versions' leases end after a change

    async def relieve(self) -> None:
        """End leases of names for adapters without running requests, so that the store may remove the copies.

        Pinned adapters keep their leases. A name keeps the lease of its fixed digest, of a version that is the only
        copy, and, until the end of a change of the name, of earlier versions: no source may have them any more. A name
        `NAME@DIGEST` is unloaded: the next request loads the version again, as long as the store has a copy. A trainer
        that samples from each of its versions would otherwise fill the store. Mixtures are made again of their parts,
        so the store removes their copies first.
        """
        adapters = self._registry.all()
        changing = {it.name for it in adapters if it.previous and self._lock(it.name).locked()}
        await self._end_leases(it for one in adapters for it in self._spare_leases(one, changing))
        for name in changing - self._ending:
            background(self._end_earlier(name))
        await self.unload_by_digest()

    async def unload_by_digest(self, allowed: int = 0) -> None:
        """Unload idle names `NAME@DIGEST`, where more are served than allowed; a name that changes stays."""
        versions = [adapter for adapter in self._registry.all() if adapter.is_by_digest]
        if len(versions) > allowed and (unloading := await self._unload(versions)):
            await asyncio.wait(unloading, timeout=ABORT_S)  # a request may have come since the look

    async def make_place(self, caller: Hashable) -> None:
        """Unload the mixtures of a caller that were used longest ago, until one more may be served.

        Raises:
            NoFreeSlot: requests use all of them.
        """
        while len(theirs := self._registry.mixtures_of(caller)) >= _MOST_MIXTURES:
            used_at = self._planner.used_at
            theirs.sort(key=lambda it: used_at.get(it.engine_id, 0.0))
            if not await self._unload(theirs, most=1):
                raise NoFreeSlot(
                    f"{len(theirs)} mixtures of one caller in use at once",
                    expected=f"{_MOST_MIXTURES} at most",
                    remedy="ask again once requests of another mixture have ended",
                )

    def _spare_leases(self, adapter: ServedAdapter, changing: Collection[str] = ()) -> list[_Lease]:
        """Return the leases of a name that may end; where the name is `changing`, none of an earlier version."""
        if adapter.is_pinned:
            return []
        earlier = () if adapter.name in changing else adapter.previous
        spare: list[_Lease] = [(version.digest, adapter.name, None) for version in earlier]
        if (present := adapter.version) is not None and not adapter.is_only_copy:
            # The store removes first what was used longest ago, and mixtures are made again of their parts.
            used_at = 0.0 if present.parts else self._planner.used_at.get(adapter.engine_id)
            spare.append((present.digest, adapter.name, used_at))
        return [lease for lease in spare if lease[0] != adapter.held_digest]

    async def _end_leases(self, spare: Iterable[_Lease]) -> None:
        """End leases, in a thread because the disk may hang."""
        # The names' leases end now, not when a thread has the time: by then a name may need its version.
        leases, nobody = list(spare), object()
        for digest, name, _ in leases:
            with suppress(KeyError):
                self._store.leases.hand_over(digest, name, nobody)
        of_nobody = [(digest, nobody, used_at) for digest, _, used_at in leases]
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._store.end_leases, of_nobody))

    async def _end_earlier(self, name: str) -> None:
        """End leases as `relieve` does, after the change under way: else calls without a gap keep them for ever."""
        self._ending.add(name)
        try:
            async with self._lock(name):
                if (adapter := self._registry.get(name)) is not None:
                    await self._end_leases(self._spare_leases(adapter))
        finally:
            self._ending.discard(name)

    async def _unload(self, adapters: Iterable[ServedAdapter], most: float = math.inf) -> list[asyncio.Task[None]]:
        """Unload the first `most` idle adapters; each task returned is done once all of one adapter is free."""
        states, unloading = await self._planner.states(), list[asyncio.Task[None]]()
        for adapter in adapters:
            if len(unloading) >= most:
                break
            state = states(adapter.engine_id)
            # The caller may hold a lock, so wait for none.
            is_busy = state.held or state.running or self._lock(adapter.name).locked()
            if not (adapter.is_pinned or is_busy) and self._registry.get(adapter.name) is adapter:
                self._registry.remove(adapter.name)
                unloading.append(self._server.drain(adapter))
        if unloading:
            self._server.on_change()
        return unloading
