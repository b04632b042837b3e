"""From a requested name to a verified adapter in the store: ask the sources in order, serve what the first one has."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cachetools import LRUCache, TTLCache

from lora_plugins.adapter.verify import VerifiedAdapter, verify_adapter
from lora_plugins.base_model import BaseModel
from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    LoRAPluginsError,
    SourceUnavailable,
    describing,
)
from lora_plugins.events import AdapterFetched, AdapterRejected, AdapterResolved, AdapterUnknown, Events, SourceFailed
from lora_plugins.names import AdapterName
from lora_plugins.resolvers.admission import admit
from lora_plugins.resolvers.source import Located, Source, VersionChanged
from lora_plugins.settings import Settings
from lora_plugins.store.store import Store, StoredAdapter

_REMEMBERED_NAMES = 10_000
_REMEMBERED_REJECTIONS = 1_000
_LOCATES_AT_ONCE = 32
_FETCHES_AT_ONCE = 4
_VERSION_CHANGES = 3


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """A verified adapter under the name that was asked for; `path` is absolute, immutable and leased."""

    name: str
    lora_id: int
    path: Path
    source: str
    version: str


class SourceChain:
    """The sources of one server, in the order in which they are asked.

    The first source that has the name decides. One that cannot say does not hide a later one; if no later one has
    the name either, its error is raised, because "no such adapter" would be a guess.

    Remembered, each in bounded memory: what remote sources said of a name (that it is absent, for `absent_ttl_s`; where
    it is, for `revalidate_s`), and versions that were refused. Requests for one name at one time share one answer.
    """

    def __init__(
        self,
        settings: Settings,
        events: Events,
        store: Store,
        sources: Sequence[Source] = (),
        executor: Executor | None = None,
    ) -> None:
        self.settings = settings
        self.events = events
        self.store = store
        self.sources = list(sources)
        self.base: BaseModel | None = None
        self._executor = executor
        self._absent: TTLCache[tuple[str, str], bool] = TTLCache(_REMEMBERED_NAMES, settings.absent_ttl_s)
        self._fresh: TTLCache[str, ResolvedAdapter] = TTLCache(_REMEMBERED_NAMES, settings.revalidate_s)
        self._served: LRUCache[str, ResolvedAdapter] = LRUCache(_REMEMBERED_NAMES)
        self._refused: LRUCache[tuple[str, str], LoRAPluginsError] = LRUCache(_REMEMBERED_REJECTIONS)
        self._flights: dict[str, asyncio.Task[ResolvedAdapter | None]] = {}
        self._locating = asyncio.Semaphore(_LOCATES_AT_ONCE)
        self._fetching = asyncio.Semaphore(_FETCHES_AT_ONCE)

    def add(self, source: Source) -> None:
        """Ask this source too, in the place that the settings give it; a second one of its label changes nothing."""
        if any(known.label == source.label for known in self.sources):
            return
        order = self.settings.sources
        self.sources.append(source)
        self.sources.sort(key=lambda item: order.index(item.label) if item.label in order else len(order))

    async def resolve(self, text: str, base_path: str) -> ResolvedAdapter | None:
        """Find, fetch and verify the adapter called `text`; None where every source says that there is none.

        `base_path` is the served model's path or Hub id; it stands in for the base model until `self.base` is set.

        Raises:
            LoRAPluginsError: it is there but cannot be served, or a source cannot say.
        """
        try:
            name = AdapterName.parse(text)
        except AdapterNotFound as error:
            self.events.emit(AdapterUnknown(text, error.found))
            return None
        fresh = self._fresh.get(text)
        if fresh is not None and self.store.has(fresh.path):
            return fresh
        flight = self._flights.get(text)
        if flight is None:
            flight = asyncio.get_running_loop().create_task(self._resolve(name, base_path))
            self._flights[text] = flight
            flight.add_done_callback(partial(self._landed, text))
        # Shielded: a client that goes away must not end the fetch for those who still wait.
        return await asyncio.shield(flight)

    def stored(self, digest: str) -> Path | None:
        """The adapter of this digest, leased, if the store has it, wherever it came from."""
        return self.store.take(digest)

    def give_back(self, digest: str) -> None:
        """End a lease of `stored` or `resolve`; the adapter may then be evicted."""
        self.store.leases.give_back(digest)

    def _landed(self, text: str, flight: asyncio.Task[ResolvedAdapter | None]) -> None:
        self._flights.pop(text, None)
        if not flight.cancelled():
            flight.exception()  # looked at, also where everybody who waited has gone away

    async def _resolve(self, name: AdapterName, base_path: str) -> ResolvedAdapter | None:
        changed: LoRAPluginsError | None = None
        for _ in range(_VERSION_CHANGES):
            started = time.perf_counter()
            with describing(adapter=str(name)):
                found = await self._locate(name, base_path)
            if found is None:
                self.events.emit(AdapterUnknown(str(name)))
                return None
            source, located = found
            try:
                with describing(adapter=str(name)):
                    return await self._serve(source, located, base_path, time.perf_counter() - started)
            except VersionChanged as error:
                changed = error
            except LoRAPluginsError as error:
                self._report(name, source.label, error)
                raise
        if changed is None:
            raise AssertionError("unreachable: every round ends or changes")
        self._report(name, source.label, changed)
        raise changed

    async def _locate(self, name: AdapterName, base_path: str) -> tuple[Source, Located] | None:
        unavailable: SourceUnavailable | None = None
        for source in self.sources:
            key = (source.label, str(name))
            if key in self._absent:
                continue
            try:
                with describing(adapter=str(name)):
                    async with self._locating:
                        located = await source.locate(name, base_path)
            except SourceUnavailable as error:
                self._report(name, source.label, error)
                unavailable = unavailable or error
            except LoRAPluginsError as error:
                self._report(name, source.label, error)
                raise
            else:
                if located is not None:
                    return source, located
                if source.remote:
                    self._absent[key] = True
        if unavailable is not None:
            raise unavailable
        return None

    async def _serve(self, source: Source, located: Located, base_path: str, locate_s: float) -> ResolvedAdapter:
        text = str(located.name)
        served = self._served.get(text)
        if served is None or served.version != located.version or not self.store.has(served.path):
            started = time.perf_counter()
            stored = await self._obtain(source, located)
            obtain_s = time.perf_counter() - started
            try:
                verified = await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._check_fits, stored.directory, self.base or BaseModel(base_path)
                )
            except LoRAPluginsError:
                # No engine will read it; unless it is served under another name, from before the base was known.
                if all(item.path != stored.directory for item in self._served.values()):
                    self.store.leases.give_back(stored.digest)
                raise
            await source.published(located, stored.directory)
            self.events.emit(
                AdapterResolved(
                    name=text,
                    source=source.label,
                    path=str(stored.directory),
                    rank=verified.config.max_rank,
                    size_bytes=verified.size_bytes,
                    locate_s=locate_s,
                    obtain_s=obtain_s,
                    check_s=time.perf_counter() - started - obtain_s,
                    fetched=stored.fetched,
                    notes=verified.notes,
                )
            )
            served = ResolvedAdapter(text, lora_id(text), stored.directory, source.label, located.version)
            self._served[text] = served
        if source.remote:
            self._fresh[text] = served
        return served

    async def _obtain(self, source: Source, located: Located) -> StoredAdapter:
        version = (located.uri, located.version)
        if version in self._refused:
            raise copy.copy(self._refused[version])  # a new one: raising an old one grows its traceback
        admitted = admit(located, self.settings)
        refusals: list[LoRAPluginsError] = []
        check = partial(self._check_arrived, refusals)
        try:
            async with self._fetching:
                started = time.perf_counter()
                stored = await self.store.obtain(admitted, partial(source.fetch, admitted), check)
        except LoRAPluginsError as error:
            # Only what the bytes themselves say: a full disk, or a fetch that went wrong, may pass.
            if error in refusals:
                self._refused[version] = copy.copy(error)  # without the name, which another may share the version with
            raise
        if stored.fetched:
            size_bytes = sum(file.size_bytes for file in admitted.files)
            self.events.emit(
                AdapterFetched(str(located.name), source.label, located.uri, size_bytes, time.perf_counter() - started)
            )
        return stored

    def _check_arrived(self, refusals: list[LoRAPluginsError], directory: Path) -> None:
        try:
            verify_adapter(directory, None, self.settings)
        except (InvalidAdapter, IncompatibleAdapter, AdapterNotFound) as error:
            refusals.append(error)
            raise

    def _check_fits(self, directory: Path, base: BaseModel) -> VerifiedAdapter:
        """Hold a published adapter, whose values were looked at when it arrived, against this server's base model."""
        return verify_adapter(directory, base, replace(self.settings, check_finite=False))

    def _report(self, name: AdapterName, source: str, error: LoRAPluginsError) -> None:
        kind = SourceFailed if isinstance(error, SourceUnavailable) else AdapterRejected
        self.events.emit(kind(str(name), source, error))


def lora_id(name: str) -> int:
    """A number for a name that is the same on every replica and after every restart: 1 to 2**31 - 1."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % (2**31 - 1) + 1
