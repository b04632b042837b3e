"""To another version of what is served, and back, while requests run.

A name points to a version through vLLM's table of names. A new version gets an engine id of its own, is loaded beside
the old one, and takes its place in the table in one step: requests that run go on with the old one, and every later one
gets the new one. When the last request of the old one has left, it is removed from slots and host memory. Its prefix
cache is not used for the new one, as vLLM's cache keys hold the adapter's path (0.30: see lora_request.py).
"""

from __future__ import annotations

import re
import time
from typing import Any

from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError
from lora_plugins.events import AdapterSwapped, UpdateFailed
from lora_plugins.server.pins import Pins
from lora_plugins.server.registry import KEPT_VERSIONS, Served, Version

_DIGEST = re.compile("[0-9a-f]{8,64}")


class Swaps(Pins):
    """Refresh, revalidate, roll back, and serve one version under a name of its own."""

    async def refresh(self, name: str) -> bool:
        """Look for a new version at the source and swap to it; returns whether there was one.

        Raises:
            LoRAPluginsError: there is one that cannot be served, or the source cannot say; the old one goes on.
        """
        async with self._engine.lock(name):
            served = self._known(name)
            served.held_digest = None
            return await self._refresh(served)

    async def revalidate(self, name: str) -> None:
        """As `refresh`, for the look-out: what was rolled back stays, and errors are noted only."""
        async with self._engine.lock(name):
            served = self.catalogue.get(name)
            if served is None or served.version is None or served.held_digest is not None:
                return
            try:
                await self._refresh(served)
            except LoRAPluginsError:
                return

    async def _refresh(self, served: Served) -> bool:
        current = self._version(served)
        try:
            newest = await self._sources.latest(served.name, served.uri, self._engine.base_path)
            if newest is None:
                raise AdapterNotFound(
                    "no such adapter at its source any more",
                    expected="the one that is served, or a newer one",
                    remedy="put it back, or unload it",
                    adapter=served.name,
                )
            if newest.digest == current.digest:
                served.version, served.last_error = newest, None
                return False
            await self._swap(served, newest)
        except LoRAPluginsError as error:
            served.failed(error)
            self._events.emit(UpdateFailed(served.name, error))
            raise
        self.changed()
        return True

    async def rollback(self, name: str, digest: str | None = None) -> Served:
        """Go back to the version before, or to the one whose digest begins with `digest`, and stay there.

        Kept are the last two versions; the store may have older ones still.

        Raises:
            AdapterNotFound: there is none. LoRAPluginsError: it cannot be loaded; the present one goes on.
        """
        async with self._engine.lock(name):
            served = self._known(name)
            wanted = next((v for v in served.previous if digest is None or v.digest.startswith(digest)), None)
            if wanted is None and digest is not None:
                wanted = await self._sources.of_digest(name, digest, of_any_name=True)
            if wanted is None:
                kept = ", ".join(version.digest[:12] for version in served.previous) or "none"
                raise AdapterNotFound(
                    "no such version in the store" if digest else "no version before this one",
                    expected=f"one of those kept: {kept}",
                    remedy="load it from its source",
                    adapter=name,
                )
            await self._swap(served, wanted)
            served.held_digest = wanted.digest
        self.changed()
        return served

    async def _swap(self, served: Served, version: Version, uri: str | None = None) -> None:
        """Have new requests for this name enter the engine with `version`; the lock of the name is held."""
        before, old_request = served.version, served.request
        if before is not None and before.digest == version.digest:
            served.version = version
            return
        started = time.perf_counter()
        request = self._engine.new_request(served.name, str(version.path))
        try:
            await self._load_beside(served, request, uri or served.uri)
        except BaseException:
            if version not in served.previous:
                self._release(served.name, version)
            raise
        served.request, served.version, served.last_error = request, version, None
        served.previous = [kept for kept in served.previous if kept.digest != version.digest]
        if before is not None:
            served.previous.insert(0, before)
        dropped, served.previous = served.previous[KEPT_VERSIONS:], served.previous[:KEPT_VERSIONS]
        self.catalogue.put(served)
        used_at = self.planner.used_at.get(old_request.lora_int_id)
        if used_at is not None:
            self.planner.used_at[request.lora_int_id] = used_at
        for old in dropped:
            self._release(served.name, old)
        self._in_background(self.planner.retire(old_request.lora_int_id))
        self._events.emit(
            AdapterSwapped(
                served.name, "" if before is None else before.digest, version.digest, time.perf_counter() - started
            )
        )

    async def take_in_place(self, request: Any) -> bool:
        """Load what vLLM will put into the place of a served name at once; the lock of the name is held.

        `request`, vLLM's `LoRARequest` with `load_inplace`, gets an engine id of its own, so that what runs goes on
        with the weights that it began with. What was served before goes when its last request has left. Returns False
        where nothing is served under the name: it is no swap then, and nothing was done.

        Raises:
            LoRAPluginsError: it cannot be loaded; the old one goes on.
        """
        request.load_inplace = False  # else the workers would read it again
        before = self.catalogue.get(request.lora_name)
        if before is None:
            return False
        started = time.perf_counter()
        request.lora_int_id = self._engine.new_request(request.lora_name, request.lora_path).lora_int_id
        try:
            await self._load_beside(before, request, None)
        except LoRAPluginsError as error:
            before.failed(error)
            self._events.emit(UpdateFailed(before.name, error))
            raise
        self.catalogue.expect(Served(before.name, request, is_pinned=before.is_pinned))
        self._let_go(before)
        digest_or_path = before.request.lora_path if before.version is None else before.version.digest
        self._events.emit(AdapterSwapped(before.name, digest_or_path, request.lora_path, time.perf_counter() - started))
        return True

    async def _load_beside(self, served: Served, request: Any, uri: str | None) -> None:
        """Load what will take the place of `served`, pinned if that is; a failure leaves nothing in the workers."""
        try:
            await self.planner.load(request, uri=uri, wants_slot=False)
            if served.is_pinned:
                await self.planner.pin(request, uri=uri)
        except BaseException:
            self._in_background(self.planner.retire(request.lora_int_id))
            raise

    async def load_version(self, text: str, known_digest: str | None = None) -> Served | None:
        """Serve `name@digest`, the digest's first 8 characters or more, as a name of its own, beside `name`.

        `known_digest`: all of it, from a caller that knows the version for this name's. Without it, None where the name
        has had no such version in this process. None too where the store has it no more, or the text is no such name.

        Raises:
            LoRAPluginsError: it cannot be served.
        """
        name, _, prefix = text.partition("@")
        if not is_of_digest(text, known_digest or prefix):
            return None
        async with self._engine.lock(text):
            served = self.catalogue.get(text)
            if served is not None:
                return served
            found = await self._sources.of_digest(name, prefix) if known_digest is None else None
            digest = known_digest if found is None else found.digest
            try:
                version = digest and await self._sources.of_digest(text, digest, of_any_name=True)
            finally:
                if found is not None:
                    self._release(name, found)
            if not version:
                return None
            served = await self._enter(text, None, version)
            served.held_digest = version.digest
        self.changed()
        return served

    @staticmethod
    def _version(served: Served) -> Version:
        if served.version is None:
            raise InvalidAdapter(
                "an adapter that was loaded by its path",
                expected="one that comes from a source",
                remedy="load it with POST /v1/loras",
                adapter=served.name,
            )
        return served.version


def is_of_digest(text: str, digest: str | None) -> bool:
    """Whether a name says `name@` and the beginning of this digest."""
    prefix = text.partition("@")[2]
    return digest is not None and _DIGEST.fullmatch(prefix) is not None and digest.startswith(prefix)
