"""One lock per adapter name, for as long as a task needs the lock."""

from __future__ import annotations

import asyncio
import weakref


class NameLocks:
    """One lock per name for as long as a task holds or awaits the lock.

    Replaces vLLM's `defaultdict(Lock)`, which keeps a lock for every name that any request has asked for.
    """

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def __getitem__(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def __len__(self) -> int:
        return len(self._locks)
