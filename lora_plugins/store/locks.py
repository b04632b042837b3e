"""One fetch at a time for one version: a lock file with an owner, taken over when the owner is dead.

A holder touches the lock while its event loop runs, and ends a silent fetch by itself: other processes wait as long as
the lock is touched.

Hard links are all that the lock needs of a shared file system; where file locks do not reach other hosts, two processes
may take over at once. A killed process blocks no other. The lock saves work; the store stays right without the lock:
two fetches of one version end in the same directory, published once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from filelock import FileLock

from lora_plugins.errors import SourceUnavailable
from lora_plugins.store.layout import discard
from lora_plugins.store.processes import Processes

_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 0.25
_TOUCHED_EVERY_S = 1.0


@asynccontextmanager
async def fetch_lock(path: Path, processes: Processes, *, temporary: Path, timeout_s: float) -> AsyncIterator[None]:
    """Hold the lock at `path` inside; `temporary` is a path on the lock's file system that only this process uses.

    Raises:
        SourceUnavailable: a living process has held the lock for `timeout_s` without touching the lock.
    """
    began, touched, wait_s = time.monotonic(), None, _FIRST_WAIT_S
    try:
        while not await _taken(temporary, path, processes):
            if touched != (touched := await asyncio.to_thread(_touched_ns, path)):
                began = time.monotonic()
            elif time.monotonic() - began > timeout_s:
                raise SourceUnavailable(
                    f"another process that has this adapter's fetch, and has shown no sign of life for {timeout_s:g} s",
                    expected="an end of the fetch, or an entry of its process",
                    remedy="look at that process",
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        touching = asyncio.create_task(_keep_touched(path))
        try:
            yield
        finally:
            touching.cancel()
            await asyncio.to_thread(discard, path)
    finally:
        await asyncio.to_thread(discard, temporary)


async def _keep_touched(path: Path) -> None:
    while True:
        await asyncio.sleep(_TOUCHED_EVERY_S)
        with contextlib.suppress(OSError):  # the store does not answer at the moment
            await asyncio.to_thread(os.utime, path)


def _touched_ns(path: Path) -> int:
    """When the holder last touched the lock; 0 where the lock has gone meanwhile."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


async def _taken(temporary: Path, path: Path, processes: Processes) -> bool:
    """Do as `_try`; a cancelled call does not leave the lock taken."""
    trying = asyncio.ensure_future(asyncio.to_thread(_try, temporary, path, processes))
    try:
        return await asyncio.shield(trying)
    except asyncio.CancelledError:
        await asyncio.wait([trying])
        # The thread may have taken the lock after the cancellation, and nobody would ever release the lock.
        if trying.exception() is None and trying.result():
            discard(path)
        raise


def remove_if_dead(path: Path, processes: Processes) -> None:
    """Remove a lock whose owner is dead; the next process to try takes the lock."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        if processes.is_alive(_owner(path)):
            return
        # Check again under the guard of all removals: another process may have taken the dead owner's lock since.
        with FileLock(path.with_name("takeover.guard"), timeout=30):
            if not processes.is_alive(_owner(path)):
                os.unlink(path)


def _owner(path: Path) -> str:
    """The process that a lock file names; empty or cut text where a power cut has damaged the file."""
    return path.read_text(errors="replace")


def _try(temporary: Path, path: Path, processes: Processes) -> bool:
    if not temporary.exists():  # the first try
        temporary.write_text(processes.me())
    try:
        os.link(temporary, path)  # creates the lock with its owner's name in it, or fails
    except FileExistsError:
        remove_if_dead(path, processes)
        return False
    return True
