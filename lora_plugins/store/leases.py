"""Who may still read an adapter: one empty file per adapter and process, worth nothing once the process is dead.

Inside a process several holders (the names it is served under) may share that file; it goes with the last of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Hashable
from pathlib import Path

from filelock import FileLock

from lora_plugins.store.layout import Layout, is_digest
from lora_plugins.store.processes import Processes


class Leases:
    """Leases of all processes that share the store."""

    def __init__(self, layout: Layout, processes: Processes) -> None:
        self._layout = layout
        self._processes = processes
        self._holders: dict[str, set[Hashable]] = {}  # of this process, by digest
        self._leased: set[str] = set()  # those whose file others see
        self._ended: set[str] = set()  # without a holder here, and perhaps with our file still
        self._lock = threading.Lock()

    def guard(self, digest: str) -> FileLock:
        """Held for moments by whoever leases or removes an adapter, so that neither overtakes the other.

        Raises:
            FileNotFoundError: the store is not there.
        """
        self.make_again()  # FileLock would make the folder of locks, in the place of a store that is away
        # A fixed number of files, however many adapters come and go.
        return FileLock(self._layout.folder("locks") / f"{digest[:2]}.guard", timeout=30)

    def make_again(self) -> None:
        """As `Layout.make_again`; leases that were removed with their folder are written again."""
        if "leases" in self._layout.make_again():
            for digest in self._leased.copy():
                self._write(digest)

    def acquire(self, digest: str, holder: Hashable = "") -> bool:
        """Lease an adapter for `holder` in this process; False where it is not there (any more)."""
        with self.guard(digest):
            return self.acquire_guarded(digest, holder)

    def acquire_guarded(self, digest: str, holder: Hashable = "") -> bool:
        """As `acquire`, for whoever holds the guard."""
        with self._lock:  # first, so that the file that is touched below is not the one another holder takes away
            holders = self._holders.setdefault(digest, set())
            is_new = holder not in holders
            holders.add(holder)
            self._ended.discard(digest)
        if not self._layout.adapter(digest).is_dir():
            self.release(digest, holder)
            return False
        try:
            self._write(digest)
        except OSError:
            if is_new:  # else the lease that it had is as good as before
                self.release(digest, holder)
            raise
        with self._lock:
            if digest in self._holders:
                self._leased.add(digest)
        return True

    def share(self, digest: str, holder: Hashable) -> bool:
        """Lease an adapter for `holder` too, where another has leased it in this process; a few microseconds."""
        with self._lock:
            if digest not in self._leased:
                return False
            self._holders[digest].add(holder)
            return True

    def release(self, digest: str, holder: Hashable = "") -> None:
        """End the lease of `holder`; without one, nothing happens. Callable from any thread.

        Where the store cannot be written just now, others see it end with the next one that does.
        """
        with self._lock:
            holders = self._holders.get(digest, set())
            if holder not in holders:
                return
            holders.remove(holder)
            if not holders:
                del self._holders[digest]
                self._leased.discard(digest)
                self._ended.add(digest)
                self._remove_ended()

    def hand_over(self, digest: str, holder: Hashable, to: Hashable) -> None:
        """Let `to` have the lease of `holder`, which must have one."""
        with self._lock:
            holders = self._holders[digest]
            holders.remove(holder)
            holders.add(to)

    def is_held(self, digest: str, holder: Hashable) -> bool:
        """Whether `holder` has a lease in this process."""
        return holder in self._holders.get(digest, ())

    def is_ours(self, digest: str) -> bool:
        """Whether this process leases it; a microsecond."""
        return digest in self._leased

    def holders(self, digest: str) -> list[str]:
        """The living processes that lease an adapter; one that cannot be judged counts as living."""
        try:
            names = os.listdir(self._folder(digest))
        except FileNotFoundError:
            return []
        return [name for name in names if self._may_live(name)]

    def sweep(self) -> None:
        """Forget the leases of the dead."""
        may_live = functools.cache(self._may_live)
        for digest in filter(is_digest, os.listdir(self._layout.folder("leases"))):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another process removes it
                for name in os.listdir(self._folder(digest)):
                    if not may_live(name):
                        os.unlink(self._folder(digest) / name)

    def _write(self, digest: str) -> None:
        """Have other processes see that this one leases an adapter."""
        self._folder(digest).mkdir(exist_ok=True)
        (self._folder(digest) / self._processes.me()).touch()

    def _remove_ended(self) -> None:
        for digest in list(self._ended):
            with contextlib.suppress(OSError):
                if self._layout.folder("leases").is_dir():  # else it may be back later, with the file
                    (self._folder(digest) / self._processes.me()).unlink(missing_ok=True)
                    self._ended.discard(digest)

    def _may_live(self, process: str) -> bool:
        try:
            return self._processes.is_alive(process)
        except OSError:  # a store that may only be read has no clock
            return True

    def _folder(self, digest: str) -> Path:
        return self._layout.folder("leases") / digest
