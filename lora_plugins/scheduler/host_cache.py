"""The host cache's budget: which adapters the workers hold in host memory, in bytes and in number.

Runs in the engine core process, for the planner, and holds numbers only: the weights are in the workers. The planner
notes loads, uses and evictions; the answers are whether adapters fit, and which to evict so that they fit. A `key`
names a generation of an adapter (`state.py` has the words).
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing

from cachetools import LRUCache

from lora_plugins.errors import LoRAPluginsError, NoFreeSlot, OutOfMemory
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.eviction_policies import EvictionPolicy
from lora_plugins.scheduler.messages import AdapterSpec

_REMEMBERED = 10_000  # engine ids whose last size is known


class HostCache:
    """Bytes and number of loaded and loading adapters, by key; the policy names the first to evict.

    Attributes:
        max_bytes: None for no limit. max_adapters: vLLM's `--max-cpu-loras`.
        sizes_bytes: of loaded and loading adapters, by key. used_bytes: the sum of `sizes_bytes`.
        known_bytes: spec and size of the current generation at its last load, by engine id.
        idle: keys of adapters that may be evicted at any time, a set in order. idle_bytes: the sum of their bytes.
    """

    def __init__(self, max_bytes: int | None, max_adapters: int, policy: EvictionPolicy[int]) -> None:
        self.max_bytes = max_bytes
        self.max_adapters = max_adapters
        self.used_bytes = 0
        self.sizes_bytes: dict[int, int] = {}
        self.idle: dict[int, None] = {}
        self.idle_bytes = 0
        self.known_bytes: LRUCache[int, tuple[AdapterSpec, int]] = LRUCache(_REMEMBERED)
        self._policy = policy

    def expected_bytes(self, spec: AdapterSpec) -> int:
        """The size that an adapter will have: as at its last load, else as its files say."""
        known = self.known_bytes.get(spec.engine_id)
        return known[1] if known is not None and known[0].path == spec.path else spec.size_bytes

    def over(self, sizes_bytes: Collection[int], without: Collection[int] = ()) -> tuple[int, int]:
        """How many places and bytes adapters of these sizes lack; below 0 where some are left.

        `without`: keys counted as evicted. Without a limit of bytes, the bytes are 0.
        """
        places = len(self.sizes_bytes) + len(sizes_bytes) - len(without) - self.max_adapters
        if self.max_bytes is None:
            return places, 0
        gone_bytes = sum(map(self.sizes_bytes.__getitem__, without))
        return places, self.used_bytes + sum(sizes_bytes) - gone_bytes - self.max_bytes

    def has_room(self, sizes_bytes: Collection[int], without: Collection[int] = ()) -> bool:
        """Whether adapters of these sizes fit beside all loaded and loading adapters but `without`."""
        return max(self.over(sizes_bytes, without)) <= 0

    def has_room_beside(self, sizes_bytes: Collection[int], staying: Collection[int]) -> bool:
        """Whether adapters of these sizes fit beside the keys `staying` alone."""
        size_bytes = sum(sizes_bytes) + sum(map(self.sizes_bytes.__getitem__, staying))
        is_small = self.max_bytes is None or size_bytes <= self.max_bytes
        return is_small and len(staying) + len(sizes_bytes) <= self.max_adapters

    def set_idle(self, key: int, *, is_idle: bool) -> None:
        """Note whether an adapter may be evicted at any time."""
        if is_idle is not (key in self.idle):
            self.idle_bytes += self.sizes_bytes[key] if is_idle else -self.sizes_bytes[key]
            if is_idle:
                self.idle[key] = None
            else:
                del self.idle[key]

    def reserve(self, key: int, size_bytes: int) -> None:
        """Count an adapter that is about to be loaded."""
        self.sizes_bytes[key] = size_bytes
        self.used_bytes += size_bytes

    def loaded(self, key: int, spec: AdapterSpec, size_bytes: int, cost_s: float, *, is_current: bool = True) -> None:
        """Count an adapter's real size, as workers report the size.

        `is_current`: later requests of the engine id get this generation, so its size is the one to expect.
        """
        if is_current:
            self.known_bytes[spec.engine_id] = spec, size_bytes
        self.set_idle(key, is_idle=False)
        self.used_bytes += size_bytes - self.sizes_bytes[key]
        self.sizes_bytes[key] = size_bytes
        self._policy.added(key, size_bytes, cost_s)

    def used(self, key: int) -> None:
        self._policy.used(key)

    def remove(self, key: int) -> int:
        """Count an adapter no longer; returns its bytes."""
        self._policy.removed(key)
        self.set_idle(key, is_idle=False)
        size_bytes = self.sizes_bytes.pop(key)
        self.used_bytes -= size_bytes
        return size_bytes

    def victims(
        self, sizes_bytes: Collection[int], also: Collection[int] = (), gone: Collection[int] = ()
    ) -> list[int] | None:
        """Keys to evict, in the policy's order, so that adapters of these sizes fit; None where no choice is enough.

        Idle keys and the keys in `also` may go; the keys in `gone`, each once, count as evicted.
        """
        places_over, bytes_over = self.over(sizes_bytes, gone)
        # `more` may go beside the idle keys; `fewer` are idle keys that have gone already.
        more, fewer = [key for key in also if key not in self.idle], [key for key in gone if key in self.idle]
        size_of = self.sizes_bytes.__getitem__
        # The sums show a lack of room without a walk through the policy's order.
        free_bytes = self.idle_bytes + sum(map(size_of, more)) - sum(map(size_of, fewer))
        if places_over > len(self.idle) + len(more) - len(fewer) or bytes_over > free_bytes:
            return None
        chosen: list[int] = []
        with closing(self._policy.victims({*self.idle, *more} if more else self.idle)) as victims:
            while places_over > 0 or bytes_over > 0:
                victim = next(victims, None)
                if victim is None:
                    return None
                if victim not in gone:
                    chosen.append(victim)
                    places_over, bytes_over = places_over - 1, bytes_over - self.sizes_bytes[victim]
        return chosen

    def why_never_fits(self, adapter: Adapter, staying: Collection[Adapter]) -> LoRAPluginsError | None:
        """Return why an adapter can have no place for as long as the adapters `staying` stay, or None."""
        size_bytes = self.expected_bytes(adapter.spec)
        if self.max_bytes is not None and size_bytes > self.max_bytes:
            return OutOfMemory(
                f"an adapter of {size_bytes} bytes in host memory",
                expected=f"at most {self.max_bytes}",
                remedy="raise LORA_PLUGINS_HOST_MAX_BYTES",
                adapter=adapter.spec.name,
            )
        # The generation before does not stay: this adapter replaces it, and inherits its pin.
        others = [other for other in staying if other not in (adapter, adapter.replaces)]
        their_bytes = sum(self.expected_bytes(other.spec) for other in others)
        is_too_large = self.max_bytes is not None and their_bytes + size_bytes > self.max_bytes
        if not is_too_large and len(others) < self.max_adapters:
            return None
        given = sum(not other.is_pinned for other in others)
        also = f" and {given} that workers were given, which nobody could load again," if given else ""
        return NoFreeSlot(
            f"{len(others) - given} pinned adapters{also} with {their_bytes} bytes in host memory",
            expected=f"room for {size_bytes} more in {self.max_bytes}" if is_too_large else "room for one more",
            remedy="unpin or remove an adapter, or raise LORA_PLUGINS_HOST_MAX_BYTES or --max-cpu-loras",
            adapter=adapter.spec.name,
        )
