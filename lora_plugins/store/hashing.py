"""Digests of files while a download writes the files: threads hash the bytes on disk."""

from __future__ import annotations

import hashlib
import sys
import threading
from pathlib import Path
from typing import BinaryIO, Protocol

from lora_plugins.store.threads import store_threads

# Small enough for a core's own cache: reads of 1 MiB at a time take five times as long.
_PIECE_BYTES = 1 << 18


class Digest(Protocol):
    """A digest as `hashlib` has them."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes."""
        ...

    def hexdigest(self) -> str:
        """The digest of the bytes so far, in hexadecimal."""
        ...


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

    def landed(self, size_bytes: int) -> None:
        """Report that the first `size_bytes` of the file are on disk."""
        with self._changed:
            self._landed = max(self._landed, size_bytes)
            self._go_on()

    def complete(self) -> None:
        """Report that the file is complete; the rest is hashed meanwhile."""
        with self._changed:
            self._landed = sys.maxsize
            self._go_on()

    def finish(self) -> tuple[int, str]:
        """Report that the file is complete; returns its size in bytes and its digest, in hexadecimal.

        Raises:
            OSError: the file could not be read.
        """
        self.complete()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        if self._error is not None:
            raise self._error
        return self._size_bytes, self._digest.hexdigest()

    def abandon(self) -> None:
        """Stop hashing: nobody needs the digest any more."""
        with self._changed:
            self._abandoned = True
            self._changed.wait_for(lambda: not self._running)

    def _go_on(self) -> None:
        if not self._running and self._landed > self._followed and self._error is None and not self._abandoned:
            self._running = True
            self._followed = self._landed
            store_threads().submit(self._follow)

    def _follow(self) -> None:
        try:
            with self._path.open("rb", buffering=0) as file:
                self._hash_to(self._followed, file)
        except OSError as error:
            self._error = error
        finally:
            with self._changed:
                self._running = False
                self._go_on()  # bytes may have landed since `_followed` was set
                self._changed.notify_all()

    def _hash_to(self, end: int, file: BinaryIO) -> None:
        file.seek(self._size_bytes)
        view = memoryview(bytearray(_PIECE_BYTES))
        while self._size_bytes < end and not self._abandoned:
            count = file.readinto(view[: min(_PIECE_BYTES, end - self._size_bytes)])  # type: ignore[attr-defined]
            if not count:
                return  # the file has ended: complete, or shorter than reported
            self._digest.update(view[:count])
            self._size_bytes += count


def sha256_of(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file that is complete."""
    return GrowingFile(path).finish()
