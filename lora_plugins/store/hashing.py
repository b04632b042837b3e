"""SHA-256 of files while they are written: a thread follows what is on disk, so that nothing is read twice."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

# Small enough to stay in a core's own cache: in pieces of 1 MiB, reading takes five times as long.
_PIECE_BYTES = 1 << 18


class GrowingFile:
    """Hashes a file from its start as its contiguous beginning grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._landed = 0
        self._complete = False
        self._abandoned = False
        self._changed = threading.Condition()
        self._sha256 = ""
        self._size_bytes = 0
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True, name="lora-plugins-sha256")
        self._thread.start()

    def landed(self, size_bytes: int) -> None:
        """Report that the first `size_bytes` of the file are on disk."""
        with self._changed:
            self._landed = max(self._landed, size_bytes)
            self._changed.notify()

    def finish(self) -> tuple[int, str]:
        """Report that the file is complete; returns its size in bytes and its SHA-256.

        Raises:
            OSError: the file could not be read.
        """
        with self._changed:
            self._complete = True
            self._changed.notify()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._size_bytes, self._sha256

    def abandon(self) -> None:
        """End the thread: nobody wants to know any more."""
        with self._changed:
            self._abandoned = True
            self._changed.notify()
        self._thread.join()

    def _follow(self) -> None:
        digest = hashlib.sha256()
        view = memoryview(bytearray(_PIECE_BYTES))
        try:
            while True:
                ready, complete = self._wait_for_more()
                if self._abandoned:
                    return
                with self._path.open("rb", buffering=0) as file:
                    file.seek(self._size_bytes)
                    while not self._abandoned and (complete or self._size_bytes < ready):
                        limit = _PIECE_BYTES if complete else min(_PIECE_BYTES, ready - self._size_bytes)
                        count = file.readinto(view[:limit])
                        if not count:
                            break
                        digest.update(view[:count])
                        self._size_bytes += count
                if complete:
                    break
        except OSError as error:
            self._error = error
        self._sha256 = digest.hexdigest()

    def _wait_for_more(self) -> tuple[int, bool]:
        with self._changed:
            self._changed.wait_for(lambda: self._complete or self._abandoned or self._landed > self._size_bytes)
            return self._landed, self._complete


def sha256_of(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file that is complete."""
    return GrowingFile(path).finish()
