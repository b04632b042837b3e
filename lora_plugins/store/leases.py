"""Leases of adapters in the store: promises that no process removes a directory while an engine may read it.

Runs in each process that uses the store. A lease is an empty file for each adapter and process, void once the process
is dead (`processes.py`); several holders inside a process, such as the names of a served adapter, share the file, and
the last holder's end removes it. In go digests and holders; out comes whether an adapter is leased, and by whom.

A host that is silent (a frozen machine, a hung mount; times in `processes.py`) keeps its leases, but where room is
needed, adapters that only silent hosts lease go, after all adapters without a lease. A process that wakes writes its
leases again before relying on a lease, and learns which adapters are gone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
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
        self._leased: set[str] = set()  # digests with a holder whose lease file is written: other processes see it
        self._ended: set[str] = set()  # digests without a holder here, whose lease file may still exist
        # Garbage collection in the midst of a call may run a finalizer, which calls `release`: so the locks are RLocks.
        self._lock = threading.RLock()  # of the three above; event loops take it, so nobody asks the disk under it
        self._files = threading.RLock()  # of this process's lease files
        processes.on_silence = self._assert_again
        processes.on_beat = self._look

    def guard(self, digest: str) -> FileLock:
        """The lock of a lease or a removal of an adapter, held for moments, so that neither overtakes the other.

        Raises:
            FileNotFoundError: the store is not there.
        """
        self.make_again()  # FileLock would make the folder of locks in the place of a store that is away
        # A fixed number of lock files, however many adapters come and go.
        return self._guard_of(digest)

    def _guard_of(self, digest: str) -> FileLock:
        return FileLock(self._layout.folder("locks") / f"{digest[:2]}.guard", timeout=30)

    def make_again(self) -> None:
        """Call `Layout.make_again`, and write leases again that went with their folder or in a silence."""
        if "leases" in self._layout.make_again():
            self._assert_again()
        self._processes.wake()

    def _look(self) -> None:
        """Before each beat: do as `make_again`, also where another process has made the folder of leases again."""
        self.make_again()
        with self._lock:
            leased = next(iter(self._leased), None)  # one stands for all: who removes files of others, removes all
        if leased is not None and not (self._folder(leased) / self._processes.me()).exists():
            self._assert_again()

    def _assert_again(self) -> None:
        """Write all leases of this process again, but leases of adapters that are gone."""
        # One guard for all digests with the same first two characters, so take each guard once.
        for _, digests in itertools.groupby(sorted(self._leased.copy()), key=lambda digest: digest[:2]):
            digest = next(digests)
            with self._guard_of(digest):
                for leased in (digest, *digests):
                    if self._layout.adapter(leased).is_dir():
                        self._write(leased)
                    else:  # the holders lease the adapter again after the next fetch
                        self._leased.discard(leased)

    def acquire(self, digest: str, holder: Hashable = "") -> bool:
        """Lease an adapter for `holder` in this process; False where the adapter is not (or no longer) in the store."""
        with self.guard(digest):
            return self.acquire_guarded(digest, holder)

    def acquire_guarded(self, digest: str, holder: Hashable = "") -> bool:
        """Do as `acquire`, for a caller that holds the guard."""
        # Note the holder first: `release` of another holder must not remove the file that `_write` touches below.
        with self._lock:
            holders = self._holders.setdefault(digest, set())
            is_new = holder not in holders
            holders.add(holder)
            self._ended.discard(digest)
        if not self._layout.adapter(digest).is_dir():
            self._leased.discard(digest)
            self.release(digest, holder)
            return False
        try:
            self._write(digest)
        except OSError:
            if is_new:  # an earlier lease of this holder is as good as before
                self.release(digest, holder)
            raise
        with self._lock:
            # Another thread may have released the last holder during the write.
            if digest in self._holders:
                self._leased.add(digest)
        return True

    def share(self, digest: str, holder: Hashable) -> bool:
        """Lease an adapter for `holder` too, where this process has leased the adapter already; takes microseconds."""
        with self._lock:
            if digest not in self._leased or not self._processes.is_awake():
                return False
            self._holders[digest].add(holder)
            return True

    def release(self, digest: str, holder: Hashable = "") -> None:
        """End the lease of `holder`; a holder without a lease is no error. Callable from any thread.

        Where the store cannot be written now, a later release removes the file that other processes see.
        """
        with self._lock:
            if self.leave(digest, holder):
                return
            self._holders.pop(digest, None)
            self._leased.discard(digest)
            self._ended.add(digest)
        self._remove_ended()

    def leave(self, digest: str, holder: Hashable) -> bool:
        """Do as `release`, but for the last holder, whose release changes a file: then False. Takes a microsecond."""
        with self._lock:
            holders = self._holders.get(digest, set())
            if holders == {holder}:
                return False
            holders.discard(holder)
            return True

    def hand_over(self, digest: str, holder: Hashable, to: Hashable) -> None:
        """Give the lease of `holder`, which must have a lease, to another holder."""
        with self._lock:
            holders = self._holders[digest]
            holders.remove(holder)
            holders.add(to)

    def is_held(self, digest: str, holder: Hashable) -> bool:
        """Whether `holder` has a lease in this process that other processes see."""
        is_leased = digest in self._leased and self._processes.is_awake()
        return is_leased and holder in self._holders.get(digest, ())

    def is_ours(self, digest: str) -> bool:
        """Whether this process leases the adapter; takes a microsecond."""
        return digest in self._leased

    def holders(self, digest: str) -> list[str]:
        """The living processes that lease an adapter; a process that cannot be judged counts as living."""
        return [name for name in self._names(digest) if self._processes.is_alive(name)]

    def is_of_the_silent(self, digest: str) -> bool:
        """Whether a process leases the adapter that runs, or that may only sleep (`Processes.is_gone`)."""
        return not all(self._processes.is_gone(name) for name in self._names(digest))

    def _names(self, digest: str) -> list[str]:
        try:
            return os.listdir(self._folder(digest))
        except FileNotFoundError:
            return []

    def sweep(self) -> None:
        """Forget the leases of the dead."""
        is_gone = functools.cache(self._processes.is_gone)
        for digest in filter(is_digest, os.listdir(self._layout.folder("leases"))):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another process removes it
                for name in os.listdir(self._folder(digest)):
                    if is_gone(name):
                        os.unlink(self._folder(digest) / name)

    def _write(self, digest: str) -> None:
        """Write the file that shows the lease of this process to others, if the lease has not ended meanwhile."""
        with self._files:
            if digest in self._holders:
                self._folder(digest).mkdir(exist_ok=True)
                (self._folder(digest) / self._processes.me()).touch()

    def _remove_ended(self) -> None:
        with self._files:
            for digest in list(self._ended):
                # A holder that comes after this look writes the file again, after the removal.
                if digest not in self._holders:
                    with contextlib.suppress(OSError):
                        if self._layout.folder("leases").is_dir():  # a store that is away may return with the file
                            (self._folder(digest) / self._processes.me()).unlink(missing_ok=True)
                            self._ended.discard(digest)

    def _folder(self, digest: str) -> Path:
        return self._layout.folder("leases") / digest
