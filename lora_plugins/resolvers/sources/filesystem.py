"""The source of adapters in a directory tree: `team/sql` is `<root>/team/sql`, `team/sql@v3` is `<root>/team/sql@v3`.

Called on the event loop of an API server; all file I/O runs in threads of the source's own, under a deadline, because a
mount may hang. `locate` finds an adapter's files with their sizes and times, `fetch` copies the files into the store's
directory, and `names` lists the tree.

Engines read a snapshot in the store, so that overwriting or deleting the source neither changes nor breaks a served
adapter. The snapshot is a reflink where the file system can (Btrfs, XFS: no bytes are copied) and a copy elsewhere.
Hard links are not used: a write to the source file would write into the snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from lora_plugins.absence import Absence
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.files import ABSENT, map_os_error
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import AdapterNotFound, InvalidSettings, LoRAPluginsError, SourceUnavailable, describing
from lora_plugins.resolvers.sources.retries import deadline, look_up_timeout_s
from lora_plugins.resolvers.sources.source import Listing, RemoteAdapter, SourceFile, VersionChanged, version_of
from lora_plugins.resolvers.sources.threads import OwnThreads
from lora_plugins.resolvers.sources.tree import AdapterTree, LeadsElsewhere, MayLead, anywhere
from lora_plugins.settings import Settings
from lora_plugins.store.disk_errors import FULL
from lora_plugins.store.partial_download import PartialDownload

_THREADS = 8
_PIECE_BYTES = 8 << 20  # each piece counts as progress of a slow mount
# Errors of the kernel where it cannot copy between two files by itself.
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM})
_GRAIN_NS = 20_000_000  # twice a tick of the slowest kernel
_COARSE_GRAIN_NS = 2_000_000_000  # FAT has 2 s, older NFS servers have 1 s
_LOOKS = 5  # at a file that a writer keeps changing


def configured(settings: Settings, may_lead: MayLead) -> FilesystemSource:
    """The source of `VLLM_LORA_RESOLVER_CACHE_DIR`; `may_lead` as of `FilesystemSource`.

    Raises:
        InvalidSettings: the path is no directory.
    """
    root = settings.filesystem_root
    if root is None or not root.is_dir():
        raise InvalidSettings(
            f"VLLM_LORA_RESOLVER_CACHE_DIR={str(root)!r}, which is no directory",
            expected="a directory of adapters",
            remedy="create it or correct the variable",
        )
    return FilesystemSource(root, may_lead=may_lead, link_roots=settings.link_roots, timeout_s=settings.fetch_timeout_s)


class FilesystemSource:
    """Adapters below one directory, in the layout of vLLM's `VLLM_LORA_RESOLVER_CACHE_DIR`.

    A directory with any file of an adapter is an adapter; a directory without (a folder of adapters) is none.
    """

    label = "filesystem"
    remote = False

    def __init__(
        self,
        root: Path,
        *,
        may_lead: MayLead = anywhere,
        link_roots: Sequence[Path] = (),
        variable: str = "VLLM_LORA_RESOLVER_CACHE_DIR",
        timeout_s: float = 300.0,
    ) -> None:
        """Make the source.

        Args:
            root: the directory below which names are paths.
            may_lead: whether a link may make the adapter at a path below the root the adapter of a name.
            link_roots: as `LORA_PLUGINS_LINK_ROOTS`; for `may_lead`, a path below these is as one below the root.
            variable: the setting that names `root`.
            timeout_s: as `LORA_PLUGINS_FETCH_TIMEOUT_S`.
        """
        self.root = root
        self._variable = variable
        self._timeout_s, self._locate_timeout_s = timeout_s, look_up_timeout_s(timeout_s)
        self._tree = AdapterTree(root, may_lead, link_roots)
        # Of this source alone: a hanging mount would take all threads of a shared pool.
        self._threads = OwnThreads("lora-plugins-filesystem", _THREADS)

    def __str__(self) -> str:
        return f"{self.label} ({self.root})"

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:  # noqa: ARG002
        with describing(place=str(self.root / str(name))):
            async with deadline(self._locate_timeout_s, f"an answer of the file system with {self._variable}"):
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._locate, name)

    async def fetch(self, adapter: RemoteAdapter, download: PartialDownload) -> None:
        """Copy the located files; see `Source` for what is raised."""
        stop, loop = threading.Event(), asyncio.get_running_loop()
        with describing(place=str(self.root / str(adapter.name))):
            try:
                async with deadline(self._timeout_s, f"an answer of the file system with {self._variable}") as state:
                    progressed = state.progressed_in_thread()
                    await loop.run_in_executor(self._threads, self._fetch, adapter, download, stop, progressed)
            finally:
                stop.set()  # a hanging thread cannot be ended

    async def names(self, base_model_name: str) -> Listing:  # noqa: ARG002
        """Every directory below the root with a configuration; symlinks to directories are not looked into.

        Raises:
            SourceUnavailable: the root is gone.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._names)

    def _names(self) -> Listing:
        self._check_root()
        names: list[str] = []
        gaps: list[str] = []

        def note(error: OSError) -> None:
            gaps.append(f"{error.filename}: {error.strerror}")

        for folder, below, files in os.walk(self.root, onerror=note):
            # Hidden folders are no adapters, and os.walk does not enter folders removed from `below`.
            below[:] = [name for name in below if not name.startswith(".")]
            links = [path for name in below if os.path.islink(path := os.path.join(folder, name))]
            found = [path for path in links if os.path.lexists(os.path.join(path, CONFIG_FILE))]
            if CONFIG_FILE in files and folder != str(self.root):
                found.append(folder)
            for path in found:
                with contextlib.suppress(AdapterNotFound):  # no request can name the directory
                    name = AdapterName.parse(os.path.relpath(path, self.root))
                    if self._tree.may_serve(name):
                        names.append(str(name))
        return Listing(tuple(sorted(names)), tuple(gaps))

    def _absent(self, directory: Path, detail: str, *, was_asked: bool = True) -> Absence:
        return Absence(self.label, str(directory.absolute()), detail, was_asked=was_asked)

    def _locate(self, name: AdapterName) -> RemoteAdapter | Absence:
        directory = self.root / str(name)
        if name.revision is not None and "/" in name.revision:
            detail = "a revision with a slash, which is no directory's name"
            return self._absent(directory, detail, was_asked=False)
        try:
            present = self._tree.present(name)
            files = tuple(self._describe(name, file) for file in present or ())
            cause = self._tree.foreign(name) if present == [] else None
        except LeadsElsewhere as error:
            return self._absent(directory, error.found)
        except LoRAPluginsError:
            raise
        except OSError as error:
            # First rule out that the whole root is gone, as after a lost mount.
            if error.errno in ABSENT:
                self._check_root()
                return self._absent(directory, "no such directory")
            raise map_os_error(error) from error
        if present is None:
            return self._absent(directory, "a file, not a directory")
        if not present:
            absent = self._absent(directory, "a directory without adapter files")
            return absent if cause is None else replace(absent, detail=cause.found, hint=cause.remedy, cause=cause)
        return RemoteAdapter(name, self.label, directory.absolute().as_uri(), version_of(files), files)

    def _describe(self, name: AdapterName, file: str) -> SourceFile:
        # Open first: for a file that is not open, NFS may answer from a cache of seconds ago.
        with self._tree.opened(name, file) as opened:
            status = os.fstat(opened.fileno())
            return SourceFile(file, status.st_size, _etag(status))

    def _fetch(
        self, adapter: RemoteAdapter, download: PartialDownload, stop: threading.Event, progressed: Callable[[], object]
    ) -> None:
        """Copy until `stop` is set, when no caller waits any more."""
        try:
            # The largest first: meanwhile the last that was written settles.
            for file in sorted(adapter.files, key=lambda file: -file.size_bytes):
                if stop.is_set():
                    return
                try:
                    self._fetch_file(adapter.name, file, download, stop, progressed)
                # `locate` has seen the file, so the adapter has changed.
                except AdapterNotFound as error:
                    self._check_root()
                    raise VersionChanged(
                        "a file that is gone", expected="the located one", remedy="ask again", file=file.name
                    ) from error
        finally:
            if stop.is_set():
                # The caller gave the directory up while this thread hung; the thread may have put a file there since.
                shutil.rmtree(download.directory, ignore_errors=True)

    def _fetch_file(
        self,
        name: AdapterName,
        file: SourceFile,
        download: PartialDownload,
        stop: threading.Event,
        progressed: Callable[[], object],
    ) -> None:
        full: OSError | None = None
        # The target opens outside: the store explains errors of its own files, and a full disk.
        with (download.directory / file.name).open("wb") as target, self._tree.opened(name, file.name) as source:
            _settle(source)
            _check_unchanged(source, file)
            try:
                for done in copied(source, target, file.size_bytes):
                    if stop.is_set():
                        return
                    download.landed(file.name, done)
                    progressed()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                full = error
            _check_unchanged(source, file)
        if full is not None:
            raise full

    def _check_root(self) -> None:
        """Raise where the root is gone: a lost mount does not show that an adapter does not exist."""
        if not os.path.isdir(self.root):
            found, expected = f"no directory at '{self.root}'", f"the adapter root {self._variable}"
            raise SourceUnavailable(found, expected=expected, remedy="mount or create it")


def copied(source: BinaryIO, target: BinaryIO, size_bytes: int) -> Iterator[int]:
    """Copy inside the kernel, as a reflink where it can; yields the bytes done.

    Up to the located size, not to the end: a file that grows as fast as the copy has no end.
    """
    done = 0
    kernel = True
    while done < size_bytes:
        if kernel:
            try:
                count = os.copy_file_range(
                    source.fileno(), target.fileno(), min(_PIECE_BYTES, size_bytes - done), done, done
                )
            except OSError as error:
                # Fall back only before the first byte: a later error is an error of the disk.
                if error.errno not in _NO_KERNEL_COPY or done:
                    raise
                kernel = False
                continue
        else:
            piece = os.pread(source.fileno(), min(1 << 20, size_bytes - done), done)
            count = os.pwrite(target.fileno(), piece, done) if piece else 0
        if not count:
            return
        done += count
        yield done


def _settle(opened: BinaryIO) -> None:
    """Wait until any further write to a file must change the file's times.

    File systems store times in grains: a later write in the same grain, of the same size, would leave the status
    unchanged, and nobody would ever notice the write (git calls such files racily clean).
    """
    for _ in range(_LOOKS):
        ctime_ns = os.fstat(opened.fileno()).st_ctime_ns
        grain_ns = _GRAIN_NS if ctime_ns % 1_000_000_000 else _COARSE_GRAIN_NS
        wait_ns = ctime_ns + grain_ns - time.time_ns()
        if not 0 < wait_ns <= grain_ns:
            break
        time.sleep(wait_ns / 1e9)


def _etag(status: os.stat_result) -> str:
    """A text that changes whenever the file is written, replaced or touched."""
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"


def _check_unchanged(source: BinaryIO, file: SourceFile) -> None:
    if _etag(os.fstat(source.fileno())) != file.etag:
        raise VersionChanged(
            "a file that is being written",
            expected="a complete adapter",
            remedy="publish adapters by renaming a complete directory into place",
            file=file.name,
        )
