"""Which adapters a worker holds in host memory: states, bytes, leases and pins; no torch.

Everything here is called from the engine loop, except `arrived` and `failed`, which the staging thread calls; a lock
guards the few lines of each. Those two never evict, because what follows an eviction (a slot is emptied) belongs to the
loop: an adapter that turned out larger than was reserved for it gets its room from the loop's next `settle`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cachetools import LRUCache

from lora_plugins.errors import LoRAPluginsError, NoFreeSlot, OutOfMemory
from lora_plugins.manager.policies import EvictionPolicy

_REMEMBERED_SIZES = 10_000
_MAKING_ROOM = "making room"  # an owner of leases


class Stage(StrEnum):
    """How far an adapter is on its way to the device."""

    STAGING = "staging"
    STAGED = "staged"
    FAILED = "failed"


@dataclass(slots=True)
class HostEntry:
    """One adapter in the host tier.

    Attributes:
        size_bytes: what is reserved while it is staged, and its tensors' bytes afterwards.
        name: what errors call it.
        leases: which owners (API servers) have requests that may still need it.
        removed: it goes with its last lease.
        model: the parsed and packed adapter once it is staged.
        landed: the arguments of `arrived` that wait for `settle`.
        fill: copies the model into the slot that was reserved for it.
    """

    adapter_id: int
    path: str
    size_bytes: int
    name: str = ""
    stage: Stage = Stage.STAGING
    leases: set[str] = field(default_factory=set)
    pinned: bool = False
    removed: bool = False
    model: Any = None
    error: LoRAPluginsError | None = None
    landed: tuple[Any, int, float] | None = None
    fill: Callable[[], None] | None = None


class HostTier:
    """Adapters in host memory under a budget of bytes and of their number.

    Args:
        max_bytes: the budget; None for none. max_adapters: vLLM's `max_cpu_loras`.
        policy: which entry goes first.
        on_evict: told the id of an entry that goes.
    """

    def __init__(
        self,
        max_bytes: int | None,
        max_adapters: int,
        policy: EvictionPolicy[int],
        on_evict: Callable[[int], None],
    ) -> None:
        self.max_bytes = max_bytes
        self._max_adapters = max_adapters
        self._policy = policy
        self._on_evict = on_evict
        self._entries: dict[int, HostEntry] = {}
        self._lock = threading.RLock()
        self._sizes: LRUCache[str, int] = LRUCache(_REMEMBERED_SIZES)  # of what has landed, by path
        self.evictions = 0
        self.evicted_bytes = 0
        self.failures = 0
        self.stagings = 0
        self.staging_s = 0.0

    def get(self, adapter_id: int) -> HostEntry | None:
        """The entry of this id, whatever its stage."""
        return self._entries.get(adapter_id)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries, those on their way in included."""
        with self._lock:
            return sum(entry.size_bytes for entry in self._entries.values())

    def snapshot(self) -> list[HostEntry]:
        """All entries, whatever their stage."""
        with self._lock:
            return list(self._entries.values())

    def expected_bytes(self, path: str, estimate: int) -> int:
        """What an adapter will take: what it took when it last landed from this path, else the estimate."""
        return int(self._sizes.get(path, estimate))

    def reserve(self, adapter_id: int, path: str, size_bytes: int) -> HostEntry:
        """Make room for an adapter and enter it as being staged, in the place of what has its id.

        Raises:
            OutOfMemory: larger than the budget. NoFreeSlot: everything that could go is leased or pinned. What had its
                id is still there then, as running requests may need it.
        """
        with self._lock:
            before = self._entries.get(adapter_id)
            self._refuse_oversize(size_bytes)
            if before is None:
                self._make_room(size_bytes, 1)
            else:
                with self._kept(before):
                    self._make_room(size_bytes - before.size_bytes, 0)
                self.drop(adapter_id)
            entry = self._entries[adapter_id] = HostEntry(adapter_id, path, size_bytes)
            if before is not None and before.path == path:  # a second try, for all who wait for it
                entry.leases = before.leases
            return entry

    @staticmethod
    @contextmanager
    def _kept(entry: HostEntry) -> Iterator[None]:
        """Inside, it is not the one that makes room."""
        entry.leases.add(_MAKING_ROOM)
        try:
            yield
        finally:
            entry.leases.discard(_MAKING_ROOM)

    def _refuse_oversize(self, size_bytes: int) -> None:
        if self.max_bytes is not None and size_bytes > self.max_bytes:
            raise OutOfMemory(
                f"an adapter of {size_bytes} bytes in host memory",
                expected=f"at most {self.max_bytes}",
                remedy="raise LORA_PLUGINS_HOST_MAX_BYTES",
            )

    def _make_room(self, size_bytes: int, count: int) -> None:
        while self._is_over(size_bytes, count):
            victim = self._abandoned()
            if victim is None:
                victim = self._policy.victim(self._may_go)
            if victim is None:
                raise NoFreeSlot(
                    "a host tier of which running requests need all",
                    expected="one adapter that is idle",
                    remedy="ask again, or raise --max-cpu-loras or LORA_PLUGINS_HOST_MAX_BYTES",
                )
            self.evictions += 1
            self.evicted_bytes += self._entries[victim].size_bytes
            self.drop(victim)

    def _abandoned(self) -> int | None:
        """An entry that nobody waits for any more and that never became an adapter."""
        return next(
            (key for key, entry in self._entries.items() if entry.stage is not Stage.STAGED and self._may_go(key)),
            None,
        )

    def _is_over(self, size_bytes: int, count: int) -> bool:
        if len(self._entries) + count > self._max_adapters:
            return True
        return self.max_bytes is not None and self.used_bytes + size_bytes > self.max_bytes

    def _may_go(self, adapter_id: int) -> bool:
        entry = self._entries[adapter_id]
        return not entry.pinned and not entry.leases

    def arrived(self, entry: HostEntry, model: Any, size_bytes: int, cost_s: float) -> None:
        """The staging thread has parsed and packed it; it may have been dropped or replaced meanwhile."""
        with self._lock:
            if self._entries.get(entry.adapter_id) is not entry or entry.stage is not Stage.STAGING:
                return
            entry.landed = (model, size_bytes, cost_s)
            self._sizes[entry.path] = size_bytes
            self.stagings += 1
            self.staging_s += cost_s
            if not self._is_over(size_bytes - entry.size_bytes, 0):
                self._enter(entry)

    def settle(self, adapter_id: int) -> bool:
        """Find room for an adapter that landed larger than was reserved; where there is none, it has failed.

        Returns whether it is staged by this.
        """
        with self._lock:
            entry = self._entries.get(adapter_id)
            if entry is None or entry.landed is None:
                return False
            size_bytes = entry.landed[1]
            try:
                self._refuse_oversize(size_bytes)
                with self._kept(entry):
                    self._make_room(size_bytes - entry.size_bytes, 0)
            except LoRAPluginsError as error:
                self.failed(entry, error)
                return False
            self._enter(entry)
            return True

    def _enter(self, entry: HostEntry) -> None:
        if entry.landed is not None:
            entry.model, entry.size_bytes, cost_s = entry.landed
            entry.landed, entry.stage = None, Stage.STAGED
            self._policy.added(entry.adapter_id, entry.size_bytes, cost_s)

    def failed(self, entry: HostEntry, error: LoRAPluginsError) -> None:
        """It could not be brought, or not into a slot; unless it was dropped or replaced meanwhile."""
        with self._lock:
            if self._entries.get(entry.adapter_id) is not entry:
                return
            if entry.stage is Stage.STAGED:
                self._policy.removed(entry.adapter_id)
            self.failures += 1
            entry.error, entry.stage, entry.size_bytes = error, Stage.FAILED, 0
            entry.model = entry.landed = None

    def used(self, adapter_id: int) -> None:
        """A request uses it."""
        with self._lock:
            entry = self._entries.get(adapter_id)
            if entry is not None and entry.stage is Stage.STAGED:
                self._policy.used(adapter_id)

    def lease(self, adapter_id: int, owner: str) -> None:
        """Keep it until `owner` releases it."""
        with self._lock:
            entry = self._entries[adapter_id]
            entry.leases.add(owner)
            entry.removed = False

    def release(self, adapter_id: int, owner: str) -> None:
        """End `owner`'s lease; a failed entry that nobody waits for goes."""
        with self._lock:
            entry = self._entries.get(adapter_id)
            if entry is None:
                return
            entry.leases.discard(owner)
            if (entry.removed or entry.stage is Stage.FAILED) and not entry.leases:
                self.drop(adapter_id)

    def remove(self, adapter_id: int) -> bool:
        """Forget an adapter, once nobody leases it; returns whether it was here."""
        with self._lock:
            entry = self._entries.get(adapter_id)
            if entry is None or entry.removed:
                return False
            if entry.leases:
                entry.removed, entry.pinned = True, False
            else:
                self.drop(adapter_id)
            return True

    def staged(self) -> set[int]:
        """Ids of the adapters that are here and not on their way out."""
        with self._lock:
            return {key for key, entry in self._entries.items() if entry.stage is Stage.STAGED and not entry.removed}

    def is_leased(self, adapter_id: int) -> bool:
        """Whether any request may still need it."""
        entry = self._entries.get(adapter_id)
        return entry is not None and bool(entry.leases)

    def pin(self, adapter_id: int) -> None:
        """Keep it until it is removed."""
        with self._lock:
            self._entries[adapter_id].pinned = True

    def unpin(self, adapter_id: int) -> bool:
        """Let it go when its turn comes; returns whether it was pinned."""
        with self._lock:
            entry = self._entries.get(adapter_id)
            was_pinned = entry is not None and entry.pinned
            if entry is not None:
                entry.pinned = False
            return was_pinned

    def drop(self, adapter_id: int) -> bool:
        """Forget an adapter, whatever its state; returns whether it was here."""
        with self._lock:
            entry = self._entries.pop(adapter_id, None)
            if entry is None:
                return False
            if entry.stage is Stage.STAGED:
                self._policy.removed(adapter_id)
            self._on_evict(adapter_id)
            # `fill` leads back to the entry: without this, its memory would wait for a full garbage collection.
            entry.model = entry.landed = entry.fill = None
            return True

    def clear(self) -> None:
        """Forget all, each once nobody leases it."""
        for adapter_id in list(self._entries):
            self.remove(adapter_id)
