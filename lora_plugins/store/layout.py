"""Paths below the store's root, names of temporary files, and how files are written and made durable.

Used by every process that shares the store. `Layout` says where a file is; the functions below write, sync and remove
files so that a process killed at any moment, or a power cut, leaves a whole file or none.

```
<root>/<digest>/                an adapter: its files and manifest.json; immutable once there
<root>/.index/<key>             which digest a version of a source is
<root>/.tmp/<process>.<n>.<bytes>  temporary: owner, random, room it will need; swept when its owner is dead
<root>/.locks/<key>.fetch       file lock of the fetch of a version, touched meanwhile
<root>/.locks/<xx>.guard        file locks, held for moments
<root>/.leases/<digest>/        one empty file for each process whose engine may read the adapter
<root>/.processes/<process>     heartbeat of each process that uses the store
<root>/.uses/<digest>           its modification time is the adapter's last use
<root>/.damaged/<digest>        set by `verify`: to be fetched again, and the first to go
<root>/.replaced/<digest>       a byte for each copy of the digest that was found damaged
<root>/.served/<key>.<key>.json  what a replica of one base model served last; touched while the replica lives
<root>/.blocked/<key>.json      a name that every server refuses until it is loaded again
<root>/.pressure                touched where a fetch found no room for leases of other processes
<root>/.sizes                   what processes have read of entries' sizes, by digest
<root>/.models/<key>.json       which modules the engine of one base model has
```
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.adapter.names import HEXADECIMAL, is_prefix
from lora_plugins.store.durable_files import discard_again, sync_directory, write_small
from lora_plugins.store.file_system import check_owners, make_root
from lora_plugins.store.processes import this_process

MANIFEST_FILE = "manifest.json"
PRESSURE_FILE = ".pressure"
SIZES_FILE = ".sizes"
_AFTER_ALL_DIGITS = "g"
_SETTLED_NS = 2_000_000_000  # clock ticks of file systems reach 2 s (FAT): two changes may have one time
_FOLDERS = ("index", "tmp", "locks", "leases", "processes", "uses", "damaged", "replaced", "served", "blocked")
_MADE_AGAIN = tuple(name for name in _FOLDERS if name != "blocked")  # an empty `.blocked` would end all blocks


@dataclass(frozen=True, slots=True)
class Temporary:
    """A file or directory in `.tmp`: the process that owns the path, and the bytes that the process will need."""

    path: Path
    process: str
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below one root."""

    root: Path

    def create(self) -> None:
        """Make root and folders, after a check that nobody else owns the path to the root.

        Raises:
            InvalidSettings: others could exchange the store.
            OSError: a folder cannot be made.
        """
        check_owners(self.root)
        made = [path for path in (self.root, *self.root.parents) if not path.is_dir()]
        if made:
            make_root(self.root)
        for name in _FOLDERS:
            self.folder(name).mkdir(exist_ok=True)
        for path in made:
            # In a folder of others this user may perhaps make files, and read no names.
            with contextlib.suppress(OSError):
                sync_directory(path.parent)

    def make_again(self) -> list[str]:
        """Make the folders that somebody (say a cleaner of old files) has removed; returns the names made.

        What `discard` could not remove before goes now.

        Raises:
            FileNotFoundError: no folder is there: the store is away, and the next mount would hide a folder made now.
        """
        missing = [name for name in _MADE_AGAIN if not self.folder(name).is_dir()]
        if len(missing) == len(_MADE_AGAIN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))
        for name in missing:
            self.folder(name).mkdir(exist_ok=True)
        discard_again()
        return missing

    def folder(self, name: str) -> Path:
        """One of the folders that are not adapters."""
        return self.root / f".{name}"

    def adapter(self, digest: str) -> Path:
        """The directory that an engine reads."""
        return self.root / digest

    def digest_of(self, path: str) -> str | None:
        """The digest of the adapter whose directory `path` is or was; None for other paths."""
        folder, _, name = path.rpartition("/")
        if not is_digest(name):
            return None
        while folder.endswith("/."):  # see `Store.engine_path`
            folder = folder.removesuffix("/.")
        return name if folder == str(self.root) else None

    def digests(self, prefix: str = "") -> list[str]:
        return sorted(name for name in os.listdir(self.root) if name.startswith(prefix) and is_digest(name))

    def new_temporary(self, process: str, needed_bytes: int = 0) -> Path:
        """A new path on the store's file system, for one process, which needs `needed_bytes` of room for it.

        The path says both, so that other processes leave the room and know the owner (`temporaries`).
        """
        return self.folder("tmp") / f"{process}.{os.urandom(6).hex()}.{needed_bytes}"

    def temporaries(self) -> list[Temporary]:
        """The entries of `.tmp`; an entry with a foreign name has no owner and needs no bytes."""
        found = []
        for entry in os.scandir(self.folder("tmp")):
            process, *rest = entry.name.rsplit(".", 2)
            size = rest[-1] if len(rest) == 2 else ""
            needed_bytes = int(size) if size.isdecimal() else 0
            found.append(Temporary(Path(entry.path), process, needed_bytes))
        return found

    def index(self, uri: str, version: str, form: str) -> Path:
        """The file with the digest of a version of a source, as the source has the files or in an engine's form."""
        return self.folder("index") / key_of(uri, version, *filter(None, [form]))


class Published:
    """The digests in a store's root by their beginnings; the root is listed again only once the root has changed."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._listed: tuple[int, list[str]] = (-1, [])  # the root's time of change in ns, and its digests at the time

    def matching(self, prefix: str) -> list[str]:
        """The published adapters whose digests begin with `prefix`; none where `is_prefix` is false.

        Raises:
            OSError: the root cannot be read.
        """
        if not is_prefix(prefix):
            return []
        changed_ns = os.stat(self._layout.root).st_mtime_ns  # raises where the store is away
        if is_digest(prefix):
            return [prefix] if self._layout.adapter(prefix).is_dir() else []
        listed_ns, digests = self._listed
        if changed_ns != listed_ns:
            if time.time_ns() - changed_ns <= _SETTLED_NS:
                return self._layout.digests(prefix)  # half the time of a full listing, which could not be kept yet
            digests = self._layout.digests()
            self._listed = changed_ns, digests
        return digests[bisect_left(digests, prefix) : bisect_left(digests, prefix + _AFTER_ALL_DIGITS)]


def files_bytes(directory: Path | str) -> int:
    """The bytes of the files in a directory; raises OSError where the directory goes meanwhile."""
    return sum(entry.stat().st_size for entry in os.scandir(directory))


def is_digest(name: str) -> bool:
    """Whether a directory's name is that of a published adapter."""
    return len(name) == 64 and HEXADECIMAL.issuperset(name)


def key_of(*parts: str) -> str:
    """A file name for any texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def replace_small(path: Path, *pieces: str) -> None:
    """Replace a file in one of the store's folders, which is made if the root is there; survives a power cut.

    Adapters published before survive too: the file may name them.

    Raises:
        OSError: the file cannot be written; the earlier file stays, unless only the last sync has failed.
    """
    layout = Layout(path.parent.parent)
    temporary = layout.new_temporary(this_process())
    for folder in (path.parent, temporary.parent):
        folder.mkdir(exist_ok=True)
    sync_directory(layout.root)
    write_small(path, pieces, temporary)
    sync_directory(path.parent)


def append_small(path: Path, text: bytes) -> None:
    """Append to a file that `replace_small` has written; both of its promises about a power cut hold.

    Raises:
        OSError: the file cannot be written, or is gone; it may end with a part of the text.
    """
    sync_directory(path.parent.parent)
    with path.open("r+b") as file:  # `a` would make a file without the text before
        file.seek(0, os.SEEK_END)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
