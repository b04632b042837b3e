"""Digests of files while a download writes the files, and which entries of the store this process has hashed.

Runs in threads of the processes that fetch and serve. A source reports how much of a file is on disk; the size and the
SHA-256 come out once the file is complete. An entry of the store is known by the identity of its files (inode, size,
times), so that unchanged files are hashed once.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple, Protocol

from cachetools import LRUCache

from lora_plugins.store.durable_files import store_threads

# Small enough for a core's own cache: reads of 1 MiB at a time take five times as long.
_PIECE_BYTES = 1 << 18
_REMEMBERED = 20_000  # entries


class Digest(Protocol):
    """A digest as `hashlib` has them."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class GrowingFile:
    """Hashes a file from its start as its contiguous beginning grows, in one thread of `store_threads` at a time.

    The digest is SHA-256, unless `digest` is another.
    """

    def __init__(self, path: Path, digest: Digest | None = None) -> None:
        self._path = path
        self._landed = 0
        self._followed = 0
        self._abandoned = False
        self._running = False
        self._changed = threading.Condition()
        self._digest: Digest = hashlib.sha256() if digest is None else digest
        self._size_bytes = 0
        self._error: OSError | None = None

    def landed(self, size_bytes: int = sys.maxsize) -> None:
        """Report that the first `size_bytes` of the file are on disk; without a number, the whole file."""
        with self._changed:
            self._landed = max(self._landed, size_bytes)
            self._go_on()

    def finish(self) -> tuple[int, str]:
        """Report that the file is complete; returns its size in bytes and its digest, in hexadecimal.

        Raises:
            OSError: the file could not be read.
        """
        self.landed()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        if self._error is not None:
            raise self._error
        return self._size_bytes, self._digest.hexdigest()

    def abandon(self) -> None:
        """Stop hashing, as nobody needs the digest any more; returns once no thread reads the file."""
        with self._changed:
            self._abandoned = True
            self._changed.wait_for(lambda: not self._running)

    def _go_on(self) -> None:
        if not self._running and self._landed > self._followed and self._error is None and not self._abandoned:
            self._running = True
            # One task at a time, up to what has landed by now; `_follow` starts the next task for what lands meanwhile.
            self._followed = self._landed
            store_threads().submit(self._follow)

    def _follow(self) -> None:
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(self._size_bytes)
                view = memoryview(bytearray(_PIECE_BYTES))
                while self._size_bytes < self._followed and not self._abandoned:
                    count = file.readinto(view[: min(_PIECE_BYTES, self._followed - self._size_bytes)])
                    if not count:
                        break  # the file has ended: complete, or shorter than reported
                    self._digest.update(view[:count])
                    self._size_bytes += count
        except OSError as error:
            self._error = error
        finally:
            with self._changed:
                self._running = False
                self._go_on()  # bytes may have landed since `_followed` was set
                self._changed.notify_all()


def sha256_of(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file that is complete."""
    return GrowingFile(path).finish()


class FileIdentity(NamedTuple):
    """The identity of one file; a write or a replacement changes the identity.

    A hard link or a change of mode changes only `ctime_ns`.
    """

    name: str
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


Identity = tuple[FileIdentity, ...]


def identity_of(directory: Path) -> Identity | None:
    """The identities of all files in a directory; None where the directory cannot be read."""
    found: list[FileIdentity] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    found += identity_of(Path(entry.path)) or ()
                elif stat.S_ISREG(status.st_mode):
                    found.append(
                        FileIdentity(entry.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                    )
    except OSError:
        return None
    return tuple(sorted(found))


class HashedEntries:
    """The last 20,000 entries whose files matched their digests. Callable from any thread."""

    def __init__(self) -> None:
        self._known: LRUCache[str, tuple[Identity, float]] = LRUCache(_REMEMBERED)
        self._lock = threading.Lock()

    def note(self, digest: str, identity: Identity | None) -> None:
        """Remember that the files `identity` have the bytes of `digest`, as of now."""
        if identity is None:
            return
        with self._lock:
            self._known[digest] = identity, time.monotonic()

    def forget(self, digest: str) -> None:
        """Have the entry hashed again at the next question."""
        with self._lock:
            self._known.pop(digest, None)

    def has(self, digest: str, identity: Identity | None, max_age_s: float) -> bool:
        """Whether exactly these files were hashed, at most `max_age_s` ago."""
        with self._lock:  # a look changes the order
            known = self._known.get(digest)
        return known is not None and known[0] == identity and time.monotonic() - known[1] <= max_age_s

    def differs(self, digest: str, identity: Identity | None) -> bool:
        """Whether the directory now has other files, or other contents, than the hashed files."""
        with self._lock:
            known = self._known.get(digest)
        if known is None or identity is None:
            return False
        return [file._replace(ctime_ns=0) for file in known[0]] != [file._replace(ctime_ns=0) for file in identity]
