"""Where things lie below the store's root, and the one way in which small files are written.

```
<root>/<digest>/                an adapter: its files and manifest.json; immutable once there
<root>/.index/<key>             which digest a version of a source is
<root>/.tmp/<process>.<n>.<bytes>  on its way in, with the room it needs; swept when its process is dead
<root>/.locks/                  who fetches what, and short guards
<root>/.leases/<digest>/        one empty file for each process whose engine may read the adapter
<root>/.processes/<process>     heartbeat of each process that uses the store
<root>/.uses/<digest>           its modification time is the adapter's last use
<root>/.damaged/<digest>        set by `verify`: to be fetched anew
<root>/.quarantine/             what was damaged
<root>/.served/<key>.json       what servers of one base model served last
```
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

MANIFEST_FILE = "manifest.json"
_FOLDERS = ("index", "tmp", "locks", "leases", "processes", "uses", "damaged", "quarantine", "served")


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below one root."""

    root: Path

    def create(self) -> None:
        """Make the folders; raises OSError where that is not possible."""
        for name in _FOLDERS:
            self.folder(name).mkdir(parents=True, exist_ok=True)

    def folder(self, name: str) -> Path:
        """One of the folders that are not adapters."""
        return self.root / f".{name}"

    def adapter(self, digest: str) -> Path:
        """The directory that an engine reads."""
        return self.root / digest

    def digests(self) -> list[str]:
        """All adapters that are published."""
        return sorted(entry.name for entry in os.scandir(self.root) if is_digest(entry.name))


def is_digest(name: str) -> bool:
    """Whether a directory's name is that of a published adapter."""
    return len(name) == 64 and all(character in "0123456789abcdef" for character in name)


def key_of(*parts: str) -> str:
    """A file name for any texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def write_small(path: Path, text: str, *, scratch: Path) -> None:
    """Write a whole file or nothing; `scratch` is a path on the same file system that nobody else uses."""
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
