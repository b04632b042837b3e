"""Get an adapter's directory for a version of a source: find the version in the store, or fetch, check and publish."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from lora_plugins.errors import InvalidAdapter, InvalidSettings, NoFreeSlot, SourceUnavailable
from lora_plugins.settings import Settings
from lora_plugins.store.blocked_names import Blocks
from lora_plugins.store.disk_errors import FULL, FullDisk, is_damage, store_errors
from lora_plugins.store.eviction import Evictor, damaged_in, share_of_disk
from lora_plugins.store.file_system import try_file_system
from lora_plugins.store.hashing import HashedEntries, identity_of, sha256_of
from lora_plugins.store.inventory import Inventory
from lora_plugins.store.layout import (
    MANIFEST_FILE,
    PRESSURE_FILE,
    Layout,
    Published,
    discard,
    is_digest,
    make_durable,
    start_syncing,
    sync_directory,
    write_small,
)
from lora_plugins.store.leases import Leases
from lora_plugins.store.locks import fetch_lock, remove_unheld, to_its_end
from lora_plugins.store.manifest import Converted, Manifest, StoredFile, digest_of, put_canonical
from lora_plugins.store.partial_download import CheckedAdapter, DownloadSpec, PartialDownload
from lora_plugins.store.processes import Processes

_T = TypeVar("_T", bound=CheckedAdapter)
_SWEPT_AT_ONCE = 1_000  # entries of the folder of leases
_PAGE_BYTES, _OWN_PAGES = 4096, 3  # each file takes whole pages; manifest, index and a canonical configuration too


@dataclass(frozen=True, slots=True)
class StoredAdapter(Generic[_T]):
    """A published adapter; an engine may read `directory` during a lease.

    Attributes:
        arrived: the result of the check, where this call has fetched the adapter.
    """

    digest: str
    directory: Path
    arrived: _T | None = None

    @property
    def fetched(self) -> bool:
        """Whether this call has fetched the adapter."""
        return self.arrived is not None


class Store:
    """Adapters below one root, which processes and hosts may share.

    The budget is `max_bytes`, or else a share of the file system.

    Raises at construction:
        InvalidSettings: the file system has no working locks, or the store is another user's.
        OSError: the root cannot be written.
    """

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int | None = None,
        fetch_timeout_s: float = 300,
    ) -> None:
        self.layout = Layout(root)
        self.layout.create()
        self.published = Published(self.layout)
        self.processes = Processes(self.layout.folder("processes"))
        self.leases = Leases(self.layout, self.processes)
        self.blocks = Blocks(self.layout)
        self.inventory = Inventory(self.layout)
        self.evictor = Evictor(self.layout, self.leases, self.inventory)
        self.max_bytes, self._kept_free_bytes = max_bytes or 0, 0
        if max_bytes is None:
            self.max_bytes, self._kept_free_bytes = share_of_disk(self.layout, self.inventory)
        # Ends leases of this process that nobody uses at the moment, because a fetch needs their room.
        self.relieve: Callable[[], Awaitable[None]] | None = None
        self.on_damage: Callable[[str], None] | None = None  # called with the digest of a damaged entry, in a thread
        self._hashed = HashedEntries()
        self._fetch_timeout_s = fetch_timeout_s
        try:
            self._try()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._sweep()  # what dead processes have left takes inodes
            self._try()
        self._sweep()

    def _try(self) -> None:
        try_file_system(self.layout.new_temporary(self.processes.me()), folder=self.layout.folder("tmp"))

    def find(
        self, uri: str, version: str, form: str = "", *, names: Collection[str] | None = None
    ) -> StoredAdapter[Any] | None:
        """The published adapter of this version, as the source has it or in an engine's form; None unless complete.

        With `names`, only an adapter with exactly these files.
        """
        try:
            digest = self.layout.index(uri, version, form).read_text(errors="replace")
        except FileNotFoundError:
            return None
        if not is_digest(digest) or not self._is_whole(digest, names):
            return None
        return StoredAdapter(digest, self.layout.adapter(digest))

    async def obtain(
        self,
        wanted: DownloadSpec,
        fetch: Callable[[PartialDownload], Awaitable[None]],
        check: Callable[[Path], _T],
        holder: Hashable = "",
        converted: Converted | None = None,
    ) -> StoredAdapter[_T]:
        """Find this version, or fetch, check and publish the version; either way, lease the adapter for `holder`.

        `fetch` writes the files. `check` raises where the files are no adapter that can be served. `converted` says how
        the files differ from the source's.

        Raises:
            NoFreeSlot, OutOfMemory: there is no room, even after removing adapters without a lease from a full disk.
            SourceUnavailable: the store cannot be written, or the source promised other bytes than those that arrived.
            Anything that `fetch` or `check` raises.
        """
        sizes_bytes = {name: size for name, size, _ in wanted.promised}
        needed_bytes, form = sum(sizes_bytes.values()), converted.form if converted else ""
        directory = self.layout.new_temporary(self.processes.me(), needed_bytes)
        lock = self.layout.folder("locks") / f"{self.layout.index(wanted.uri, wanted.version, form).name}.fetch"
        find = partial(self.find_leased, wanted.uri, wanted.version, set(sizes_bytes), holder, form)

        async def find_or_fetch(spare_bytes: int = 0) -> StoredAdapter[_T]:
            await asyncio.to_thread(self.leases.make_again)
            async with fetch_lock(lock, timeout_s=self._fetch_timeout_s):
                # Another caller, or another process, may have published the version meanwhile.
                if (found := await asyncio.to_thread(find)) is not None:
                    return found
                async with self.reserve(needed_bytes + spare_bytes, directory, len(sizes_bytes)):
                    download = PartialDownload(directory, list(sizes_bytes))
                    try:
                        await fetch(download)
                        return await asyncio.to_thread(self._publish, wanted, download, check, holder, converted)
                    finally:
                        await asyncio.to_thread(download.finish_quietly)

        try:
            with store_errors():
                return await find_or_fetch()
        except FullDisk:  # others have written meanwhile, or pages or inodes are lacking: look at the disk once more
            with store_errors():
                return await find_or_fetch((len(sizes_bytes) + _OWN_PAGES) * _PAGE_BYTES)

    @contextlib.asynccontextmanager
    async def reserve(
        self, needed_bytes: int, directory: Path | None = None, needed_files: int = 0
    ) -> AsyncIterator[None]:
        """Inside, so many bytes have room; the name of `directory`, which is made and removed, announces the bytes.

        Raises:
            OutOfMemory: the bytes do not fit even into an empty store. NoFreeSlot: leases are in the way.
        """
        if directory is None:
            directory = self.layout.new_temporary(self.processes.me(), needed_bytes)
        make = partial(self._make_room, needed_bytes, needed_files, directory)
        try:
            await to_its_end(self._relieved(make))
            yield
        finally:
            await asyncio.to_thread(discard, directory)

    async def _relieved(self, make: Callable[[], None]) -> None:
        """Make room in a thread; where leases are in the way, first end unused leases of this process, then of others.

        Other processes see the mark `.pressure`, and end their unused leases before the next try of this fetch.
        """
        try:
            try:
                await asyncio.to_thread(make)
            except NoFreeSlot:
                if self.relieve is None:
                    raise
                await self.relieve()
                await asyncio.to_thread(make)
        except NoFreeSlot:
            with contextlib.suppress(OSError):
                await asyncio.to_thread((self.layout.root / PRESSURE_FILE).touch)
            raise

    def pressed_at(self) -> int:
        """When a process last found no room for leases of others, in the file system's ns; 0 where none ever has."""
        try:
            return (self.layout.root / PRESSURE_FILE).stat().st_mtime_ns
        except OSError:
            return 0

    def end_leases(self, leases: Iterable[tuple[str, Hashable, float | None]]) -> None:
        """End leases of this process; each comes as digest, holder, and last use in seconds since 1970."""
        for digest, holder, used_at in leases:
            if used_at is not None:
                with contextlib.suppress(OSError):  # then only the order of eviction is stale
                    os.utime(self.layout.folder("uses") / digest, (used_at, used_at))
                    self.inventory.note_use(digest, used_at)
            self.leases.release(digest, holder)

    def _make_room(self, needed_bytes: int, needed_files: int, directory: Path | None = None, kept: str = "") -> None:
        """Make room, and the directory whose name announces the bytes, under one lock: the next fetch counts both."""
        with self.leases.guard("room"):
            self._sweep_temporaries()  # the room announced by a process that has died since the start is free
            self.evictor.make_room(
                needed_bytes,
                self.max_bytes,
                needed_files=needed_files,
                kept_free_bytes=self._kept_free_bytes,
                own=directory,
                kept=kept,
            )
            if directory is not None:
                directory.mkdir(exist_ok=True)

    def _publish(
        self,
        wanted: DownloadSpec,
        download: PartialDownload,
        check: Callable[[Path], _T],
        holder: Hashable,
        converted: Converted | None,
    ) -> StoredAdapter[_T]:
        # Hashing, verifying and writing to the disk use different resources, so they run at the same time.
        syncing = start_syncing([download.directory / name for name, _, _ in wanted.promised])
        download.complete()
        try:
            arrived = check(download.directory)
        except Exception:
            for synced in syncing:
                synced.exception()
            _check_promised(download.finish(), wanted)  # damage on the way says nothing of the source's bytes
            raise
        files = download.finish()
        # Wait for all syncs before the first error rises: a sync must not meet a directory that `_fetch` removes.
        for synced in syncing:
            synced.exception()
        _check_promised(files, wanted)
        for synced in syncing:
            synced.result()
        digest = digest_of(files)
        config = put_canonical(download.directory, arrived.canonical)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        described = download.directory / MANIFEST_FILE
        described.write_bytes(Manifest(digest, wanted.uri, wanted.version, files, now, config, converted).to_json())
        folders = {(download.directory / name).parent for name, _, _ in wanted.promised}
        make_durable([download.directory / config.name, described, *folders])
        temporary = self.layout.new_temporary(self.processes.me())
        index = self.layout.index(wanted.uri, wanted.version, converted.form if converted else "")
        # After a power cut the index names no adapter, or an absent adapter: the next request fetches the version.
        write_small(index, [digest], temporary, is_durable=False)
        self._note_use(digest)
        damaged = self.layout.new_temporary(self.processes.me())
        try:
            with self.leases.guard(digest):  # lease before another fetch removes the adapter to make room
                self._put_in_place(download.directory, digest, damaged)
                self.leases.acquire_guarded(digest, holder)
        finally:
            discard(damaged)
        return StoredAdapter(digest, self.layout.adapter(digest), arrived)

    def _put_in_place(self, arrived: Path, digest: str, damaged: Path) -> None:
        """Publish what has arrived; a damaged adapter in its place goes to the path `damaged`."""
        target, mark = self.layout.adapter(digest), self._mark(digest)
        identity = identity_of(arrived)
        if target.exists() and not self._is_whole(digest):
            if not mark.exists():
                self._note_replaced(digest)
            os.rename(target, damaged)
        try:
            os.rename(arrived, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return  # another name or source has brought the same bytes
        self._hashed.note(digest, identity)
        # A reader of `arrived` after a power cut finds all files. The cut may undo the new name, except where the
        # damaged adapter would then be there without its mark.
        if mark.exists():
            sync_directory(self.layout.root)
            mark.unlink(missing_ok=True)

    def has(self, directory: Path) -> bool:
        """Whether a published adapter is there and not known to be damaged; takes a few microseconds."""
        try:
            return directory.is_dir() and not self.is_marked(directory.name)
        except OSError:  # the store does not answer
            return False

    def digest_at(self, path: str) -> str | None:
        """The digest of the adapter at `path`; None where `path` is no adapter of this store."""
        return self.layout.digest_of(path)

    def engine_path(self, digest: str, *, other_than: str = "") -> str:
        """The path by which engines load an adapter now: another spelling after each copy that was found damaged.

        Keys of cached prefixes hold the path, so prefixes that were computed with damaged weights are not found. For a
        thread.

        Raises:
            OSError: the path is `other_than`, and another cannot be noted.
        """
        try:
            replaced = self._replaced(digest).stat().st_size
        except OSError:
            replaced = 0
        path = f"{self.layout.root}/{'./' * replaced}{digest}"
        if path != other_than:
            return path
        self._note_replaced(digest)
        return self.engine_path(digest)

    def _note_replaced(self, digest: str) -> None:
        """Have `engine_path` return another path from here on, in all processes."""
        with self._replaced(digest).open("ab") as file:
            file.write(b".")

    def share(self, path: str, holder: Hashable) -> bool:
        """Lease the adapter at `path` for `holder` too, if this process has leased the adapter; takes microseconds."""
        return self.leases.share(path.rpartition("/")[2], holder)

    def release(
        self, holder: Hashable, path: Path | str, *, used_at: float | None = None
    ) -> asyncio.Future[None] | None:
        """End the lease that `holder` has of the adapter at `path`; a holder without a lease is no error.

        The store may remove the adapter once no lease is left, sooner with an earlier `used_at`, in seconds since 1970,
        than with the time of its last lease. Callable from any thread; in the thread of an event
        loop, another thread removes the lease file, because the disk may hang: the future is done after the removal.
        """
        digest, ending = Path(path).name, object()
        if self.leases.leave(digest, holder):
            return None
        try:
            loop = asyncio.get_running_loop()
            self.leases.hand_over(digest, holder, ending)
        except (RuntimeError, KeyError):  # no event loop, or another thread has ended the lease
            self.end_leases([(digest, holder, used_at)])
            return None
        ended = loop.create_future()

        def end() -> None:
            loop.run_in_executor(None, self.end_leases, [(digest, ending, used_at)]).add_done_callback(tell)

        def tell(_: asyncio.Future[None]) -> None:
            if not ended.done():
                ended.set_result(None)

        # At the loop's next turn: a finalizer may call `release` while the executor holds its own lock. No task, which
        # the end of the loop would cancel before its first step.
        loop.call_soon(end)
        return ended

    def is_leased(self, holder: Hashable, path: Path) -> bool:
        """Whether `holder` has a lease of the adapter at `path`; takes a microsecond."""
        return self.leases.is_held(path.name, holder)

    def acquire_sound(self, digest: str, holder: Hashable) -> Path | None:
        """Do as `acquire`, and check the bytes of the digest. For a thread: the check may hash all files."""
        path, is_sound = self.acquire(digest, holder), False
        try:
            is_sound = path is not None and self.is_sound(digest)
        finally:
            if path is not None and not is_sound:
                self.release(holder, path)
        return path if is_sound else None

    def acquire(self, digest: str, holder: Hashable = "") -> Path | None:
        """Lease the adapter of `digest` and return its directory; None where files are missing or incomplete.

        Raises:
            OutOfMemory: the disk is full.
            SourceUnavailable: the store cannot be read or written.
        """
        with store_errors():
            if not self._lease(digest, holder):
                return None
            is_whole = False
            try:
                is_whole = self._is_whole(digest)
            finally:
                if not is_whole:
                    self.leases.release(digest, holder)
            return self.layout.adapter(digest) if is_whole else None

    def is_sound(self, digest: str, *, max_age_s: float = math.inf) -> bool:
        """Whether a published adapter has the bytes that its digest says.

        The files are hashed, as by `verify`, unless this process has hashed the same files at most `max_age_s` ago.

        Raises:
            SourceUnavailable: the files cannot be read at the moment.
        """
        if self.is_marked(digest):
            return False
        if self._hashed.has(digest, identity_of(self.layout.adapter(digest)), max_age_s):
            return True
        try:
            return self.verify(digest)
        except SourceUnavailable:
            raise
        except OSError:  # damaged, and the mark cannot be written
            return False

    def verify(self, digest: str) -> bool:
        """Hash every file of a published adapter again.

        `verify` marks a damaged adapter, to be fetched again; the adapter stays until the fetch replaces it, or until
        room is needed. For an absent adapter the answer is False, without a mark.

        Raises:
            SourceUnavailable: a file cannot be read at the moment.
            OSError: the adapter is damaged, and the store cannot be written.
        """
        directory = self.layout.adapter(digest)
        identity = identity_of(directory)

        def has_its_bytes(manifest: Manifest) -> bool:
            return manifest.digest == digest == digest_of(manifest.files) and all(
                sha256_of(directory / file.name) == (file.size_bytes, file.sha256) for file in manifest.on_disk
            )

        if self._agrees(digest, has_its_bytes):
            self._hashed.note(digest, identity)
            return True
        self._hashed.forget(digest)
        if not directory.exists():  # a removal, by any process, is no damage
            return False
        if self.on_damage is not None:
            self.on_damage(digest)
        with self.leases.guard(digest):
            try:
                if not self.is_marked(digest) or not self._replaced(digest).exists():
                    self._note_replaced(digest)
            finally:  # a full disk may still have an inode
                self._mark(digest).touch()
        return False

    def is_marked(self, digest: str) -> bool:
        """Whether some process has marked the adapter as damaged."""
        with store_errors():
            return self._mark(digest).exists()

    def changed(self, served: Collection[str], some: Iterable[str]) -> tuple[set[str], set[str]]:
        """Of the `served` digests, the damaged; of `some`, the digests whose files were replaced or written to.

        For a thread: the call reads the file system.
        """
        marked = damaged_in(self.layout).intersection(served)
        found = {digest: identity_of(self.layout.adapter(digest)) for digest in some if digest not in marked}
        return marked, {digest for digest, identity in found.items() if self._hashed.differs(digest, identity)}

    def remove(self, digest: str) -> bool:
        """Remove a published adapter unless it is leased; returns whether it is gone."""
        return self.evictor.remove(digest)

    def find_leased(
        self, uri: str, version: str, names: Collection[str], holder: Hashable, form: str = ""
    ) -> StoredAdapter[Any] | None:
        """Find as `find` does, and lease the adapter for `holder`; raises the errors of `acquire`."""
        with store_errors():
            found = self.find(uri, version, form, names=names)
            return found if found is not None and self._lease(found.digest, holder) else None

    def _lease(self, digest: str, holder: Hashable) -> bool:
        try:
            with store_errors():
                is_leased = self.leases.acquire(digest, holder)
        except FullDisk:  # the file of a lease needs an inode
            self._make_room(0, 0, kept=digest)
            is_leased = self.leases.acquire(digest, holder)
        if not is_leased:
            return False
        with contextlib.suppress(OSError):  # then only the order of eviction is stale
            self._note_use(digest)
        return True

    def _note_use(self, digest: str) -> None:
        use = self.layout.folder("uses") / digest
        use.touch()
        os.utime(use)

    def _is_whole(self, digest: str, names: Collection[str] | None = None) -> bool:
        """Whether every file is there in its size, and with `names` no others; only `verify` reads every byte."""
        if self.is_marked(digest):
            return False
        directory = self.layout.adapter(digest)
        return self._agrees(
            digest,
            lambda manifest: (
                (names is None or {it.name for it in manifest.files} == {*names})
                and all((directory / it.name).stat().st_size == it.size_bytes for it in manifest.on_disk)
            ),
        )

    def _agrees(self, digest: str, compare: Callable[[Manifest], bool]) -> bool:
        """The answer of `compare` for an entry's manifest; False where files are missing, or are no regular files.

        Raises:
            SourceUnavailable: the entry cannot be read at the moment, which does not make the entry damaged.
        """
        with store_errors():
            try:
                return compare(Manifest.read(self.layout.adapter(digest)))
            except (InvalidAdapter, OSError) as error:
                if is_damage(error):
                    return False
                raise

    def _mark(self, digest: str) -> Path:
        return self.layout.folder("damaged") / digest

    def _replaced(self, digest: str) -> Path:
        return self.layout.folder("replaced") / digest

    def _sweep(self) -> None:
        """Remove files and directories that dead processes have left."""
        self._sweep_temporaries()
        for lock in self.layout.folder("locks").glob("*.fetch"):
            remove_unheld(lock)
        for folder in ("parts", "quarantine"):  # of earlier versions, which list the folders
            for entry in self.layout.folder(folder).glob("*"):
                shutil.rmtree(entry, ignore_errors=True)
        self.processes.sweep()
        # Each use asks whether a lease's process lives, so leases of the dead keep nothing and may be swept later.
        if len(os.listdir(self.layout.folder("leases"))) <= _SWEPT_AT_ONCE:
            self.leases.sweep()
        else:
            threading.Thread(target=self._sweep_later, daemon=True, name="lora-plugins-open").start()

    def _sweep_temporaries(self) -> None:
        for temporary in self.layout.temporaries():
            if self.processes.is_gone(temporary.process):
                if temporary.path.is_dir():
                    shutil.rmtree(temporary.path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        temporary.path.unlink()

    def _sweep_later(self) -> None:
        """Do the slow part of opening a large store, so that neither the start nor the first fetch waits."""
        with contextlib.suppress(OSError):  # the store is away; the next process to open the store sweeps
            self.inventory.look()
            self.inventory.order()
            self.leases.sweep()


def open_store(settings: Settings) -> Store:
    """The store below `LORA_PLUGINS_STORE_DIR`.

    Raises:
        InvalidSettings: the store cannot be made or written, is another user's, or its file system has no working
            locks.
    """
    try:
        return Store(
            settings.store_dir,
            max_bytes=settings.store_max_bytes,
            fetch_timeout_s=settings.fetch_timeout_s,
        )
    except OSError as error:
        raise InvalidSettings(
            f"a store below {settings.store_dir} that answers '{error.strerror or type(error).__name__}'",
            expected="a directory that can be written",
            remedy="free space or inodes there, by hand if need be: each directory named by a digest is an adapter"
            if error.errno in FULL
            else "set LORA_PLUGINS_STORE_DIR to this user's, or share it by a group: lora-plugins explain L007",
        ) from error


def _check_promised(files: Sequence[StoredFile], wanted: DownloadSpec) -> None:
    for file, (name, size_bytes, sha256) in zip(files, wanted.promised, strict=True):
        if file.size_bytes != size_bytes or (sha256 and file.sha256 != sha256):
            raise SourceUnavailable(
                f"{file.size_bytes} bytes with SHA-256 {file.sha256[:12]}…, which is not what the source promised",
                expected=f"{size_bytes} bytes" + (f" with SHA-256 {sha256[:12]}…" if sha256 else ""),
                remedy="ask again; if it stays so, upload the adapter again",
                file=name,
            )
