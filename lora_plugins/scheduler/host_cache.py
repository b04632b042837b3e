"""The host cache's budget: which adapters the workers hold in host memory, in bytes and in number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing

from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.scheduler.policies import EvictionPolicy

_REMEMBERED = 10_000


class HostCache:
    """Bytes and number of what is loaded or being loaded, by key; the policy says which one is evicted first.

    Args:
        max_bytes: None for no limit. max_adapters: vLLM's `--max-cpu-loras`.

    Attributes:
        sizes_bytes: of what is there. known_bytes: what adapters took when they were loaded last, by engine id.
    """

    def __init__(self, max_bytes: int | None, max_adapters: int, policy: EvictionPolicy[int]) -> None:
        self.max_bytes = max_bytes
        self.max_adapters = max_adapters
        self.used_bytes = 0
        self.sizes_bytes: dict[int, int] = {}
        self.known_bytes: dict[int, tuple[AdapterSpec, int]] = {}
        self._policy = policy

    def expected_bytes(self, spec: AdapterSpec) -> int:
        """What an adapter will take: what it took when it was loaded last, else what its files say."""
        known = self.known_bytes.get(spec.engine_id)
        return known[1] if known is not None and known[0].path == spec.path else spec.size_bytes

    def has_room(self, sizes_bytes: Iterable[int], without: Iterable[int] = ()) -> bool:
        """Whether adapters of these sizes fit beside what is there, once those of the keys in `without` have gone."""
        more, fewer = tuple(sizes_bytes), tuple(without)
        if len(self.sizes_bytes) + len(more) - len(fewer) > self.max_adapters:
            return False
        if self.max_bytes is None:
            return True
        return self.used_bytes + sum(more) - sum(self.sizes_bytes[key] for key in fewer) <= self.max_bytes

    def reserve(self, key: int, size_bytes: int) -> None:
        """Count an adapter that is about to be loaded."""
        self.sizes_bytes[key] = size_bytes
        self.used_bytes += size_bytes

    def loaded(self, key: int, spec: AdapterSpec, size_bytes: int, cost_s: float) -> None:
        """Count what it really takes."""
        self.known_bytes[spec.engine_id] = spec, size_bytes
        if len(self.known_bytes) > _REMEMBERED:
            del self.known_bytes[next(iter(self.known_bytes))]
        self.used_bytes += size_bytes - self.sizes_bytes[key]
        self.sizes_bytes[key] = size_bytes
        self._policy.added(key, size_bytes, cost_s)

    def used(self, key: int) -> None:
        """A request uses it."""
        self._policy.used(key)

    def remove(self, key: int) -> int:
        """Count it no longer; returns its bytes."""
        self._policy.removed(key)
        size_bytes = self.sizes_bytes.pop(key)
        self.used_bytes -= size_bytes
        return size_bytes

    def victims(
        self, sizes_bytes: Iterable[int], among: Mapping[int, object], gone: Iterable[int] = ()
    ) -> list[int] | None:
        """Keys to evict, in the policy's order, so that these fit; None where all in `among` are not enough.

        `gone`: keys that are as good as evicted.
        """
        sizes, gone = list(sizes_bytes), list(gone)
        taken_bytes = self.used_bytes + sum(sizes) - sum(self.sizes_bytes[key] for key in gone)
        bytes_over = 0 if self.max_bytes is None else taken_bytes - self.max_bytes
        places_over = len(self.sizes_bytes) + len(sizes) - len(gone) - self.max_adapters
        if places_over > len(among) or bytes_over > sum(map(self.sizes_bytes.__getitem__, among)):
            return None
        chosen: list[int] = []
        with closing(self._policy.victims(among)) as victims:
            while places_over > 0 or bytes_over > 0:
                victim = next(victims, None)
                if victim is None:
                    return None
                chosen.append(victim)
                places_over, bytes_over = places_over - 1, bytes_over - self.sizes_bytes[victim]
        return chosen
