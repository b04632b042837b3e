"""One fetch at a time for one version: a file lock, which the kernel releases when its process ends.

Runs in the event loops of API servers and commands that fetch, on all hosts that share the store. A holder touches the
file while its event loop runs, and ends a silent fetch by itself: other processes wait as long as the file is touched.

The lock saves work; the store stays right without the lock, as where file locks do not reach other hosts: two fetches
of one version end in the same directory, published once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from lora_plugins.errors import SourceUnavailable

_T = TypeVar("_T")
_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 0.25
_TOUCHED_EVERY_S = 1.0


@asynccontextmanager
async def fetch_lock(path: Path, *, timeout_s: float) -> AsyncIterator[None]:
    """Hold the lock at `path` inside.

    Raises:
        SourceUnavailable: another process has held the lock for `timeout_s` without touching the file.
    """
    lock = FileLock(path, thread_local=False)  # one thread takes the lock, another releases it
    began, touched, wait_s = time.monotonic(), None, _FIRST_WAIT_S
    try:
        while not await to_its_end(asyncio.to_thread(_take, lock)):
            if touched != (touched := await asyncio.to_thread(touched_ns, path)):
                began = time.monotonic()
            elif time.monotonic() - began > timeout_s:
                raise SourceUnavailable(
                    f"another process that has this adapter's fetch, and has shown no sign of life for {timeout_s:g} s",
                    expected="an end of the fetch, or of its process",
                    remedy=f"look at the process that holds {path}: 'lslocks' names it",
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        touching = asyncio.create_task(_keep_touched(path))
        try:
            yield
        finally:
            touching.cancel()
    finally:
        if lock.is_locked:
            await asyncio.to_thread(_release, lock, path)


def remove_unheld(path: Path) -> None:
    """Remove the file of a lock whose process has ended before the release."""
    with suppress(Timeout, OSError), FileLock(path, timeout=0):
        path.unlink()


async def to_its_end(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`; a cancelled caller waits too, and leaves nothing that a thread makes afterwards."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait([task])


async def _keep_touched(path: Path) -> None:
    while True:
        with suppress(OSError):  # the store does not answer at the moment
            await asyncio.to_thread(os.utime, path)
        await asyncio.sleep(_TOUCHED_EVERY_S)


def touched_ns(path: Path) -> int:
    """When a process last touched the file, in the file system's ns; 0 where the file is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _take(lock: FileLock) -> bool:
    with suppress(Timeout):
        lock.acquire(blocking=False)
    return lock.is_locked


def _release(lock: FileLock, path: Path) -> None:
    # Removed first: who then holds the lock of the removed file looks for the version again, and finds it published.
    with suppress(OSError):
        path.unlink()
    lock.release()
