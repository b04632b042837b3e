"""Which generation of an adapter an engine id finds now, by the keys that workers and batches know.

Runs in the engine core process, for the planner. vLLM's calls name engine ids (`lora_int_id`); commands, batches and
the host cache name keys, one for each generation. Three facts are remembered for each id: the current generation's key;
the key that its weights came under, which is another after a move; and the adapter that the id's requests moved to.
"""

from __future__ import annotations

from itertools import count

from cachetools import LRUCache

from lora_plugins.scheduler.messages import AdapterSpec

_REMEMBERED = 10_000
_LATER_KEYS = 1 << 30  # above the ids that API servers give; batches hold them as int32


class Generations:
    """The key of each engine id's current generation: the engine id itself, until another generation begins.

    No key comes again. An id whose requests have moved to another id stands for the other's generation.
    """

    def __init__(self) -> None:
        self._numbers = count(_LATER_KEYS)
        # Bounded: every version that is ever served has an id.
        # In one cache, so that no key is remembered without its weights. By engine id:
        self._keys: LRUCache[int, tuple[int, int]] = LRUCache(_REMEMBERED)  # the key, and the key that brought weights
        self._engine_ids: LRUCache[int, int] = LRUCache(_REMEMBERED)  # by key
        self._successors: LRUCache[int, AdapterSpec] = LRUCache(_REMEMBERED)  # by engine ids whose requests have moved

    def begin(self, engine_id: int) -> None:
        """Begin another generation, under a key that batches have never seen."""
        key = next(self._numbers)
        self.restore(engine_id, key, key)
        self._successors.pop(engine_id, None)

    def restore(self, engine_id: int, key: int, weights_key: int) -> None:
        """Make an earlier generation the current one again, after an eviction and another load too."""
        self._keys[engine_id], self._engine_ids[key] = (key, weights_key), engine_id

    def key_of(self, engine_id: int) -> int:
        """The key of the current generation."""
        return int(self._keys.get(engine_id, (engine_id, engine_id))[0])

    def weights_key_of(self, engine_id: int) -> int:
        """The key of the generation that brought the weights of the current generation."""
        return int(self._keys.get(engine_id, (engine_id, engine_id))[1])

    def follow(self, engine_id: int, successor: AdapterSpec) -> None:
        """Have an engine id stand for another id's adapter from now on."""
        self._successors[engine_id] = successor

    def successor_of(self, engine_id: int) -> AdapterSpec | None:
        """The adapter that an engine id stands for; None where the id stands for its own."""
        successor = None
        while (following := self._successors.get(engine_id)) is not None:
            successor, engine_id = following, following.engine_id
        return successor

    def engine_id_of(self, key: int) -> int:
        """The engine id of a generation, current or not."""
        return int(self._engine_ids.get(key, key))
