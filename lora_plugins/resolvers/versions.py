"""Bring a located version of an adapter into the store: fetched once, verified, in the engine's form, leased.

Runs on the event loop of an API server (or of a worker that lacks an adapter's files): `resolver.py` calls `serve` with
the version that a source has, or `of_digest` for a version that the store has already. Out comes a `ResolvedAdapter`,
whose directory engines may read. Threads hash and copy, and reading processes (`verification/`) read the files, because
the contents of an adapter are not trusted.

A version has a lease from the moment that it is in the store (`store/leases.py` has the words): first for a holder made
for this one call, and once the version is verified, for the name or for the caller's own holder. The fetched form of a
version (the original) may differ from the engine's form, which a conversion makes as an adapter of its own in the
store.
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
# Fetched and verified before the weights, because their fault makes the fetch of the weights needless.
_JUDGED_FIRST = frozenset({CONFIG_FILE, INDEX_FILE})
# Up to this size, a copy from a disk takes no longer than verifying a configuration in the reading process: all files
# are then copied together and verified once.
_COPIED_AT_ONCE_BYTES = 64 << 20
_HASHED_S = 60.0  # an entry that fails a check is not hashed again within this time


class _BytesRefused(Exception):
    """Carries `error` out of the store: the fetched bytes cannot be served, and another fetch would change nothing."""

    def __init__(self, error: LoRAPluginsError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class _Asker:
    """For whom a version is brought.

    Attributes:
        base: the served model that the version must fit; None where nothing is compared.
        holder: has the lease until the version is verified; an object of this call alone.
        principal: who has sent the request; fetch, reads and conversion take places of the principal
            (`fair_places.py`).
    """

    base: BaseModel | None
    holder: object
    principal: Hashable


class VersionStore:
    """Brings versions into the store and leases them, for one process. For one event loop.

    Each name has its own lease of every version resolved for the name. Versions whose bytes were refused are not
    fetched again.
    """

    def __init__(self, settings: Settings, events: Events, store: Store, known: KnownVersions, chats: Chats) -> None:
        self._settings, self._events, self._store, self._known, self._chats = settings, events, store, known, chats
        self._fetches: dict[int, Fetches] = {}  # by `id` of the source: sources of other packages may not be hashable
        self._reading = few_at_once("adapters that are being read", settings.fetch_timeout_s)
        self._converting = few_at_once("adapters that are being converted", settings.fetch_timeout_s)
        children().warm()  # start the reading processes now, so that the first fetch does not wait for them

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
        the asked URI; `base` is None where nothing is compared; `locate_s` are the seconds that locating took. Fetches,
        reads and conversions take a place of `principal`.

        Raises:
            VersionChanged: the source has another version by now, so the caller must locate the adapter again.
            LoRAPluginsError: the version cannot be had or served.
        """
        name, served = key[0], self._known.last(*key)
        wanted = adapter.uri, adapter.version, holder, (of_chats := chat_files_to_fetch(adapter, self._settings))
        is_same = served is not None and (served.uri, served.version, served.holder, served.chat_files) == wanted
        if served is not None and is_same and self._known.is_held(served) and self._store.has(served.path):
            self._events.emit(AdapterConfirmed(name, source.label))
            return self._known.note(key, served, is_remote=source.remote), None
        started = time.perf_counter()
        asker = _Asker(base, holder=object(), principal=principal)
        try:
            stored, verified, obtain_s = await self._obtain_ready(name, source, adapter, asker)
        except DamagedCopy:  # the copy is marked as damaged now, so the second try does not find the copy and fetches
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
        found = _resolved(name, stored, verified, origin, of_chats=of_chats, holder=holder)
        return self._known.note(key, found, is_remote=source.remote), facts

    async def _obtain_ready(
        self, name: str, source: Source, adapter: RemoteAdapter, asker: _Asker
    ) -> tuple[_Stored, VerifiedAdapter, float]:
        """Return a located version as `_ready` does, and the seconds until its bytes were in the store."""
        started, stored, base = time.perf_counter(), None, asker.base
        # Look for the engine's form first: it is all that is needed, and the original may have been evicted.
        if base is not None and base.model is not None:
            names = {CONFIG_FILE, WEIGHTS_FILE, *chat_files_to_fetch(adapter, self._settings)}
            wanted = adapter.uri, adapter.version, names, asker.holder, base.model.form
            stored = await asyncio.to_thread(self._store.find_leased, *wanted)
        if stored is None:  # not converted, or `base` does not say which form the engine has
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
        """Find a version in the store as `AdapterResolver.of_digest` says; no source is asked. `base` as in `serve`."""
        # Forging 8 characters of a digest takes half an hour, so a prefix counts only for versions of the name itself.
        if of_any_name and not is_digest(digest_prefix):
            return None
        may_reach = self._known.reach_of(name) if not of_any_name else lambda _: True
        if may_reach is None:  # this process has found the name nowhere yet
            return None
        asker = _Asker(base, holder=object(), principal=principal)
        manifest = await asyncio.to_thread(self._leased_version, digest_prefix, may_reach, asker.holder)
        if manifest is None:
            return None
        origin = self._known.origin(name, manifest)  # the source's label, the URI, and the version there
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
        """Return a leased version in the engine's form, and the result of its check.

        Where a conversion is needed, the converted adapter gets a lease of the same holder, and the lease of the
        original, `stored`, ends.
        """
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

        The bytes are hashed once per process. After a failed check they are hashed again, to know whether the adapter
        is wrong or the copy is damaged. After any error, the holder has no lease any more.

        Raises:
            DamagedCopy: the bytes differ from the digest; the copy is marked.
            SourceUnavailable: the bytes cannot be read at the moment.
            LoRAPluginsError: the version does not fit.
        """
        digest = stored.digest
        # At the same time: hashing takes the disk, and the check takes a reading process. Each result may be an error;
        # else `is_sound` is whether the bytes have the digest.
        checked, is_sound = await asyncio.gather(
            self._check(stored, asker), asyncio.to_thread(self._store.is_sound, digest), return_exceptions=True
        )
        # `is_sound` may remember a hash from before the damage: now allow only a recent hash.
        if isinstance(checked, LoRAPluginsError) and is_sound is True:
            is_sound = await asyncio.to_thread(self._store.is_sound, digest, max_age_s=_HASHED_S)
        if is_sound is True and not isinstance(checked, BaseException):
            self._known.note_warnings(digest, checked.warnings)
            self._chats.keep(digest, checked.chat)
            return checked
        self._store.leases.release(digest, asker.holder)
        if is_sound is False:
            raise DamagedCopy.of(digest)
        # Where hashing failed too, its error goes first: the files cannot be read.
        raise next(error for error in (is_sound, checked) if isinstance(error, BaseException))

    async def _check(self, stored: _Stored, asker: _Asker) -> VerifiedAdapter:
        """Check that a leased version fits the base model, if there is one to compare.

        The files are read, unless this call has fetched and so read them (`stored.arrived`). The values of the weights
        are not checked again: the process that fetched the version has checked the values.
        """
        arrived = stored.arrived
        if arrived is None:
            arrived = await self.read(stored.directory, asker.principal)
        if asker.base is None:
            return arrived.adapter
        return await asyncio.to_thread(fit_adapter, arrived.adapter, asker.base, self._settings, stored.directory)

    async def _obtain(self, name: str, source: Source, adapter: RemoteAdapter, asker: _Asker) -> _Stored:
        """Lease the version in its source's form: found in the store, or fetched in a place of the principal.

        Raises:
            LoRAPluginsError: as `serve`.
        """
        version = (adapter.uri, adapter.version)
        # After a fetch of gigabytes, the same bytes would be refused again.
        if (refused := self._known.refused.get(version)) is not None:
            raise copy.copy(refused)  # a copy: raising one object again and again grows its traceback
        with describing(place=adapter.uri):
            selected = select_files(adapter, self._settings)
        # A version in the store needs no place, and is served even while the source does not answer.
        names = {file.name for file in selected.files}
        if (found := await asyncio.to_thread(self._store.find_leased, *version, names, asker.holder)) is not None:
            return found
        if (fetches := self._fetches.get(id(source))) is None:
            fetches = self._fetches[id(source)] = fetches_of(source, self._settings.fetch_timeout_s, self._events)
        size_bytes = sum(file.size_bytes for file in selected.files)
        # Whether all files are fetched together, without verifying the configuration first.
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
                    # Files that are there already, the first ones at least, are not fetched again.
                    left = (file for file in selected.files if not (download.directory / file.name).exists())
                    rest = replace(selected, files=tuple(left), is_rest=True)
                if rest.files:
                    await fetches.breaker.judged(source.fetch(rest, download), adapter.uri)

        try:
            async with fetches.turn(asker.principal):
                started = time.perf_counter()
                base = asker.base if is_at_once else None  # otherwise `fetch` has compared the configuration already
                check = partial(self._check_fetched, selected, selected.files, base)
                stored = await self._store.obtain(selected, fetch, check, asker.holder)
        except _BytesRefused as bytes_refused:
            error = bytes_refused.error
            # A copy without the adapter's name, which callers add to `error`: other names may ask for the version too.
            self._known.refused[version] = copy.copy(error)
            raise error from None
        if not stored.fetched:
            return stored
        fetch_s = time.perf_counter() - started
        self._events.emit(AdapterFetched(name, source.label, adapter.uri, size_bytes, fetch_s))
        return stored

    def _leased_version(
        self, digest_prefix: str, may_reach: Callable[[Manifest], bool], holder: object
    ) -> Manifest | None:
        """Lease the version that matches and that `may_reach` allows; None where no version or more than one does."""
        found = []
        with store_errors():
            for digest in self._store.published.matching(digest_prefix):
                try:
                    manifest = Manifest.read(self._store.layout.adapter(digest))
                except InvalidAdapter:  # a damaged entry, which could not be served
                    continue
                if may_reach(manifest):
                    found.append(manifest)
        # With two matches, the prefix does not say which version is meant.
        if len(found) != 1 or self._store.acquire(found[0].digest, holder) is None:
            return None
        return found[0]

    def _check_fetched(
        self, selected: RemoteAdapter, fetched: tuple[SourceFile, ...], base: BaseModel | None, directory: Path
    ) -> ReadAdapter:
        """Verify the `fetched` files, and compare the configuration with `base`, unless None.

        Where `fetched` are not all `selected` files, there are no weights yet, and only the configuration is verified.

        Raises:
            _BytesRefused: the bytes are no adapter that can be served.
            LoRAPluginsError: the files could not be read.
        """
        try:
            read = children().read(directory, self._settings, config_only=fetched != selected.files).result()
            config = read.adapter.config
            # The configuration may give other ranks to modules by patterns (`rank_pattern`). Patterns may match no
            # module, so only the weights show whether a rank above `config.rank` counts.
            if base is not None and config.max_rank == config.rank:
                # The file that `adapter/verify.py` names for the same fault of an adapter with weights.
                is_pickle = any(file.name in PICKLE_FILES for file in selected.files)
                with describing(file=CONFIG_FILE if is_pickle else WEIGHTS_FILE):
                    check_config(config, base, self._settings.base_match)
        except LoRAPluginsError as error:
            kind = kind_of(error)
            if kind is ErrorKind.ABSENCE and not all((directory / file.name).exists() for file in fetched):
                # The files were fetched, so another program has removed them from the store: no fault of the bytes.
                raise gone() from error
            if kind in (ErrorKind.VERDICT, ErrorKind.ABSENCE):
                raise _BytesRefused(error) from error
            raise
        return read

    async def read(self, directory: Path, principal: Hashable) -> ReadAdapter:
        """Read and verify a leased version in a place of `principal`, but not the values of the weights."""
        async with self._reading.held(principal):
            return await asyncio.wrap_future(self._read(directory))

    def _read(self, directory: Path) -> Future[ReadAdapter]:
        """Begin to verify files of the store again, without the values, which were checked before the publication."""
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
    """Describe a version for callers; `origin` is the source's label, the URI, and the version there."""
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
