"""One lock per adapter name, for as long as somebody needs it."""

from __future__ import annotations

import asyncio
import weakref


class NameLocks:
    """One lock per name for as long as somebody holds or awaits it.

    Takes the place of vLLM's `defaultdict(Lock)`, which keeps a lock for every name that was ever asked for.
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
