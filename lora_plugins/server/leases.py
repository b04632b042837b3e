"""The adapters that an API server's requests use, or did a moment ago: its leases on the workers; no vLLM, no torch."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from cachetools import LRUCache

from lora_plugins.events import Found

REMEMBERED = 10_000


class Request(Protocol):
    """The part of vLLM's `LoRARequest` that the gate needs."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class Load:
    """An adapter that is on its way from its directory; times are `time.monotonic()`."""

    size_bytes: int
    asked_at: float
    staged_at: float | None = None


@dataclass(eq=False)
class Entry:
    """One adapter, whose lease on the workers is held.

    Attributes:
        users: requests that are in, wait, or were admitted. tickets: of those who were admitted.
        is_placed: in a slot of every worker, as far as this server was told.
        found: where it was when the task that brings it, or brought it last, began.
        staging, placing: the tasks that bring it.
        linger: ends the lease. drained: done when the last user has gone.
    """

    request: Request
    users: int = 0
    is_leased: bool = False
    is_placed: bool = False
    found: Found | None = None
    load: Load | None = None
    staging: asyncio.Task[None] | None = None
    placing: asyncio.Task[None] | None = None
    linger: asyncio.TimerHandle | None = None
    tickets: deque[tuple[Hold, asyncio.TimerHandle]] = field(default_factory=deque)
    holds: set[Hold] = field(default_factory=set)
    drained: asyncio.Future[None] | None = None


@dataclass(eq=False)
class Hold:
    """One request's right to be in the engine; `Gate.leave` ends it."""

    entry: Entry
    request_id: str = ""


class Leases:
    """Who has an entry, by adapter id. For one event loop.

    Attributes:
        retired: ids that go from the workers with their lease.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self.retired: LRUCache[int, bool] = LRUCache(REMEMBERED)

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, request: Request) -> Entry:
        """The entry of a request's adapter, which stays for as long as it has users."""
        entry = self._entries.get(request.lora_int_id)
        if entry is None or entry.request.lora_path != request.lora_path:
            entry = self._entries[request.lora_int_id] = Entry(request)
        if entry.linger is not None:
            entry.linger.cancel()
            entry.linger = None
        return entry

    def get(self, adapter_id: int) -> Entry | None:
        """The entry of this id, if there is one."""
        return self._entries.get(adapter_id)

    def all(self) -> list[Entry]:
        """Every entry."""
        return list(self._entries.values())

    def forget(self, entry: Entry) -> bool:
        """Count an adapter as leased no longer; False where the lease is another one's by now."""
        entry.is_leased = entry.is_placed = False
        adapter_id = entry.request.lora_int_id
        if self._entries.get(adapter_id) is not entry:
            return False  # another path has replaced it
        if entry.users == 0:
            if entry.linger is not None:
                entry.linger.cancel()
            del self._entries[adapter_id]
        return True
