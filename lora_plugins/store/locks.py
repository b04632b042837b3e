"""One fetch at a time for one version: a lock file with an owner, taken over when the owner is dead.

It works on any file system that hosts can share (hard links are all it needs; where file locks do not reach other
hosts, two may take over at once), and a process that is killed leaves nothing that blocks others. It saves work and is
not what keeps the store right: two fetches of one version end in the same directory, published once.
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
from lora_plugins.store.processes import Processes

_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 0.25


@asynccontextmanager
async def fetch_lock(path: Path, processes: Processes, *, temporary: Path, timeout_s: float) -> AsyncIterator[None]:
    """Hold the lock at `path` inside; `temporary` is a path on its file system that only this process uses.

    Raises:
        SourceUnavailable: a living process has held it for `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    wait_s = _FIRST_WAIT_S
    try:
        await _write(temporary, processes.me())
        while not await _taken(temporary, path, processes):
            if time.monotonic() > deadline:
                raise SourceUnavailable(
                    f"another process that has been fetching this adapter for {timeout_s:.0f} s",
                    expected="an end to it",
                    remedy="raise LORA_PLUGINS_FETCH_TIMEOUT_S",
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        try:
            yield
        finally:
            _unlink(path)
    finally:
        _unlink(temporary)


async def _write(temporary: Path, owner: str) -> None:
    """Write the file that becomes the lock; when cancelled, its thread has ended before this raises."""
    writing = asyncio.ensure_future(asyncio.to_thread(temporary.write_text, owner))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


async def _taken(temporary: Path, path: Path, processes: Processes) -> bool:
    """As `_try`; when cancelled, the lock is not left taken."""
    trying = asyncio.ensure_future(asyncio.to_thread(_try, temporary, path, processes))
    try:
        return await asyncio.shield(trying)
    except asyncio.CancelledError:
        await asyncio.wait([trying])
        if trying.exception() is None and trying.result():
            _unlink(path)
        raise


def remove_if_dead(path: Path, processes: Processes) -> None:
    """Remove a lock whose owner is dead; whoever tries to take it next has it."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        if processes.is_alive(_owner(path)):
            return
        # Checked again where only we remove locks: another process may have taken the dead one over since.
        with FileLock(path.with_name("takeover.guard"), timeout=30):
            if not processes.is_alive(_owner(path)):
                os.unlink(path)


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _owner(path: Path) -> str:
    """The process that a lock file names, if it names one."""
    return path.read_text(errors="replace")


def _try(temporary: Path, path: Path, processes: Processes) -> bool:
    try:
        os.link(temporary, path)  # creates the lock with its owner's name in it, or fails
    except FileExistsError:
        remove_if_dead(path, processes)
        return False
    return True
