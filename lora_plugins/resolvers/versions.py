"""Versions of adapters in the store: fetched once, verified, and leased for as long as a name needs them."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from cachetools import LRUCache

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.names import adapter_id
from lora_plugins.adapter.verify import VerifiedAdapter, verify_adapter
from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter, LoRAPluginsError
from lora_plugins.events import AdapterConfirmed, AdapterFetched, AdapterResolved, Events
from lora_plugins.resolvers.limits import admit
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source, VersionChanged
from lora_plugins.settings import Settings
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.store import Store, StoredAdapter

_REMEMBERED_NAMES = 10_000
_REMEMBERED_REJECTIONS = 1_000
_FETCHES_AT_ONCE = 4
_LABELS = {"file": "filesystem", "hf": "hub"}  # every other scheme is an object store's

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """A verified adapter under the name that was asked for; `path` is absolute, immutable and leased.

    Attributes:
        adapter_id: see `adapter_id()`.
        source: label of the source. uri: where the adapter lies there, without credentials.
        version: at the source: a commit, or a digest of names, sizes and ETags.
        asked_uri: the URI that it was asked for by; empty where it was asked for by name.
        size_bytes: of configuration and weights. rank: the largest of any module.
    """

    name: str
    adapter_id: int
    path: Path
    source: str
    version: str
    uri: str
    size_bytes: int
    rank: int
    asked_uri: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 over the files' names, sizes and contents, in hexadecimal; the last part of `path`."""
        return self.path.name


# An adapter's name, and the URI that it is asked for by, or "" where its name says it.
Key = tuple[str, str]


class Versions:
    """What the names of one process stand for in the store. For one event loop; `release_digest` from any thread.

    A version is leased until every name that was resolved to it has been released. Versions that are refused for what
    their bytes say are not fetched again.
    """

    def __init__(self, settings: Settings, events: Events, store: Store, executor: Executor | None) -> None:
        self._settings = settings
        self._events = events
        self._store = store
        self._executor = executor
        self._served: LRUCache[Key, ResolvedAdapter] = LRUCache(_REMEMBERED_NAMES)
        self._origins: LRUCache[str, frozenset[str]] = LRUCache(_REMEMBERED_NAMES)
        self._refused: LRUCache[tuple[str, str], LoRAPluginsError] = LRUCache(_REMEMBERED_REJECTIONS)
        self._held: dict[str, set[str]] = {}  # the names that each leased digest is needed for
        self._ended = 0  # how many leases have ended
        self._fetching = asyncio.Semaphore(_FETCHES_AT_ONCE)

    def served(self, key: Key) -> ResolvedAdapter | None:
        """What this was resolved to last, whether it is still there or not."""
        return self._served.get(key)

    def holds(self, resolved: ResolvedAdapter) -> bool:
        """Whether it is still leased for its name, and in the store; a few microseconds."""
        return resolved.name in self._held.get(resolved.digest, ()) and self._store.has(resolved.path)

    async def serve(
        self, key: Key, source: Source, located: RemoteAdapter, base: BaseModel, locate_s: float
    ) -> ResolvedAdapter:
        """The located version in the store, verified against `base` and leased for the name.

        Raises:
            VersionChanged: it is to be located anew. LoRAPluginsError: it cannot be had or served.
        """
        text, asked_uri = key
        served = self._served.get(key)
        if served is not None and _is_of(served, located) and self.holds(served):
            self._events.emit(AdapterConfirmed(text, source.label))
            return served
        ended, started = self._ended, time.perf_counter()
        stored = await self._obtain(text, source, located)
        obtain_s = time.perf_counter() - started
        verified = await self._check(stored.digest, base)
        await source.published(located, stored.directory)
        self._hold(text, stored.digest, ended)
        self._events.emit(
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
                uri=located.uri,
            )
        )
        served = ResolvedAdapter(
            name=text,
            adapter_id=adapter_id(text),
            path=stored.directory,
            source=source.label,
            version=located.version,
            uri=located.uri,
            size_bytes=verified.size_bytes,
            rank=verified.config.max_rank,
            asked_uri=asked_uri,
        )
        self._served[key] = served
        self._origins[text] = self._origins.get(text, frozenset()) | {located.uri}
        return served

    async def of_digest(
        self, name: str, digest_prefix: str, base: BaseModel | None, *, of_any_name: bool
    ) -> ResolvedAdapter | None:
        """See `SourceChain.of_digest`."""
        ended = self._ended
        origins = None if of_any_name else self._origins.get(name, frozenset())
        manifest = await self._run(partial(self._leased_version, digest_prefix, origins))
        if manifest is None:
            return None
        verified = await self._check(manifest.digest, base)
        self._hold(name, manifest.digest, ended)
        return ResolvedAdapter(
            name=name,
            adapter_id=adapter_id(name),
            path=self._store.layout.adapter(manifest.digest),
            source=_label_of(manifest.uri),
            version=manifest.version,
            uri=manifest.uri,
            size_bytes=verified.size_bytes,
            rank=verified.config.max_rank,
        )

    def release(self, name: str, path: Path) -> None:
        """See `SourceChain.release`."""
        names = self._held.get(path.name)
        if names is None or name not in names:
            return
        names.discard(name)
        if not names:
            self.release_digest(path.name)

    def release_digest(self, digest: str) -> None:
        """End the lease of a version, whatever names need it. Callable from any thread."""
        self._held.pop(digest, None)
        self._ended += 1
        self._store.leases.release(digest)

    def _hold(self, name: str, digest: str, ended: int) -> None:
        """Keep a lease that was taken when `ended` leases had ended.

        One of them may have been this one, for another name. Nothing awaits in here, so none can end meanwhile.
        """
        if self._ended != ended and self._store.acquire(digest) is None:
            raise VersionChanged("an adapter that left the store while it was verified", remedy="ask again")
        self._held.setdefault(digest, set()).add(name)

    async def _check(self, digest: str, base: BaseModel | None) -> VerifiedAdapter:
        """Hold a leased version, whose values were looked at when it arrived, against the base model."""
        try:
            return await self._run(partial(self._check_fits, self._store.layout.adapter(digest), base))
        except LoRAPluginsError:
            if digest not in self._held:  # else it is served, by another name or from before the base was known
                self.release_digest(digest)
            raise

    async def _obtain(self, text: str, source: Source, located: RemoteAdapter) -> StoredAdapter:
        version = (located.uri, located.version)
        if version in self._refused:
            raise copy.copy(self._refused[version])  # a new one: raising an old one grows its traceback
        admitted = admit(located, self._settings)
        refusals: list[LoRAPluginsError] = []
        check = partial(self._check_arrived, refusals)
        try:
            async with self._fetching:
                started = time.perf_counter()
                stored = await self._store.obtain(admitted, partial(source.fetch, admitted), check)
        except LoRAPluginsError as error:
            # Only what the bytes themselves say: a full disk, or a fetch that went wrong, may pass.
            if error in refusals:
                self._refused[version] = copy.copy(error)  # without the name, which another may share the version with
            raise
        if stored.fetched:
            size_bytes = sum(file.size_bytes for file in admitted.files)
            fetch_s = time.perf_counter() - started
            self._events.emit(AdapterFetched(text, source.label, located.uri, size_bytes, fetch_s))
        return stored

    def _leased_version(self, digest_prefix: str, origins: frozenset[str] | None) -> Manifest | None:
        """The one version that fits, from one of these places unless None, and leased."""
        found = []
        for digest in self._store.layout.matching(digest_prefix):
            try:
                manifest = Manifest.read(self._store.layout.adapter(digest))
            except InvalidAdapter:
                continue
            if origins is None or manifest.uri in origins:
                found.append(manifest)
        if len(found) != 1 or self._store.acquire(found[0].digest) is None:
            return None
        return found[0]

    def _check_arrived(self, refusals: list[LoRAPluginsError], directory: Path) -> None:
        try:
            verify_adapter(directory, None, self._settings)
        except (InvalidAdapter, IncompatibleAdapter, AdapterNotFound) as error:
            refusals.append(error)
            raise

    def _check_fits(self, directory: Path, base: BaseModel | None) -> VerifiedAdapter:
        return verify_adapter(directory, base, replace(self._settings, check_finite=False))

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _is_of(resolved: ResolvedAdapter, located: RemoteAdapter) -> bool:
    return (resolved.uri, resolved.version) == (located.uri, located.version)


def _label_of(uri: str) -> str:
    return _LABELS.get(uri.partition("://")[0], "s3")
