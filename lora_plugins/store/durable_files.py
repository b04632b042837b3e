"""Write, sync and remove files so that a process killed at any moment, or a power cut, leaves a whole file or none.

Used by every process that writes to the store, mostly in threads: a sync may take seconds. `layout.py` says where the
store's files are.
"""

from __future__ import annotations

import functools
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_THREADS = 8
_unremoved: set[Path] = set()  # what `discard` could not remove, say from a read-only store or without a descriptor


def write_small(path: Path, pieces: Iterable[str], temporary: Path, *, is_durable: bool = True) -> None:
    """Write a whole file or nothing, by way of a temporary path; survives a power cut only where `is_durable`."""
    try:
        with temporary.open("w") as file:
            file.writelines(pieces)
            # Before the rename: else a power cut may leave the new name with no content.
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a full disk, say
        discard(temporary)
        raise


def discard(path: Path) -> None:
    """Remove a temporary file or directory of this process: now, or as soon as the store can be written.

    Until then a directory would keep the room that its name announces.
    """
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
        os.lstat(path)
    except FileNotFoundError:
        _unremoved.discard(path)
        return
    except OSError:
        pass
    _unremoved.add(path)


def discard_again() -> None:
    """Remove what `discard` could not remove before."""
    for path in _unremoved.copy():
        discard(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable(paths: Sequence[Path]) -> None:
    """Make files read-only, and files and directories durable.

    All are synced at the same time: a file system then writes its journal once for all files, not once for each.
    """
    for syncing in start_syncing(paths):
        syncing.result()


def start_syncing(paths: Sequence[Path]) -> list[Future[None]]:
    """Begin to make files read-only and paths durable, in threads of the store; `result()` of each raises its error."""
    return [store_threads().submit(_sync, path) for path in paths]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o444)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.cache
def store_threads() -> ThreadPoolExecutor:
    """The few threads that hash files and write files to the disk, for tasks that wait for no other task of theirs."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="lora-plugins-store")  # threads start on demand


os.register_at_fork(after_in_child=store_threads.cache_clear)  # threads are not forked
