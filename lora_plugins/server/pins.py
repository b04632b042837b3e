"""Keeping an adapter in host memory and in a slot, whether it is asked for or not."""

from __future__ import annotations

from lora_plugins.server.registry import Served
from lora_plugins.server.serving import Serving


class Pins(Serving):
    """Pin and unpin; one slot at least stays for all others."""

    async def pin(self, name: str) -> Served:
        """Keep an adapter in host memory and in a slot until it is unpinned or unloaded.

        Raises:
            AdapterNotFound: it is not served. NoFreeSlot: there would be no slot left for all others.
        """
        async with self._engine.lock(name):
            served = self._known(name)
            if not served.is_pinned:
                await self.planner.pin(served.request, uri=served.uri)
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
            await self.planner.unpin(served.request.lora_int_id)
        self.changed()
        return served
