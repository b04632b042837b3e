"""Leases of adapters in the store: promises that no process removes a directory while an engine may read it.

Runs in each process that uses the store. A lease is an empty file for each adapter and process, which no longer counts
once the process is dead (`processes.py`). Several holders inside a process, such as the names of a served adapter,
share the file; when the last holder's lease ends, the file is removed. In go digests and holders (any hashable object
that stands for a user of the adapter); out comes whether an adapter is leased, and by which processes.

A host is silent while its processes give no heartbeat (a frozen machine, a hung mount; `processes.py` has the times). A
silent host keeps its leases, but where room is needed, adapters that only silent hosts lease are removed, after all
adapters without a lease. A process that wakes writes its leases again before relying on a lease, and learns which
adapters are gone.
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
        self._lock = threading.RLock()  # of the three above; event loops wait for it, so no holder of it uses the disk
        self._files = threading.RLock()  # held while a lease file of this process is written or removed
        processes.on_silence = self._assert_again
        processes.on_beat = self._look

    def guard(self, digest: str) -> FileLock:
        """The lock for leasing or removing an adapter, held for moments: no adapter is removed while it gets a lease.

        Raises:
            FileNotFoundError: the store is not there.
        """
        self.make_again()  # FileLock would make the folder of locks in the place of a store that is away
        return self._guard_of(digest)

    def _guard_of(self, digest: str) -> FileLock:
        # Adapters share locks, so the number of lock files is fixed, however many adapters come and go.
        return FileLock(self._layout.folder("locks") / f"{digest[:2]}.guard", timeout=30)

    def make_again(self) -> None:
        """Make removed folders again (`Layout.make_again`), and write leases that a removal or a silence has ended."""
        if "leases" in self._layout.make_again():
            self._assert_again()
        self._processes.wake()

    def _look(self) -> None:
        """Before each beat: do as `make_again`, also where another process has made the folder of leases again."""
        self.make_again()
        with self._lock:
            # A look at one lease will do: a process that takes this process for dead removes all of its leases.
            leased = next(iter(self._leased), None)
        if leased is not None and not (self._folder(leased) / self._processes.me()).exists():
            self._assert_again()

    def _assert_again(self) -> None:
        """Write the lease files of this process again, except for adapters that are gone."""
        # All digests with the same first two characters have one guard, which is taken once for all.
        for _, digests in itertools.groupby(sorted(self._leased.copy()), key=lambda digest: digest[:2]):
            digest = next(digests)
            with self._guard_of(digest):
                for leased in (digest, *digests):
                    if self._layout.adapter(leased).is_dir():
                        self._write(leased)
                    else:  # now `share` and `is_held` answer False, and holders fetch and lease the adapter again
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
            self._leased.discard(digest)  # of other holders too: their lease has lost its adapter
            self.release(digest, holder)
            return False
        try:
            self._write(digest)
        except OSError:
            if is_new:  # otherwise the holder keeps its earlier lease
                self.release(digest, holder)
            raise
        with self._lock:
            # Another thread may have released the last holder during the write.
            if digest in self._holders:
                self._leased.add(digest)
        return True

    def share(self, digest: str, holder: Hashable) -> bool:
        """Lease an adapter for `holder` too, without the disk; False where this process has no lease of the adapter.

        Takes microseconds. After a silence of this process, False until its leases are written again.
        """
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
        """End the lease of `holder`, unless the holder is the last, whose release removes a file; takes a microsecond.

        False, without effect, for the last holder; True otherwise, also for a holder without a lease.
        """
        with self._lock:
            holders = self._holders.get(digest, set())
            if holders == {holder}:
                return False
            holders.discard(holder)
            return True

    def hand_over(self, digest: str, holder: Hashable, to: Hashable) -> None:
        """Give the lease of `holder` to another holder.

        Raises:
            KeyError: `holder` has no lease.
        """
        with self._lock:
            holders = self._holders[digest]
            holders.remove(holder)
            holders.add(to)

    def is_held(self, digest: str, holder: Hashable) -> bool:
        """Whether `holder` has a lease in this process that other processes see."""
        is_leased = digest in self._leased and self._processes.is_awake()
        return is_leased and holder in self._holders.get(digest, ())

    def is_ours(self, digest: str) -> bool:
        """Whether this process leases the adapter, for any holder; takes a microsecond."""
        return digest in self._leased

    def holders(self, digest: str) -> list[str]:
        """The names of the living processes that lease an adapter; in doubt, a process counts as living."""
        return [name for name in self._names(digest) if self._processes.is_alive(name)]

    def is_of_the_silent(self, digest: str) -> bool:
        """Whether a process that is not `Processes.is_gone` leases the adapter.

        Where `holders` is empty, each such process is silent: it gave no heartbeat for a minute, but for less than ten.
        """
        return not all(self._processes.is_gone(name) for name in self._names(digest))

    def _names(self, digest: str) -> list[str]:
        try:
            return os.listdir(self._folder(digest))
        except FileNotFoundError:
            return []

    def sweep(self) -> None:
        """Remove the lease files of processes that are gone."""
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
        """Remove the files of leases without a holder; where the store is away or refuses, a later call tries again."""
        with self._files:
            for digest in list(self._ended):
                # A holder that comes after this look waits for `_files` in `_write`, and writes the file again.
                if digest not in self._holders:
                    with contextlib.suppress(OSError):
                        # Without the folder, the store is away, and may return with the file: keep the digest.
                        if self._layout.folder("leases").is_dir():
                            (self._folder(digest) / self._processes.me()).unlink(missing_ok=True)
                            self._ended.discard(digest)

    def _folder(self, digest: str) -> Path:
        return self._layout.folder("leases") / digest
