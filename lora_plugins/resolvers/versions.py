"""Versions of adapters in the store: fetched once, verified, and leased for as long as a name needs them."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cachetools import LRUCache

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.names import adapter_id
from lora_plugins.adapter.verify import VerifiedAdapter, check_size, choose_weights, fit_adapter
from lora_plugins.adapter.weight_files import INDEX_FILE, check_shards, is_shard
from lora_plugins.adapter.writers import name_format
from lora_plugins.errors import (
    AdapterNotFound,
    ErrorKind,
    InvalidAdapter,
    LoRAPluginsError,
    SourceUnavailable,
    describing,
    kind_of,
)
from lora_plugins.events import AdapterConfirmed, AdapterFetched, AdapterResolved, Events, FetchStarted
from lora_plugins.resolvers.conversion import ConvertedAdapter
from lora_plugins.resolvers.fetch_places import FetchPlaces
from lora_plugins.resolvers.fetch_progress import reported
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source
from lora_plugins.settings import Settings
from lora_plugins.store.errors import DamagedCopy, store_errors
from lora_plugins.store.layout import is_digest
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store, StoredAdapter
from lora_plugins.verification.children import children
from lora_plugins.verification.messages import ReadAdapter

_REMEMBERED_NAMES = 10_000
_REMEMBERED_REJECTIONS = 1_000
_REMEMBERED_WARNINGS = 100_000
_HASHED_S = 60.0  # an entry that fails a check is not hashed again within this time
_LABELS = {"file": "filesystem", "hf": "hub", "push": "push"}  # every other scheme is an object store's


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """A verified adapter under the requested name; `path` is absolute, immutable and leased.

    Attributes:
        adapter_id: of the name, see `adapter_id()`.
        source: label of the source. uri: the adapter's place there, without credentials.
        version: at the source: a commit, or a digest of names, sizes and ETags.
        asked_uri: the requested URI; empty for a request by name.
        size_bytes: of configuration and weights. rank: the largest of any module.
        is_3d: whether the weights have stacked experts, which vLLM's requests must state (`is_3d_lora_weight`).
        warnings: warnings for answers of the adapter, see `VerifiedAdapter`.
        holder: the holder of the lease; None for the name.
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
    is_3d: bool = False
    warnings: tuple[str, ...] = ()
    holder: Hashable = None

    @property
    def digest(self) -> str:
        """SHA-256 over the files' names, sizes and contents, in hexadecimal; the last part of `path`."""
        return self.path.name


class _BytesRefused(Exception):
    """The fetched bytes cannot be served: another fetch of this version would change nothing."""

    def __init__(self, error: LoRAPluginsError) -> None:
        super().__init__(str(error))
        self.error = error


# An adapter's name, and the requested URI, or "" for a request by name.
Key = tuple[str, str]


class Versions:
    """The versions of names of one process in the store. For one event loop.

    Each name has its own lease of every version resolved for the name. Versions with refused bytes are not fetched
    again.
    """

    def __init__(self, settings: Settings, events: Events, store: Store) -> None:
        self._settings = settings
        self._events = events
        self._store = store
        self._served: LRUCache[Key, ResolvedAdapter] = LRUCache(_REMEMBERED_NAMES)
        self._origins: LRUCache[str, frozenset[str]] = LRUCache(_REMEMBERED_NAMES)
        # (name, digest) → the last (URI, version) with these bytes for the name: a manifest knows only the first fetch.
        self._had: LRUCache[tuple[str, str], tuple[str, str]] = LRUCache(_REMEMBERED_NAMES)
        self._refused: LRUCache[tuple[str, str], LoRAPluginsError] = LRUCache(_REMEMBERED_REJECTIONS)
        self._warnings: LRUCache[str, tuple[str, ...]] = LRUCache(_REMEMBERED_WARNINGS)
        self._places = FetchPlaces(settings.fetch_timeout_s)
        children().warm()  # so that the first fetch waits for no start

    def served(self, key: Key) -> ResolvedAdapter | None:
        """The last version resolved for this key; the store may have lost the version."""
        return self._served.get(key)

    def warnings_of(self, digest: str) -> tuple[str, ...]:
        """Warnings for answers of a version; none for a version not resolved in this process."""
        return self._warnings.get(digest, ())

    def note_warnings(self, digest: str, warnings: tuple[str, ...]) -> None:
        """Add warnings of a version that another process has verified."""
        if warnings:
            self._warnings[digest] = warnings

    def is_leased(self, resolved: ResolvedAdapter) -> bool:
        """Whether the version is still leased for its name; takes a microsecond."""
        return self._store.leases.is_held(resolved.digest, resolved.holder or resolved.name)

    async def serve(
        self,
        key: Key,
        source: Source,
        adapter: RemoteAdapter,
        base: BaseModel | None,
        locate_s: float,
        *,
        holder: Hashable = None,
        principal: Hashable = None,
    ) -> ResolvedAdapter:
        """The located version in the store, verified against `base`, leased for `holder` or else for the name.

        Fetches, reads and conversions take a place of `principal`.

        Raises:
            VersionChanged: the caller must locate the adapter again.
            LoRAPluginsError: the version cannot be had or served.
        """
        name, served = key[0], self._served.get(key)
        wanted = adapter.uri, adapter.version, holder
        is_same = served is not None and (served.uri, served.version, served.holder) == wanted
        if served is not None and is_same and self.is_leased(served) and self._store.has(served.path):
            self._events.emit(AdapterConfirmed(name, source.label))
            return served
        started = time.perf_counter()
        attempt = object()  # holds the lease until the version is verified
        try:
            stored, verified, obtain_s = await self._ready_from(
                source, adapter, base, attempt, name=name, principal=principal
            )
        except DamagedCopy:  # the copy is marked now, so the second try fetches the version
            stored, verified, obtain_s = await self._ready_from(
                source, adapter, base, attempt, name=name, principal=principal
            )
        # Point the link before the lease goes to the name: a reader of the link must find a leased adapter.
        if adapter.link is not None:
            await asyncio.to_thread(adapter.link.point_to, stored.directory, name)
        self._store.leases.hand_over(stored.digest, attempt, holder or name)
        self._events.emit(
            AdapterResolved(
                name=name,
                source=source.label,
                path=str(stored.directory),
                rank=verified.config.max_rank,
                size_bytes=verified.size_bytes,
                locate_s=locate_s,
                obtain_s=obtain_s,
                check_s=time.perf_counter() - started - obtain_s,
                fetched=stored.fetched,
                notes=verified.notes,
                uri=adapter.uri,
                warnings=verified.warnings,
            )
        )
        found = _resolved(name, stored, verified, source=source.label, uri=adapter.uri, version=adapter.version)
        return self.note(key, replace(found, holder=holder))

    def note(self, key: Key, version: ResolvedAdapter) -> ResolvedAdapter:
        """Remember the version resolved for a key, and return the version with the requested URI."""
        name, asked_uri = key
        served = self._served[key] = replace(version, asked_uri=asked_uri)
        # Places of the name, by which `of_digest` decides whether the name may reach a version.
        self._origins[name] = self._origins.get(name, frozenset()) | {version.uri}
        self._had[name, version.digest] = version.uri, version.version
        return served

    async def _ready_from(
        self,
        source: Source,
        adapter: RemoteAdapter,
        base: BaseModel | None,
        holder: object,
        *,
        name: str,
        principal: Hashable,
    ) -> tuple[StoredAdapter[ReadAdapter], VerifiedAdapter, float]:
        """A located version, leased and in the engine's form; and the seconds until its bytes were here."""
        started = time.perf_counter()
        # Look for the converted form first, because the original may have been evicted.
        stored = await self._find_converted(adapter, base, holder)
        if stored is None:
            stored = await self._obtain(name, source, adapter, holder, principal)
        obtain_s = time.perf_counter() - started
        stored, verified = await self._ready(stored, adapter.uri, adapter.version, base, holder, principal=principal)
        return stored, verified, obtain_s

    async def of_digest(
        self,
        name: str,
        digest_prefix: str,
        base: BaseModel | None,
        *,
        of_any_name: bool,
        principal: Hashable = None,
    ) -> ResolvedAdapter | None:
        """Find as `AdapterResolver.of_digest` says."""
        origins = None if of_any_name else self._origins.get(name)
        # Forging 8 characters of a digest takes half an hour, so a prefix counts only for versions of the name itself.
        if (of_any_name and not is_digest(digest_prefix)) or not (of_any_name or origins):
            return None
        attempt = object()
        manifest = await asyncio.to_thread(self._leased_version, name, digest_prefix, origins, attempt)
        if manifest is None:
            return None
        uri, version = self._had.get((name, manifest.digest), (manifest.uri, manifest.version))
        found: StoredAdapter[ReadAdapter] = StoredAdapter(manifest.digest, self._store.layout.adapter(manifest.digest))
        try:
            stored, verified = await self._ready(found, uri, version, base, attempt, principal=principal)
        except DamagedCopy:
            return None
        self._store.leases.hand_over(stored.digest, attempt, name)
        return _resolved(name, stored, verified, source=_label_of(uri), uri=uri, version=version)

    async def _find_converted(
        self, adapter: RemoteAdapter, base: BaseModel | None, holder: object
    ) -> StoredAdapter[ReadAdapter] | None:
        """This version in the engine's form, if converted earlier; the store may have lost the original since."""
        if base is None or base.model is None:
            return None
        form = base.model.form
        return await asyncio.to_thread(self._store.find_leased, adapter.uri, adapter.version, holder, form)

    async def _ready(
        self,
        stored: StoredAdapter[ReadAdapter],
        uri: str,
        version: str,
        base: BaseModel | None,
        holder: object,
        *,
        principal: Hashable,
    ) -> tuple[StoredAdapter[ReadAdapter], VerifiedAdapter]:
        """A leased version in the engine's form: itself, or its conversion, which then has the lease."""
        verified = await self._check_sound(stored.digest, base, holder, principal, _verified(stored))
        if verified.conversion is None or base is None or base.model is None:
            return stored, verified
        try:
            with store_errors():
                wanted = await asyncio.to_thread(
                    ConvertedAdapter.of, stored, uri, version, verified.conversion, base.model.form
                )
            async with self._places.converting.held(principal):
                made = await self._store.obtain(
                    wanted, wanted.write, lambda made: self._read(made).result(), holder, wanted.converted
                )
        finally:
            self._store.leases.release(stored.digest, holder)
        again = await self._check_sound(made.digest, base, holder, principal, _verified(made))
        changes = "converted into the engine's form: " + ", ".join(wanted.converted.changes)
        return replace(made, arrived=stored.arrived), replace(again, notes=(*again.notes, changes))

    async def _check_sound(
        self, digest: str, base: BaseModel | None, holder: object, principal: Hashable, arrived: VerifiedAdapter | None
    ) -> VerifiedAdapter:
        """Check as `_check` does, and hash the bytes meanwhile, once per process.

        After a failed check the bytes are hashed again, to tell a wrong adapter from a damaged copy.

        Raises:
            DamagedCopy: the bytes differ from the digest; the copy is marked.
            SourceUnavailable: the bytes cannot be read at the moment.
            LoRAPluginsError: the version does not fit. No lease is left.
        """
        # At the same time: hashing takes the disk, and the check takes the verification child.
        checked, is_sound = await asyncio.gather(
            self._check(digest, base, holder, principal, arrived),
            asyncio.to_thread(self._store.is_sound, digest),
            return_exceptions=True,
        )
        # The hash may be remembered from before the damage, so allow only a recent hash.
        if isinstance(checked, LoRAPluginsError) and is_sound is True:
            is_sound = await asyncio.to_thread(self._store.is_sound, digest, max_age_s=_HASHED_S)
        if is_sound is True and not isinstance(checked, BaseException):
            self.note_warnings(digest, checked.warnings)
            return checked
        self._store.leases.release(digest, holder)
        if is_sound is False:
            raise DamagedCopy.of(digest)
        raise next(error for error in (is_sound, checked) if isinstance(error, BaseException))

    async def _check(
        self, digest: str, base: BaseModel | None, holder: object, principal: Hashable, arrived: VerifiedAdapter | None
    ) -> VerifiedAdapter:
        """Validate a leased version against the base model; the result of a check in `arrived` saves reading the files.

        Values were checked on arrival, in this process or another.
        """
        directory = self._store.layout.adapter(digest)
        try:
            if arrived is None:
                async with self._places.reading.held(principal):
                    arrived = (await asyncio.wrap_future(self._read(directory))).adapter
            return await asyncio.to_thread(self._check_fits, base, arrived)
        except LoRAPluginsError:
            self._store.leases.release(digest, holder)
            raise

    async def _obtain(
        self, name: str, source: Source, adapter: RemoteAdapter, holder: object, principal: Hashable
    ) -> StoredAdapter[ReadAdapter]:
        """Bring the version into the store."""
        version = (adapter.uri, adapter.version)
        # The same bytes would be refused again after a fetch of gigabytes.
        if version in self._refused:
            raise copy.copy(self._refused[version])  # a copy: raising one object again and again grows its traceback
        with describing(place=adapter.uri):
            selected = select_files(adapter, self._settings)

        async def fetch(download: PartialDownload) -> None:
            files = tuple((file.name, file.size_bytes) for file in selected.files)
            async with reported(self._events, FetchStarted(name, source.label, str(download.directory), files)):
                await source.fetch(selected, download)

        try:
            async with self._places.at(source).held(principal):
                started = time.perf_counter()
                stored = await self._store.obtain(selected, fetch, partial(self._check_fetched, selected), holder)
        except _BytesRefused as refused:
            self._refused[version] = copy.copy(refused.error)  # before the name is added: other names may ask too
            raise refused.error from None
        if not stored.fetched:
            return stored
        size_bytes = sum(file.size_bytes for file in selected.files)
        fetch_s = time.perf_counter() - started
        fetched = AdapterFetched(name, source.label, adapter.uri, size_bytes, fetch_s)
        self._events.emit(fetched)
        return stored

    def _leased_version(
        self, name: str, digest_prefix: str, origins: frozenset[str] | None, holder: object
    ) -> Manifest | None:
        """The only matching version, leased; with `origins`, only versions of the name or its places match."""
        found = []
        with store_errors():
            for digest in self._store.published.matching(digest_prefix):
                try:
                    manifest = Manifest.read(self._store.layout.adapter(digest))
                except InvalidAdapter:
                    continue
                if origins is None or manifest.uri in origins or (name, digest) in self._had:
                    found.append(manifest)
        # Two matches: a prefix must never choose between versions.
        if len(found) != 1 or self._store.acquire(found[0].digest, holder) is None:
            return None
        return found[0]

    def _check_fetched(self, selected: RemoteAdapter, directory: Path) -> ReadAdapter:
        """Verify the fetched files.

        Raises:
            _BytesRefused: the bytes are no adapter that can be served. LoRAPluginsError: the files could not be read.
        """
        try:
            return children().read(directory, self._settings).result()
        except LoRAPluginsError as error:
            kind = kind_of(error)
            if kind is ErrorKind.ABSENCE and not all((directory / file.name).exists() for file in selected.files):
                raise _gone() from error  # the source has the files: another program cleans up in the store
            if kind in (ErrorKind.VERDICT, ErrorKind.ABSENCE):
                raise _BytesRefused(error) from error
            raise

    def _read(self, directory: Path) -> Future[ReadAdapter]:
        """Verify files again that were verified before, but skip the values."""
        return children().read(directory, replace(self._settings, check_finite=False))

    def _check_fits(self, base: BaseModel | None, verified: VerifiedAdapter) -> VerifiedAdapter:
        return verified if base is None else fit_adapter(verified, base, self._settings)


def _resolved(
    name: str, stored: StoredAdapter[ReadAdapter], verified: VerifiedAdapter, *, source: str, uri: str, version: str
) -> ResolvedAdapter:
    return ResolvedAdapter(
        name=name,
        adapter_id=adapter_id(name),
        path=stored.directory,
        source=source,
        version=version,
        uri=uri,
        size_bytes=verified.size_bytes,
        rank=verified.config.max_rank,
        is_3d=verified.is_3d,
        warnings=verified.warnings,
    )


def _gone() -> SourceUnavailable:
    return SourceUnavailable(
        "fetched files that are gone from the store before they are read",
        expected="a store in which nobody else removes files",
        remedy="ask again; look for what cleans up in LORA_PLUGINS_STORE_DIR",
    )


def _verified(stored: StoredAdapter[ReadAdapter]) -> VerifiedAdapter | None:
    return None if stored.arrived is None else stored.arrived.adapter


def _label_of(uri: str) -> str:
    return _LABELS.get(uri.partition("://")[0], "s3")


def select_files(adapter: RemoteAdapter, settings: Settings) -> RemoteAdapter:
    """The adapter with only the files to read.

    Raises:
        AdapterNotFound: the adapter has no weights.
        InvalidAdapter: the weights are a pickle, which is not allowed, or there are too many or too large files.
    """
    names = {file.name for file in adapter.files}
    try:
        weights = choose_weights(names, settings)
    except AdapterNotFound as error:
        name_format(error, names)
        raise
    if weights == INDEX_FILE:
        check_shards(file.name for file in adapter.files if is_shard(file.name))
    files = tuple(
        file
        for file in adapter.files
        if file.name in (CONFIG_FILE, weights) or (weights == INDEX_FILE and is_shard(file.name))
    )
    with describing(file=weights):
        check_size(sum(file.size_bytes for file in files), settings)
    return replace(adapter, files=files)
