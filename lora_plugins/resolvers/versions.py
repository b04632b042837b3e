"""Versions of adapters in the store: fetched once, verified, and leased for as long as a name needs them."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lora_plugins.adapter.chat import MAX_BYTES, chat_files
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.fit import BaseModel, check_config
from lora_plugins.adapter.names import adapter_id
from lora_plugins.adapter.verify import VerifiedAdapter, check_size, choose_weights, fit_adapter
from lora_plugins.adapter.weight_files import INDEX_FILE, PICKLE_FILES, WEIGHTS_FILE, check_shards, is_shard
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
from lora_plugins.resolvers.admission import Fetches, fetches_of, few_at_once
from lora_plugins.resolvers.chats import Chats
from lora_plugins.resolvers.converted_version import ConvertedAdapter
from lora_plugins.resolvers.fetch_progress import reported
from lora_plugins.resolvers.known_versions import Key, KnownVersions, ResolvedAdapter
from lora_plugins.resolvers.sources.retries import deadline
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source, SourceFile
from lora_plugins.settings import AdapterChat, Settings
from lora_plugins.store.disk_errors import DamagedCopy, store_errors
from lora_plugins.store.layout import is_digest
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store, StoredAdapter
from lora_plugins.verification.children import children
from lora_plugins.verification.protocol import ReadAdapter

_Stored = StoredAdapter[ReadAdapter]
_JUDGED_FIRST = frozenset({CONFIG_FILE, INDEX_FILE})  # no file for chats is a reason to refuse the weights
_COPIED_AT_ONCE_BYTES = 64 << 20  # a copy from a disk takes no longer than a question to the reading process
_HASHED_S = 60.0  # an entry that fails a check is not hashed again within this time


class _BytesRefused(Exception):
    """The fetched bytes cannot be served: another fetch of this version would change nothing."""

    def __init__(self, error: LoRAPluginsError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class _For:
    """A served model to fit, the holder of the lease until the version is verified, and the principal of the places."""

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
        self._fetches: dict[int, Fetches] = {}  # sources of other packages need not be keys of a dict
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
        """The located version in the store, verified against `base`, leased for `holder` or else for the name.

        And how the version came; None where the version was served before. Fetches, reads and conversions take a place
        of `principal`.

        Raises:
            VersionChanged: the caller must locate the adapter again.
            LoRAPluginsError: the version cannot be had or served.
        """
        name, served = key[0], self._known.last(*key)
        wanted = adapter.uri, adapter.version, holder, _chat_files(adapter, self._settings)
        is_same = served is not None and (served.uri, served.version, served.holder, served.chat_files) == wanted
        if served is not None and is_same and self._known.is_held(served) and self._store.has(served.path):
            self._events.emit(AdapterConfirmed(name, source.label))
            return self._known.note(key, served, is_remote=source.remote), None
        started = time.perf_counter()
        asker = _For(base, object(), principal)
        try:
            stored, verified, obtain_s = await self._obtain_ready(name, source, adapter, asker)
        except DamagedCopy:  # the copy is marked now, so the second try fetches the version
            stored, verified, obtain_s = await self._obtain_ready(name, source, adapter, asker)
        warnings = [*adapter.warnings]
        if self._settings.adapter_chat.reads_files and (large := _too_large(adapter)):
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
        self, name: str, source: Source, adapter: RemoteAdapter, asker: _For
    ) -> tuple[_Stored, VerifiedAdapter, float]:
        """A located version, leased and in the engine's form; and the seconds until its bytes were here."""
        started, stored, base = time.perf_counter(), None, asker.base
        # Look for the converted form first, because the original may have been evicted.
        if base is not None and base.model is not None:
            names = {CONFIG_FILE, WEIGHTS_FILE, *_chat_files(adapter, self._settings)}
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
        """Find as `AdapterResolver.of_digest` says."""
        # Forging 8 characters of a digest takes half an hour, so a prefix counts only for versions of the name itself.
        if of_any_name and not is_digest(digest_prefix):
            return None
        may_reach = self._known.reach_of(name) if not of_any_name else lambda _: True
        if may_reach is None:
            return None
        asker = _For(base, object(), principal)
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

    async def _ready(self, stored: _Stored, uri: str, version: str, asker: _For) -> tuple[_Stored, VerifiedAdapter]:
        """A leased version in the engine's form: itself, or its conversion, which then has the lease."""
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

    async def _check_sound(self, stored: _Stored, asker: _For) -> VerifiedAdapter:
        """Check as `_check` does, and hash the bytes meanwhile, once per process.

        After a failed check the bytes are hashed again, to tell a wrong adapter from a damaged copy.

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

    async def _check(self, stored: _Stored, asker: _For) -> VerifiedAdapter:
        """Validate a leased version against the base model; a check on arrival saves reading the files.

        Values were checked on arrival, in this process or another.
        """
        arrived = stored.arrived
        if arrived is None:
            arrived = await self.read(stored.directory, asker.principal)
        if asker.base is None:
            return arrived.adapter
        return await asyncio.to_thread(fit_adapter, arrived.adapter, asker.base, self._settings, stored.directory)

    async def _obtain(self, name: str, source: Source, adapter: RemoteAdapter, asker: _For) -> _Stored:
        """Bring the version into the store."""
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
                    fetched = replace(selected, files=first)
                    await fetches.breaker.judged(source.fetch(fetched, download), adapter.uri)
                    await asyncio.to_thread(self._check_fetched, selected, first, asker.base, download.directory)
                    left = (file for file in selected.files if not (download.directory / file.name).exists())
                    rest = replace(selected, files=tuple(left), is_rest=True)
                if rest.files:
                    await fetches.breaker.judged(source.fetch(rest, download), adapter.uri)

        try:
            async with fetches.turn(asker.principal):
                started = time.perf_counter()
                base = asker.base if is_at_once else None  # else compared already
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
        """The only matching version that the name may reach, leased."""
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
        """Verify the fetched files, with weights or still without, and compare the configuration with the model.

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
    if settings.adapter_chat is AdapterChat.STRICT and (large := _too_large(adapter)):
        remedy = "save the tokenizer again, or set LORA_PLUGINS_ADAPTER_CHAT=adapter to leave the file out"
        expected = f"at most {MAX_BYTES[large[0]]} bytes, as LORA_PLUGINS_ADAPTER_CHAT=strict"
        raise InvalidAdapter("too large a file", expected=expected, remedy=remedy, file=large[0])
    of_chats = _chat_files(adapter, settings)
    return replace(adapter, files=(*files, *(file for file in adapter.files if file.name in of_chats)))


def _chat_files(adapter: RemoteAdapter, settings: Settings) -> tuple[str, ...]:
    if not settings.adapter_chat.reads_files:
        return ()
    large = _too_large(adapter)
    return chat_files(file.name for file in adapter.files if file.name not in large)


def _too_large(adapter: RemoteAdapter) -> list[str]:
    return [file.name for file in adapter.files if file.size_bytes > MAX_BYTES.get(file.name, file.size_bytes)]
