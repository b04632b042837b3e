"""What a server serves from its start: names that are to be preloaded, and those that the last one served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot, SourceUnavailable
from lora_plugins.log import logger
from lora_plugins.resolvers.sources.uri import is_path
from lora_plugins.server.lifecycle import Lifecycle, is_of_digest
from lora_plugins.server.served_file import ServedFile, ServedName
from lora_plugins.settings import Settings

_LOADED_AT_ONCE = 4
_WRITE_DELAY_S = 0.5
_RETRY_S = 15.0


class Restore:
    """Loads them, and from then on writes down what is served.

    Args:
        declared: the names of the declared set, now and later; they are its business, here and after a restart.
    """

    def __init__(
        self, lifecycle: Lifecycle, settings: Settings, file: ServedFile, declared: Container[str] = ()
    ) -> None:
        self._declared = declared
        self._lifecycle = lifecycle
        self._settings = settings
        self._file = file
        self._is_written = True
        self._writing: asyncio.Task[None] | None = None
        self._deferred: dict[str, ServedName] = {}  # what could not be loaded now, and may be later

    async def run(self) -> None:
        """Serve them all; one that cannot be served is logged, and the server starts without it."""
        started = time.perf_counter()
        wanted = {name: ServedName(name) for name in self._settings.preload}
        if self._settings.restore:
            wanted |= {one.name: one for one in await asyncio.to_thread(self._file.read)}
        wanted = {name: one for name, one in wanted.items() if name not in self._declared}
        places = asyncio.Semaphore(_LOADED_AT_ONCE)

        async def load(one: ServedName) -> bool:
            async with places:
                return await self._is_loaded(one)

        loaded = await asyncio.gather(*(load(one) for one in wanted.values()))
        if wanted:
            logger.info(
                "%d of %d adapters are served from the start, after %.1f s",
                sum(loaded),
                len(wanted),
                time.perf_counter() - started,
            )
        self._lifecycle.on_change = self._write_soon
        self._write_soon()

    async def retry_deferred(self) -> None:
        """Try again what failed for now, until all of it is served, or somebody has loaded or blocked it."""
        registry = self._lifecycle.registry
        while self._deferred:
            await asyncio.sleep(_RETRY_S)
            for name, one in list(self._deferred.items()):
                if registry.get(name) is not None or name in registry.blocked:
                    del self._deferred[name]
                elif await self._is_loaded(one):
                    logger.info("Adapter '%s' is served now, as its source answers", name)
                if name not in self._deferred:
                    self._write_soon()

    async def _is_loaded(self, one: ServedName) -> bool:
        """Serve it; what cannot be is logged once, and deferred where it may be later."""
        is_loaded = False
        try:
            await self._load(one)
            is_loaded = True
        except (SourceUnavailable, NoFreeSlot) as error:
            if one.name not in self._deferred:
                logger.error("Adapter '%s' is not served from the start: %s", one.name, error)
                self._deferred[one.name] = one
            return False
        except LoRAPluginsError as error:
            logger.error("Adapter '%s' is not served from the start: %s", one.name, error)
        except Exception:  # noqa: BLE001 - one that is broken in an unknown way does not keep the others out
            logger.exception("Adapter '%s' is not served from the start", one.name)
        self._deferred.pop(one.name, None)
        return is_loaded

    async def _load(self, one: ServedName) -> None:
        if is_of_digest(one.name, one.held_digest):
            # No source has it under this name, and it was this name's version then.
            if await self._lifecycle.load_version(one.name, one.held_digest) is None:
                raise AdapterNotFound(
                    "no such version in the store any more",
                    expected=f"digest {one.held_digest}",
                    remedy="load it from its source, or raise LORA_PLUGINS_STORE_MAX_BYTES",
                    adapter=one.name,
                )
        elif is_path(one.uri):
            if self._lifecycle.registry.get(one.name) is None:  # else vLLM has loaded it again: --lora-modules
                await self._lifecycle.declare(one.name, one.uri, one.held_digest)
        else:
            adapter, _ = await self._lifecycle.load(one.name, one.uri)
            if one.held_digest and adapter.version is not None:
                if adapter.version.digest != one.held_digest:
                    await self._lifecycle.roll_back(one.name, one.held_digest)
                adapter.held_digest = one.held_digest  # its source may have this very version again
        if one.is_pinned:
            await self._lifecycle.pin(one.name)

    def _write_soon(self) -> None:
        self._is_written = False
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Write until nothing has changed meanwhile: one writer at a time, so that the last state wins."""
        registry = self._lifecycle.registry
        while not self._is_written:
            await asyncio.sleep(_WRITE_DELAY_S)  # many changes come together
            self._is_written = True
            adapters = registry.all()
            names = [
                ServedName(adapter.name, adapter.uri, adapter.held_digest, adapter.is_pinned)
                for adapter in adapters
                if adapter.version is not None  # loaded by its Hub id, it is the business of who loaded it
                and adapter.name not in self._declared
            ]
            known = registry.blocked | {adapter.name for adapter in adapters}
            names += [one for name, one in self._deferred.items() if name not in known]
            try:
                await asyncio.to_thread(self._file.write, names)
            except OSError as error:
                logger.warning("What is served cannot be written to %s: %s", self._file.path, error)
