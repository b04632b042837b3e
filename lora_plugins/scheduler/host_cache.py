"""The host cache's budget: which adapters the workers hold in host memory, in bytes and in number."""

from __future__ import annotations

from collections.abc import Container, Iterator

from cachetools import LRUCache

from lora_plugins.scheduler.policies import EvictionPolicy

_REMEMBERED_SIZES = 10_000


class HostCache:
    """Bytes and number of what is loaded or being loaded; the policy says which one is evicted first.

    Args:
        max_bytes: None for no limit. max_adapters: vLLM's `--max-cpu-loras`.
    """

    def __init__(self, max_bytes: int | None, max_adapters: int, policy: EvictionPolicy[int]) -> None:
        self.max_bytes = max_bytes
        self.max_adapters = max_adapters
        self.used_bytes = 0
        self._sizes: dict[int, int] = {}
        self._policy = policy
        self._known_bytes: LRUCache[str, int] = LRUCache(_REMEMBERED_SIZES)  # of what was loaded once, by path

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def __contains__(self, engine_id: int) -> bool:
        return engine_id in self._sizes

    def expected_bytes(self, path: str, estimate: int) -> int:
        """What an adapter will take: what it took when it was loaded last, else the estimate."""
        return int(self._known_bytes.get(path, estimate))

    def fits_without(self, size_bytes: int, more: int, evicted_bytes: int, evicted: int) -> bool:
        """Whether there is room for so many bytes and adapters more, once so many others are evicted."""
        if len(self._sizes) + more - evicted > self.max_adapters:
            return False
        return self.max_bytes is None or self.used_bytes + size_bytes - evicted_bytes <= self.max_bytes

    def reserve(self, engine_id: int, size_bytes: int) -> None:
        """Count an adapter that is about to be loaded."""
        self._sizes[engine_id] = size_bytes
        self.used_bytes += size_bytes

    def loaded(self, engine_id: int, path: str, size_bytes: int, cost_s: float) -> None:
        """Count what it really takes."""
        self._known_bytes[path] = size_bytes
        self.used_bytes += size_bytes - self._sizes[engine_id]
        self._sizes[engine_id] = size_bytes
        self._policy.added(engine_id, size_bytes, cost_s)

    def used(self, engine_id: int) -> None:
        """A request uses it."""
        self._policy.used(engine_id)

    def remove(self, engine_id: int) -> int:
        """Count it no longer; returns its bytes."""
        self._policy.removed(engine_id)
        size_bytes = self._sizes.pop(engine_id)
        self.used_bytes -= size_bytes
        return size_bytes

    def victim(self, among: Container[int]) -> int | None:
        """Which of the loaded adapters in `among` is to be evicted first."""
        return self._policy.victim(among)

    def size_bytes(self, engine_id: int) -> int:
        """What is counted for it."""
        return self._sizes[engine_id]
