"""The store of an API server or a command: find a version's adapter, or fetch, check and publish it, and lease it.

`Store` is made once for each process that serves adapters or looks after them (`open_store`). In go a source's URI and
version, and functions that fetch and check the files; out come directories below the store's root, leased so that no
process removes them while an engine reads them. Waiting is asynchronous and file work runs in threads, as an event loop
serves requests meanwhile.

`entries.py` says which published adapters are whole, `leases.py` explains leases and their holders, and `eviction.py`
removes adapters to make room.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from lora_plugins.errors import InvalidSettings, NoFreeSlot, SourceUnavailable
from lora_plugins.settings import Settings
from lora_plugins.store.blocked_names import Blocks
from lora_plugins.store.disk_errors import FULL, FullDisk, store_errors
from lora_plugins.store.durable_files import discard, make_durable, start_syncing, write_small
from lora_plugins.store.entries import Entries
from lora_plugins.store.eviction import Evictor, share_of_disk
from lora_plugins.store.file_system import try_file_system
from lora_plugins.store.inventory import Inventory
from lora_plugins.store.layout import MANIFEST_FILE, PRESSURE_FILE, Layout, Published, is_digest
from lora_plugins.store.leases import Leases
from lora_plugins.store.locks import fetch_lock, to_its_end, touched_ns
from lora_plugins.store.manifest import Converted, Manifest, StoredFile, digest_of, put_canonical
from lora_plugins.store.partial_download import CheckedAdapter, DownloadSpec, PartialDownload
from lora_plugins.store.processes import Processes
from lora_plugins.store.sweep import sweep, sweep_temporaries

_T = TypeVar("_T", bound=CheckedAdapter)
# Each file takes whole pages. The store adds three small files: manifest, index and a canonical configuration.
_PAGE_BYTES, _OWN_PAGES = 4096, 3


@dataclass(frozen=True, slots=True)
class StoredAdapter(Generic[_T]):
    """A published adapter; an engine may read `directory` during a lease.

    Attributes:
        arrived: the result of the check, where this call has fetched the adapter; None for an adapter found here.
    """

    digest: str
    directory: Path
    arrived: _T | None = None

    @property
    def fetched(self) -> bool:
        """Whether this call has fetched the adapter."""
        return self.arrived is not None


class Store(Entries):
    """Adapters below one root, which processes and hosts may share.

    The budget is `max_bytes`, or where None, a share of the file system.

    Raises at construction:
        InvalidSettings: the file system has no working locks, or the store is another user's.
        OSError: the root cannot be written.
    """

    def __init__(self, root: Path, *, max_bytes: int | None = None, fetch_timeout_s: float = 300) -> None:
        layout = Layout(root)
        layout.create()
        self.processes = Processes(layout.folder("processes"))
        super().__init__(layout, Leases(layout, self.processes))
        self.published = Published(self.layout)
        self.blocks = Blocks(self.layout)
        self.inventory = Inventory(self.layout)
        self.max_bytes, kept_free_bytes = (
            share_of_disk(self.layout, self.inventory) if max_bytes is None else (max_bytes, 0)
        )
        self.evictor = Evictor(self.layout, self.leases, self.inventory, kept_free_bytes)
        # Ends leases of this process that nobody uses at the moment, because a fetch needs the room. None: nothing to
        # end, as in a command.
        self.relieve: Callable[[], Awaitable[None]] | None = None
        self._fetch_timeout_s = fetch_timeout_s
        sweep_all = partial(sweep, self.layout, self.processes, self.leases, self.inventory)
        try:
            self._try()
        except OSError as error:
            if error.errno not in FULL:
                raise
            sweep_all()  # files that dead processes have left take inodes: try once more without these
            self._try()
        sweep_all()

    def find_leased(
        self, uri: str, version: str, names: Collection[str], holder: Hashable, form: str = ""
    ) -> StoredAdapter[Any] | None:
        """Lease the published adapter of this version, in the engine's `form`, or where empty, as the source has it.

        None unless the adapter is complete, with exactly the files `names`.

        Raises:
            OutOfMemory, SourceUnavailable: as `acquire`.
        """
        with store_errors():
            try:
                digest = self.layout.index(uri, version, form).read_text(errors="replace")
            except FileNotFoundError:
                return None
            if not is_digest(digest) or not self.is_whole(digest, names) or not self._lease(digest, holder):
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
        the files differ from the source's; None where they do not.

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
        except FullDisk:  # others have written meanwhile, or pages or inodes are lacking: make more room and try again
            with store_errors():
                return await find_or_fetch((len(sizes_bytes) + _OWN_PAGES) * _PAGE_BYTES)

    @contextlib.asynccontextmanager
    async def reserve(
        self, needed_bytes: int, directory: Path | None = None, needed_files: int = 0
    ) -> AsyncIterator[None]:
        """Inside, `needed_bytes` and the inodes of `needed_files` have room, which no other fetch takes.

        The name of `directory`, a temporary directory, says to other processes how many bytes are reserved. The
        directory is made on entry and removed on exit; None for one that the caller does not write into.

        Raises:
            OutOfMemory: the bytes do not fit even into an empty store.
            NoFreeSlot: leases are in the way.
        """
        if directory is None:
            directory = self.layout.new_temporary(self.processes.me(), needed_bytes)
        make = partial(self._make_room, needed_bytes, needed_files, directory)
        try:
            await to_its_end(self._relieved(make))
            yield
        finally:
            await asyncio.shield(asyncio.to_thread(discard, directory))  # a second cancellation must leave no files

    def pressed_at(self) -> int:
        """When leases of others last left a fetch without room, in ns of the file system's clock; 0 for never."""
        return touched_ns(self.layout.root / PRESSURE_FILE)

    def acquire(self, digest: str, holder: Hashable = "") -> Path | None:
        """Lease the adapter of `digest` and return its directory; None where files are missing or incomplete.

        Raises:
            OutOfMemory: the disk is full.
            SourceUnavailable: the store cannot be read or written.
        """
        return self._acquire_if(self.is_whole, digest, holder)

    def acquire_sound(self, digest: str, holder: Hashable) -> Path | None:
        """Do as `acquire`, and return None, too, where the bytes differ from the digest.

        For a thread: the check may hash all files.
        """
        return self._acquire_if(lambda digest: self.is_whole(digest) and self.is_sound(digest), digest, holder)

    def share(self, path: str, holder: Hashable) -> bool:
        """Lease the adapter at `path` for `holder` too; False where this process has no lease. Takes microseconds."""
        return self.leases.share(path.rpartition("/")[2], holder)

    def is_leased(self, holder: Hashable, path: Path) -> bool:
        """Whether `holder` has a lease of the adapter at `path`; takes a microsecond."""
        return self.leases.is_held(path.name, holder)

    def release(
        self, holder: Hashable, path: Path | str, *, used_at: float | None = None
    ) -> asyncio.Future[None] | None:
        """End the lease that `holder` has of the adapter at `path`; a holder without a lease is no error.

        The store may remove the adapter once no lease is left. `used_at`, in seconds since 1970, is the adapter's last
        use; None for the time of the last lease, which is later, so that the adapter stays longer.

        Callable from any thread. In the thread of an event loop, another thread removes the lease file, because the
        disk may hang, and the future that is returned is done after the removal. None: the lease has ended already.
        """
        digest, ending = Path(path).name, object()  # `ending` is the lease's holder until a thread has ended the lease
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

    def end_leases(self, leases: Iterable[tuple[str, Hashable, float | None]]) -> None:
        """End leases of this process; each comes as digest, holder, and last use in seconds since 1970."""
        for digest, holder, used_at in leases:
            if used_at is not None:
                with contextlib.suppress(OSError):  # then only the order of eviction is stale
                    os.utime(self.layout.folder("uses") / digest, (used_at, used_at))
                    self.inventory.note_use(digest, used_at)
            self.leases.release(digest, holder)

    def remove(self, digest: str) -> bool:
        """Remove a published adapter unless the adapter is leased; returns whether the adapter is gone."""
        return self.evictor.remove(digest)

    def _try(self) -> None:
        try_file_system(self.layout.new_temporary(self.processes.me()), folder=self.layout.folder("tmp"))

    async def _relieved(self, make: Callable[[], None]) -> None:
        """Make room in a thread; where leases are in the way, end unused leases of this process and try once more.

        Where this is not enough, touch the file `.pressure`: other processes then end their unused leases, and a later
        fetch may find room.
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

    def _make_room(self, needed_bytes: int, needed_files: int, directory: Path | None = None, kept: str = "") -> None:
        """Make room, and the directory whose name announces the bytes, under one lock: the next fetch counts the bytes.

        The adapter `kept` is not removed; empty for none.
        """
        with self.leases.guard("room"):  # no digest begins so: the lock is only for making room
            sweep_temporaries(self.layout, self.processes)
            self.evictor.make_room(needed_bytes, self.max_bytes, needed_files, own=directory, kept=kept)
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
        """Check a complete download, put it into the store under its digest, and lease it."""
        arrived, files = _checked(wanted, download, check)
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
        (self.layout.folder("uses") / digest).touch()
        # A damaged copy that has the adapter's place goes there.
        damaged = self.layout.new_temporary(self.processes.me())
        try:
            with self.leases.guard(digest):  # lease before another fetch removes the adapter to make room
                self.put_in_place(download.directory, digest, damaged)
                self.leases.acquire_guarded(digest, holder)
        finally:
            discard(damaged)
        return StoredAdapter(digest, self.layout.adapter(digest), arrived)

    def _acquire_if(self, is_right: Callable[[str], bool], digest: str, holder: Hashable) -> Path | None:
        """Lease an adapter if `is_right(digest)`, which runs under the lease: the adapter must not go meanwhile."""
        with store_errors():
            if not self._lease(digest, holder):
                return None
            is_kept = False
            try:
                is_kept = is_right(digest)
            finally:
                if not is_kept:
                    self.leases.release(digest, holder)
            return self.layout.adapter(digest) if is_kept else None

    def _lease(self, digest: str, holder: Hashable) -> bool:
        """Lease an adapter and note its use now; False where the adapter is not in the store."""
        try:
            with store_errors():
                is_leased = self.leases.acquire(digest, holder)
        except FullDisk:  # the file of a lease needs an inode
            self._make_room(needed_bytes=0, needed_files=0, kept=digest)
            is_leased = self.leases.acquire(digest, holder)
        if not is_leased:
            return False
        with contextlib.suppress(OSError):  # then only the order of eviction is stale
            (self.layout.folder("uses") / digest).touch()
        return True


def open_store(settings: Settings) -> Store:
    """The store below `LORA_PLUGINS_STORE_DIR`.

    Raises:
        InvalidSettings: the store cannot be made or written, is another user's, or its file system has no working
            locks.
    """
    try:
        return Store(settings.store_dir, max_bytes=settings.store_max_bytes, fetch_timeout_s=settings.fetch_timeout_s)
    except OSError as error:
        raise InvalidSettings(
            f"a store below {settings.store_dir} that answers '{error.strerror or type(error).__name__}'",
            expected="a directory that can be written",
            remedy="free space or inodes there, by hand if need be: each directory named by a digest is an adapter"
            if error.errno in FULL
            else "set LORA_PLUGINS_STORE_DIR to this user's, or share it by a group: lora-plugins explain L007",
        ) from error


def _checked(
    wanted: DownloadSpec, download: PartialDownload, check: Callable[[Path], _T]
) -> tuple[_T, tuple[StoredFile, ...]]:
    """Return the result of `check`, and the files with their digests; the files are then durable.

    Raises:
        SourceUnavailable: sizes or digests differ from those that the source promised.
        Anything that `check` raises.
    """
    # Hashing, verifying and writing to the disk use different resources, so they run at the same time.
    syncing = start_syncing([download.directory / name for name, _, _ in wanted.promised])
    download.complete()
    try:
        arrived = check(download.directory)
    finally:
        wait(syncing)  # before any error rises: a sync must not meet a directory that `reserve` removes
        files = download.finish()
        # Also after an error of `check`: bytes other than promised are the cause then, and the error to raise.
        _check_promised(files, wanted)
    for synced in syncing:
        synced.result()
    return arrived, files


def _check_promised(files: Sequence[StoredFile], wanted: DownloadSpec) -> None:
    for file, (name, size_bytes, sha256) in zip(files, wanted.promised, strict=True):
        if file.size_bytes != size_bytes or (sha256 and file.sha256 != sha256):
            raise SourceUnavailable(
                f"{file.size_bytes} bytes with SHA-256 {file.sha256[:12]}…, which is not what the source promised",
                expected=f"{size_bytes} bytes" + (f" with SHA-256 {sha256[:12]}…" if sha256 else ""),
                remedy="ask again; if it stays so, upload the adapter again",
                file=name,
            )
