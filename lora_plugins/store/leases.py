"""Who may still read an adapter: one empty file per adapter and process, worth nothing once the process is dead."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from filelock import FileLock

from lora_plugins.store.layout import Layout, is_digest
from lora_plugins.store.processes import Processes


class Leases:
    """Leases of all processes that share the store."""

    def __init__(self, layout: Layout, processes: Processes) -> None:
        self._layout = layout
        self._processes = processes

    def guard(self, digest: str) -> FileLock:
        """Held for moments by whoever leases or removes an adapter, so that neither overtakes the other."""
        # A fixed number of files, however many adapters come and go.
        return FileLock(self._layout.folder("locks") / f"{digest[:2]}.guard", timeout=30)

    def acquire(self, digest: str) -> bool:
        """Lease an adapter for this process; False where it is not there (any more)."""
        with self.guard(digest):
            return self.acquire_guarded(digest)

    def acquire_guarded(self, digest: str) -> bool:
        """As `acquire`, for whoever holds the guard."""
        if not self._layout.adapter(digest).is_dir():
            return False
        folder = self._folder(digest)
        folder.mkdir(exist_ok=True)
        (folder / self._processes.me()).touch()
        return True

    def release(self, digest: str) -> None:
        """End this process's lease; without one, nothing happens."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder(digest) / self._processes.me())

    def holders(self, digest: str) -> list[str]:
        """The living processes that lease an adapter; one that cannot be judged counts as living."""
        try:
            names = os.listdir(self._folder(digest))
        except FileNotFoundError:
            return []
        return [name for name in names if self._may_live(name)]

    def sweep(self) -> None:
        """Forget the leases of the dead."""
        for digest in filter(is_digest, os.listdir(self._layout.folder("leases"))):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another process removes it
                for name in os.listdir(self._folder(digest)):
                    if not self._may_live(name):
                        os.unlink(self._folder(digest) / name)

    def _may_live(self, process: str) -> bool:
        try:
            return self._processes.is_alive(process)
        except OSError:  # a store that may only be read has no clock
            return True

    def _folder(self, digest: str) -> Path:
        return self._layout.folder("leases") / digest
