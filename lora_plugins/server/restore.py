"""What a server serves from its start: names that are to be preloaded, and those that the last one served."""

from __future__ import annotations

import asyncio
import time

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot, SourceUnavailable
from lora_plugins.log import logger
from lora_plugins.server.lifecycle import Changes
from lora_plugins.server.served_file import Remembered, ServedSet
from lora_plugins.server.swaps import is_of_digest
from lora_plugins.settings import Settings

_AT_ONCE = 4
_WRITE_DELAY_S = 0.5
_AGAIN_S = 15.0


class Start:
    """Brings them, and from then on writes down what is served."""

    def __init__(self, changes: Changes, settings: Settings, file: ServedSet) -> None:
        self._changes = changes
        self._settings = settings
        self._file = file
        self._is_written = True
        self._writing: asyncio.Task[None] | None = None
        self._put_off: dict[str, Remembered] = {}  # what could not be brought now, and may be later

    async def run(self) -> None:
        """Serve them all; one that cannot be served is logged, and the server starts without it."""
        started = time.perf_counter()
        wanted = {name: Remembered(name) for name in self._settings.preload}
        if self._settings.restore:
            for one in await asyncio.to_thread(self._file.read):
                wanted[one.name] = one
        places = asyncio.Semaphore(_AT_ONCE)

        async def bring(one: Remembered) -> bool:
            async with places:
                return await self._is_brought(one)

        came = await asyncio.gather(*(bring(one) for one in wanted.values()))
        if wanted:
            logger.info(
                "%d of %d adapters are served from the start, after %.1f s",
                sum(came),
                len(wanted),
                time.perf_counter() - started,
            )
        self._changes.changed = self._write_soon
        self._write_soon()

    async def bring_put_off(self) -> None:
        """Try again what a source could not say, until all of it is served, or somebody has said otherwise of it."""
        catalogue = self._changes.catalogue
        while self._put_off:
            await asyncio.sleep(_AGAIN_S)
            for name, one in list(self._put_off.items()):
                if catalogue.get(name) is not None or name in catalogue.blocked:
                    del self._put_off[name]
                elif await self._is_brought(one):
                    logger.info("Adapter '%s' is served now, as its source answers", name)
                if name not in self._put_off:
                    self._write_soon()

    async def _is_brought(self, one: Remembered) -> bool:
        """Serve it; what cannot be is logged once, and put off where it may be later."""
        again = False
        try:
            await self._bring(one)
        except LoRAPluginsError as error:
            again = isinstance(error, SourceUnavailable | NoFreeSlot)
            if not again or one.name not in self._put_off:
                logger.error("Adapter '%s' is not served from the start: %s", one.name, error)
        except Exception:  # noqa: BLE001 - one that is broken in an unknown way does not keep the others out
            logger.exception("Adapter '%s' is not served from the start", one.name)
        else:
            self._put_off.pop(one.name, None)
            return True
        if again:
            self._put_off[one.name] = one
        else:
            self._put_off.pop(one.name, None)
        return False

    async def _bring(self, one: Remembered) -> None:
        if is_of_digest(one.name, one.held_digest):
            await self._bring_version(one)
        else:
            served, _ = await self._changes.load(one.name, one.uri)
            if one.held_digest is not None and served.version is not None and served.version.digest != one.held_digest:
                await self._changes.rollback(one.name, one.held_digest)
        if one.is_pinned:
            await self._changes.pin(one.name)

    async def _bring_version(self, one: Remembered) -> None:
        """One that was served as `name@digest`: no source has it under this name, and it was this name's then."""
        if await self._changes.load_version(one.name, one.held_digest) is None:
            raise AdapterNotFound(
                "no such version in the store any more",
                expected=f"digest {one.held_digest}",
                remedy="load it from its source, or raise LORA_PLUGINS_STORE_MAX_BYTES",
                adapter=one.name,
            )

    def _write_soon(self) -> None:
        self._is_written = False
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Write until nothing has changed meanwhile: one writer at a time, so that the last state wins."""
        while not self._is_written:
            await asyncio.sleep(_WRITE_DELAY_S)  # many changes come together
            self._is_written = True
            present = self._changes.catalogue.all()
            served = [
                Remembered(one.name, one.uri, one.held_digest, one.is_pinned)
                for one in present
                if one.version is not None  # loaded by its path, it is the business of who loaded it
            ]
            known = self._changes.catalogue.blocked | {one.name for one in present}
            served += [one for name, one in self._put_off.items() if name not in known]
            try:
                await asyncio.to_thread(self._file.write, served)
            except OSError as error:
                logger.warning("What is served cannot be written to %s: %s", self._file.path, error)
