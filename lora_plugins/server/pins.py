"""Keeping an adapter in host memory and in a slot, whether it is asked for or not."""

from __future__ import annotations

from typing import Any

from lora_plugins.errors import NoFreeSlot
from lora_plugins.server.served import Served
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
        names = {served.name for served in self.catalogue.all() if served.is_pinned} | set(self._pinning)
        pinned = len(names - {request.lora_name})
        if pinned + 1 >= self._engine.slots:
            raise NoFreeSlot(
                f"{self._engine.slots} slots, of which {pinned} are pinned",
                expected="one slot at least that is left for all others",
                remedy="unpin an adapter, or raise --max-loras",
                adapter=request.lora_name,
            )
        self._pinning.append(request.lora_name)  # staging takes its time, and others may be pinned meanwhile
        try:
            async with self.gate.held(request):
                await self._rpc("lora_plugins_pin", (request.lora_int_id,))
        finally:
            self._pinning.remove(request.lora_name)
