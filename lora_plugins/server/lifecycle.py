"""Changing what is served while requests run: load and unload; with `swaps` and `pins`, all that the admin API does."""

from __future__ import annotations

import asyncio
import time

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError
from lora_plugins.events import AdapterUnloaded
from lora_plugins.server.registry import Served, Version, blocked, no_longer_served, not_served
from lora_plugins.server.swaps import Swaps

_ABORT_S = 10.0


class Changes(Swaps):
    """The operations behind the admin API, vLLM's unload endpoint and the look-out for new versions.

    Each holds the name's lock while it decides, so that one name changes one step at a time; none holds it while it
    waits for running requests.
    """

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
                served.uri, served.held_digest = uri, None
            self.catalogue.blocked.discard(name)
        self.changed()
        return served, is_new

    async def prefetch(self, name: str) -> Served:
        """Bring an adapter into host memory before it is asked for.

        Raises:
            LoRAPluginsError: it cannot be served, or there is no room.
        """
        served, is_new = await self.load(name)
        if not is_new:
            await self.planner.load(served.request, uri=served.uri, wants_slot=False)
        return served

    async def unload(self, name: str, *, block: bool, timeout_s: float) -> bool:
        """Serve a name no longer, and free its slot, host memory and lease once its running requests have left.

        They have `timeout_s` for that, then they are ended; those that are not admitted yet are refused at once.
        Returns whether all is free; if not, it will be as soon as the last has left. Where it is not `block`ed, a later
        request has it resolved anew.

        Raises:
            AdapterNotFound: there is no such name to unload.
        """
        if block:
            self._check_name(name)
            self.catalogue.blocked.add(name)  # at once: who comes while this waits for the lock would resolve it anew
        async with self._engine.lock(name):
            if block:
                self.catalogue.blocked.add(name)  # a load that had the lock before has taken it out
            served = self.catalogue.take_out(name)
        if served is None:
            if block:
                return True
            raise not_served(name)
        self.changed()
        return await self.free(served, timeout_s, blocked(name) if block else no_longer_served(name))

    async def free(self, served: Served, timeout_s: float, refusal: LoRAPluginsError) -> bool:
        """Free what was taken out of the table, as for `unload`; `refusal` is for requests that are not admitted."""
        started, engine_id = time.perf_counter(), served.request.lora_int_id
        aborted = 0

        def tell() -> None:
            self._events.emit(AdapterUnloaded(served.name, time.perf_counter() - started, aborted))

        task = self._let_go(served, refusal, tell)
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            running = (await self.planner.places())(engine_id).running
            aborted = len(running)
            await self._engine.abort(list(running))
            done, _ = await asyncio.wait([task], timeout=_ABORT_S)
        return bool(done)

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
