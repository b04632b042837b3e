"""The store's copies of served adapters in a follower: an API server that another one leads (`leader.py`).

Runs in the follower's event loop, in the place of `stored_copies.Copies`, for each request of an adapter. The leader
leases the copy of each served version. The follower leases the copies that its own requests need, so that the store
keeps these copies even where the leader's leases end. The follower fetches no copy: it asks the leader (`have`) for
missing and damaged copies.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import asdict
from typing import Any

from lora_plugins.errors import SourceUnavailable
from lora_plugins.lifecycle.api_server import ApiServer
from lora_plugins.lifecycle.follower import Follower
from lora_plugins.lifecycle.principal_limits import Share
from lora_plugins.lifecycle.stored_copies import TRIES, Copies
from lora_plugins.store.disk_errors import DamagedCopy


class FollowedCopies(Copies):
    """A follower's copies.

    As in the leader, a name has a lease besides its requests' leases; here the first request takes the name's lease,
    which ends when the leader's table has another version for the name.
    """

    def __init__(self, server: ApiServer, follower: Follower) -> None:
        super().__init__(server)
        self._follower = follower

    def changed(self, name: str, before: Any) -> None:
        """Release the copy that a name had before, where the name now has another copy or none.

        `before`: vLLM's request that the table had for the name; None where the table had none.
        """
        now = self._follower.table.get(name)
        if before is not None and (now is None or now.lora_path != before.lora_path):
            self._store.release(name, before.lora_path)

    def sharing(self, share: Share, name: str) -> AbstractAsyncContextManager[object]:
        """Share as `Copies.sharing` does: a share covers all API servers, and the leader counts its places."""
        return self._follower.lasting("use", name=name, share=asdict(share)) if share.is_limit else nullcontext()

    async def relieve(self) -> None:
        """End all names' leases: the leader leases the copies that must stay in the store.

        Leases of running requests stay.
        """
        # Digest, holder, and no time of last use: the leader's leases note the use.
        idle = [(digest, name, None) for name, request in list(self._follower.table.items())
                if (digest := self._store.digest_at(request.lora_path)) is not None]  # fmt: skip
        await asyncio.to_thread(self._store.end_leases, idle)

    async def _readable(self, request: Any, holder: object) -> Any:
        with suppress(SourceUnavailable):  # the leader is gone, and this process will end (`end_without_leader`)
            self._follower.used(request.lora_int_id)
        digest = None
        for _ in range(TRIES):
            digest = self._store.digest_at(request.lora_path)
            if digest is None or await self._is_leased(request, digest, holder):  # None: a path outside the store
                return request
            answer = await self._follower.call("have", name=request.lora_name, engine_id=request.lora_int_id)
            present = self._follower.table.get(request.lora_name)
            if present is None:
                return request  # unloaded meanwhile; the engine may have the weights
            if not answer["is_had"]:
                return present  # the engine has the weights in memory and need not read the copy
            request = present  # the leader has a sound copy: lease it in the next round
        raise DamagedCopy.of(digest or request.lora_path)

    async def _replaced(self, request: Any) -> Any:
        await self._follower.call("have", name=request.lora_name, engine_id=request.lora_int_id)
        return self._follower.table.get(request.lora_name)

    async def _is_leased(self, request: Any, digest: str, holder: object) -> bool:
        """Lease the copy of a request to `holder`, and return whether; False where it is missing or found damaged."""
        if self._store.is_marked(digest):
            return False
        if self._store.share(request.lora_path, holder):
            return True
        # This process has no lease of the copy yet: lease it for the name first, then share the name's lease.
        name = request.lora_name
        leasing = asyncio.get_running_loop().run_in_executor(None, self._store.acquire, digest, name)
        try:
            return await asyncio.shield(leasing) is not None and self._store.share(request.lora_path, holder)
        finally:
            # The name may get another version while the thread leases this copy. `changed` was called before the lease
            # then, so call it again after the lease; it does nothing where the name still has this copy.
            leasing.add_done_callback(lambda _: self.changed(name, request))
