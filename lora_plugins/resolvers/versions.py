"""Bring a located version of an adapter into the store: fetched once, verified, in the engine's form, leased.

Runs on the event loop of an API server (or of a worker that lacks an adapter's files): `resolver.py` calls `serve` with
the version that a source has, or `of_digest` for a version that the store has already. Out comes a `ResolvedAdapter`,
whose directory engines may read. Threads hash and copy, and reading processes (`verification/`) read the files, because
what an adapter contains is not trusted.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lora_plugins.adapter.chat import chat_files
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.fit import BaseModel, check_config
from lora_plugins.adapter.names import adapter_id
from lora_plugins.adapter.verify import VerifiedAdapter, fit_adapter
from lora_plugins.adapter.weight_files import INDEX_FILE, PICKLE_FILES, WEIGHTS_FILE
from lora_plugins.errors import ErrorKind, InvalidAdapter, LoRAPluginsError, SourceUnavailable, describing, kind_of
from lora_plugins.events import AdapterConfirmed, AdapterFetched, AdapterResolved, Events, FetchStarted
from lora_plugins.resolvers.admission import Fetches, fetches_of, few_at_once
from lora_plugins.resolvers.chats import Chats
from lora_plugins.resolvers.converted_version import ConvertedAdapter
from lora_plugins.resolvers.fetch_progress import reported
from lora_plugins.resolvers.file_selection import chat_files_to_fetch, large_chat_files, select_files
from lora_plugins.resolvers.known_versions import Key, KnownVersions, ResolvedAdapter
from lora_plugins.resolvers.sources.retries import deadline
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source, SourceFile
from lora_plugins.settings import Settings
from lora_plugins.store.disk_errors import DamagedCopy, store_errors
from lora_plugins.store.layout import is_digest
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store, StoredAdapter
from lora_plugins.verification.children import children
from lora_plugins.verification.protocol import ReadAdapter

_Stored = StoredAdapter[ReadAdapter]
_JUDGED_FIRST = frozenset({CONFIG_FILE, INDEX_FILE})  # fetched before the weights, which they may condemn
# Up to this size a copy from a disk takes no longer than a question to the reading process: weights come at once.
_COPIED_AT_ONCE_BYTES = 64 << 20
_HASHED_S = 60.0  # an entry that fails a check is not hashed again within this time


class _BytesRefused(Exception):
    """The fetched bytes cannot be served: another fetch of this version would change nothing."""

    def __init__(self, error: LoRAPluginsError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class _Asker:
    """For whom a version is brought.

    Attributes:
        base: the served model that the version must fit; None where nothing is compared.
        holder: of the lease until the version is verified.
        principal: whose places the fetch, the reads and the conversion take.
    """

    base: BaseModel | None
    holder: object
    principal: Hashable


class VersionStore:
    """The versions of names of one process in the store. For one event loop.

    Each name has its own lease of every version resolved for the name. Versions with refused bytes are not fetched
    again.
    """

    def __init__(self, settings: Settings, events: Events, store: Store, known: KnownVersions, chats: Chats) -> None:
        self._settings, self._events, self._store, self._known, self._chats = settings, events, store, known, chats
        self._fetches: dict[int, Fetches] = {}  # by `id` of the source: those of other packages need no hash
        self._reading = few_at_once("adapters that are being read", settings.fetch_timeout_s)
        self._converting = few_at_once("adapters that are being converted", settings.fetch_timeout_s)
        children().warm()  # so that the first fetch waits for no start

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
    ) -> tuple[ResolvedAdapter, AdapterResolved | None]:
        """Return the located version, verified against `base`, leased for `holder` or else for the name.

        The second value says how the version came; None where the same version was served before. `key` is the name and
        the asked URI; `locate_s` are the seconds that locating took. Fetches, reads and conversions take a place of
        `principal`.

        Raises:
            VersionChanged: the caller must locate the adapter again.
            LoRAPluginsError: the version cannot be had or served.
        """
        name, served = key[0], self._known.last(*key)
        wanted = adapter.uri, adapter.version, holder, chat_files_to_fetch(adapter, self._settings)
        is_same = served is not None and (served.uri, served.version, served.holder, served.chat_files) == wanted
        if served is not None and is_same and self._known.is_held(served) and self._store.has(served.path):
            self._events.emit(AdapterConfirmed(name, source.label))
            return self._known.note(key, served, is_remote=source.remote), None
        started = time.perf_counter()
        asker = _Asker(base, object(), principal)
        try:
            stored, verified, obtain_s = await self._obtain_ready(name, source, adapter, asker)
        except DamagedCopy:  # the copy is marked now, so the second try fetches the version
            stored, verified, obtain_s = await self._obtain_ready(name, source, adapter, asker)
        warnings = [*adapter.warnings]
        if self._settings.adapter_chat.reads_files and (large := large_chat_files(adapter)):
            warnings.append(f"not used of the adapter's files for chats: {', '.join(large)} (too large)")
        if warnings:
            verified = replace(verified, warnings=(*verified.warnings, *warnings))
            self._known.note_warnings(stored.digest, verified.warnings)
        # Point the link before the lease goes to the name: a reader of the link must find a leased adapter.
        if adapter.link is not None:
            await asyncio.to_thread(adapter.link.point_to, stored.directory, name)
        self._store.leases.hand_over(stored.digest, asker.holder, holder or name)
        facts = AdapterResolved(
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
        self._events.emit(facts)
        origin = (source.label, adapter.uri, adapter.version)
        found = _resolved(name, stored, verified, origin, of_chats=wanted[-1], holder=holder)
        return self._known.note(key, found, is_remote=source.remote), facts

    async def _obtain_ready(
        self, name: str, source: Source, adapter: RemoteAdapter, asker: _Asker
    ) -> tuple[_Stored, VerifiedAdapter, float]:
        """Return a located version as `_ready` does, and the seconds until its bytes were in the store."""
        started, stored, base = time.perf_counter(), None, asker.base
        # Look for the converted form first, because the original may have been evicted.
        if base is not None and base.model is not None:
            names = {CONFIG_FILE, WEIGHTS_FILE, *chat_files_to_fetch(adapter, self._settings)}
            wanted = adapter.uri, adapter.version, names, asker.holder, base.model.form
            stored = await asyncio.to_thread(self._store.find_leased, *wanted)
        if stored is None:
            stored = await self._obtain(name, source, adapter, asker)
        obtain_s = time.perf_counter() - started
        return *await self._ready(stored, adapter.uri, adapter.version, asker), obtain_s

    async def of_digest(
        self,
        name: str,
        digest_prefix: str,
        base: BaseModel | None,
        *,
        of_any_name: bool,
        principal: Hashable = None,
    ) -> ResolvedAdapter | None:
        """Find a version in the store as `AdapterResolver.of_digest` says; no source is asked."""
        # Forging 8 characters of a digest takes half an hour, so a prefix counts only for versions of the name itself.
        if of_any_name and not is_digest(digest_prefix):
            return None
        may_reach = self._known.reach_of(name) if not of_any_name else lambda _: True
        if may_reach is None:
            return None
        asker = _Asker(base, object(), principal)
        manifest = await asyncio.to_thread(self._leased_version, digest_prefix, may_reach, asker.holder)
        if manifest is None:
            return None
        origin = self._known.origin(name, manifest)
        found: _Stored = StoredAdapter(manifest.digest, self._store.layout.adapter(manifest.digest))
        try:
            stored, verified = await self._ready(found, *origin[1:], asker)
        except DamagedCopy:
            return None
        self._store.leases.hand_over(stored.digest, asker.holder, name)
        of_chats = chat_files(file.name for file in manifest.files)
        resolved = _resolved(name, stored, verified, origin, of_chats=of_chats)
        if of_any_name and "@" not in name:  # `NAME@DIGEST` has no versions of its own
            self._known.note_had(name, resolved)
        return resolved

    async def _ready(self, stored: _Stored, uri: str, version: str, asker: _Asker) -> tuple[_Stored, VerifiedAdapter]:
        """Return a leased version in the engine's form, and its check; a conversion takes over the original's lease."""
        base, verified = asker.base, await self._check_sound(stored, asker)
        if verified.conversion is None or base is None or base.model is None:
            return stored, verified
        try:
            with store_errors():
                wanted = await asyncio.to_thread(
                    ConvertedAdapter.of, stored, uri, version, verified.conversion, base.model.form
                )
            async with self._converting.held(asker.principal):
                made = await self._store.obtain(
                    wanted, wanted.write, lambda made: self._read(made).result(), asker.holder, wanted.converted
                )
        finally:
            self._store.leases.release(stored.digest, asker.holder)
        again = await self._check_sound(made, asker)
        changes = "converted into the engine's form: " + ", ".join(wanted.converted.changes)
        return replace(made, arrived=stored.arrived), replace(again, notes=(*again.notes, changes))

    async def _check_sound(self, stored: _Stored, asker: _Asker) -> VerifiedAdapter:
        """Check a leased version as `_check` does, and that its bytes still have the digest.

        The bytes are hashed once per process, and after a failed check again, to tell a wrong adapter from a damaged
        copy.

        Raises:
            DamagedCopy: the bytes differ from the digest; the copy is marked.
            SourceUnavailable: the bytes cannot be read at the moment.
            LoRAPluginsError: the version does not fit. No lease is left.
        """
        digest = stored.digest
        # At the same time: hashing takes the disk, and the check takes the verification child.
        checked, is_sound = await asyncio.gather(
            self._check(stored, asker), asyncio.to_thread(self._store.is_sound, digest), return_exceptions=True
        )
        # The hash may be remembered from before the damage, so allow only a recent hash.
        if isinstance(checked, LoRAPluginsError) and is_sound is True:
            is_sound = await asyncio.to_thread(self._store.is_sound, digest, max_age_s=_HASHED_S)
        if is_sound is True and not isinstance(checked, BaseException):
            self._known.note_warnings(digest, checked.warnings)
            self._chats.keep(digest, checked.chat)
            return checked
        self._store.leases.release(digest, asker.holder)
        if is_sound is False:
            raise DamagedCopy.of(digest)
        raise next(error for error in (is_sound, checked) if isinstance(error, BaseException))

    async def _check(self, stored: _Stored, asker: _Asker) -> VerifiedAdapter:
        """Validate a leased version against the base model; a check on arrival saves reading the files.

        Values were checked on arrival, in this process or another.
        """
        arrived = stored.arrived
        if arrived is None:
            arrived = await self.read(stored.directory, asker.principal)
        if asker.base is None:
            return arrived.adapter
        return await asyncio.to_thread(fit_adapter, arrived.adapter, asker.base, self._settings, stored.directory)

    async def _obtain(self, name: str, source: Source, adapter: RemoteAdapter, asker: _Asker) -> _Stored:
        """Have the version in the store, leased: found there, or fetched in a place of the principal."""
        version = (adapter.uri, adapter.version)
        # The same bytes would be refused again after a fetch of gigabytes.
        if (refused := self._known.refused.get(version)) is not None:
            raise copy.copy(refused)  # a copy: raising one object again and again grows its traceback
        with describing(place=adapter.uri):
            selected = select_files(adapter, self._settings)
        # A version that is here takes no place: the source may not answer.
        names = {file.name for file in selected.files}
        if (found := await asyncio.to_thread(self._store.find_leased, *version, names, asker.holder)) is not None:
            return found
        if (fetches := self._fetches.get(id(source))) is None:
            fetches = self._fetches[id(source)] = fetches_of(source, self._settings.fetch_timeout_s, self._events)
        size_bytes = sum(file.size_bytes for file in selected.files)
        is_at_once = not source.remote and size_bytes <= _COPIED_AT_ONCE_BYTES

        async def fetch(download: PartialDownload) -> None:
            files = tuple((file.name, file.size_bytes) for file in selected.files)
            started = FetchStarted(name, source.label, str(download.directory), files)
            most = deadline(self._settings.fetch_max_s, variable="LORA_PLUGINS_FETCH_MAX_S")
            async with reported(self._events, started), most:
                rest = selected
                if not is_at_once:
                    first = tuple(file for file in selected.files if file.name in _JUDGED_FIRST)
                    await fetches.breaker.judged(source.fetch(replace(selected, files=first), download), adapter.uri)
                    await asyncio.to_thread(self._check_fetched, selected, first, asker.base, download.directory)
                    left = (file for file in selected.files if not (download.directory / file.name).exists())
                    rest = replace(selected, files=tuple(left), is_rest=True)
                if rest.files:
                    await fetches.breaker.judged(source.fetch(rest, download), adapter.uri)

        try:
            async with fetches.turn(asker.principal):
                started = time.perf_counter()
                base = asker.base if is_at_once else None  # `fetch` has compared the others
                check = partial(self._check_fetched, selected, selected.files, base)
                stored = await self._store.obtain(selected, fetch, check, asker.holder)
        except _BytesRefused as bytes_refused:
            error = bytes_refused.error
            self._known.refused[version] = copy.copy(error)  # before the name is added: other names may ask too
            raise error from None
        if not stored.fetched:
            return stored
        fetch_s = time.perf_counter() - started
        self._events.emit(AdapterFetched(name, source.label, adapter.uri, size_bytes, fetch_s))
        return stored

    def _leased_version(
        self, digest_prefix: str, may_reach: Callable[[Manifest], bool], holder: object
    ) -> Manifest | None:
        """The only matching version that the name may reach, leased; None for none, and for more than one."""
        found = []
        with store_errors():
            for digest in self._store.published.matching(digest_prefix):
                try:
                    manifest = Manifest.read(self._store.layout.adapter(digest))
                except InvalidAdapter:
                    continue
                if may_reach(manifest):
                    found.append(manifest)
        # Two matches: a prefix must never choose between versions.
        if len(found) != 1 or self._store.acquire(found[0].digest, holder) is None:
            return None
        return found[0]

    def _check_fetched(
        self, selected: RemoteAdapter, fetched: tuple[SourceFile, ...], base: BaseModel | None, directory: Path
    ) -> ReadAdapter:
        """Verify the fetched files, all selected or still without weights, and compare the configuration with `base`.

        Raises:
            _BytesRefused: the bytes are no adapter that can be served. LoRAPluginsError: the files could not be read.
        """
        try:
            read = children().read(directory, self._settings, config_only=fetched != selected.files).result()
            config = read.adapter.config
            # Patterns may match no module, so ranks of patterns wait for the weights.
            if base is not None and config.max_rank == config.rank:
                is_pickle = any(file.name in PICKLE_FILES for file in selected.files)
                with describing(file=CONFIG_FILE if is_pickle else WEIGHTS_FILE):
                    check_config(config, base, self._settings.base_match)
        except LoRAPluginsError as error:
            kind = kind_of(error)
            if kind is ErrorKind.ABSENCE and not all((directory / file.name).exists() for file in fetched):
                raise gone() from error  # the source has the files: another program cleans up in the store
            if kind in (ErrorKind.VERDICT, ErrorKind.ABSENCE):
                raise _BytesRefused(error) from error
            raise
        return read

    async def read(self, directory: Path, principal: Hashable) -> ReadAdapter:
        """Read a leased version in a place of `principal`."""
        async with self._reading.held(principal):
            return await asyncio.wrap_future(self._read(directory))

    def _read(self, directory: Path) -> Future[ReadAdapter]:
        """Verify files again that were verified before, but skip the values."""
        return children().read(directory, replace(self._settings, check_finite=False))


def _resolved(
    name: str,
    stored: _Stored,
    verified: VerifiedAdapter,
    origin: tuple[str, str, str],
    *,
    of_chats: tuple[str, ...],
    holder: Hashable = None,
) -> ResolvedAdapter:
    source, uri, version = origin
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
        holder=holder,
        chat_files=of_chats,
    )


def gone() -> SourceUnavailable:
    """The error where files were removed from the store before they were read."""
    return SourceUnavailable(
        "fetched files that are gone from the store before they are read",
        expected="a store in which nobody else removes files",
        remedy="ask again; look for what cleans up in LORA_PLUGINS_STORE_DIR",
    )
