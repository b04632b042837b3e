"""Remember which entries this process has hashed, by the identity of their files, to hash no entry twice."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

_REMEMBERED = 20_000


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The identity of one file; a write or a replacement changes the identity."""

    name: str
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @property
    def content(self) -> tuple[str, int, int, int]:
        """The identity without `ctime_ns`, which a hard link or a change of mode changes without new content."""
        return self.name, self.inode, self.size_bytes, self.mtime_ns


Identity = tuple[FileIdentity, ...]


def identity_of(directory: Path) -> Identity | None:
    """The identities of all files in a directory; None where the directory cannot be read."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append(
                        FileIdentity(entry.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                    )
    except OSError:
        return None
    return tuple(sorted(found, key=lambda file: file.name))


class HashedEntries:
    """The last 20,000 entries whose files matched their digests. Callable from any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[Identity, float]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, digest: str, identity: Identity | None) -> None:
        """Remember that the files `identity` have the bytes of `digest`, as of now."""
        if identity is None:
            return
        with self._lock:
            self._known[digest] = identity, time.monotonic()
            self._known.move_to_end(digest)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    def forget(self, digest: str) -> None:
        """Have the entry hashed again at the next question."""
        with self._lock:
            self._known.pop(digest, None)

    def has(self, digest: str, identity: Identity | None, max_age_s: float) -> bool:
        """Whether exactly these files were hashed, at most `max_age_s` ago."""
        known = self._known.get(digest)
        return known is not None and known[0] == identity and time.monotonic() - known[1] <= max_age_s

    def differs(self, digest: str, identity: Identity | None) -> bool:
        """Whether the directory now has other files, or other contents, than the hashed files."""
        known = self._known.get(digest)
        if known is None or identity is None:
            return False
        return [file.content for file in known[0]] != [file.content for file in identity]
