"""What batches know the generations of an adapter by: a number for each, of which none comes again."""

from __future__ import annotations

from itertools import count

from cachetools import LRUCache

_REMEMBERED = 10_000
_LATER_KEYS = 1 << 30  # above the ids that API servers give; batches hold them as int32


class Generations:
    """The key of each engine id's current generation: the engine id itself, until another generation begins."""

    def __init__(self) -> None:
        self._numbers = count(_LATER_KEYS)
        self._keys: LRUCache[int, int] = LRUCache(_REMEMBERED)  # by engine id
        self._engine_ids: LRUCache[int, int] = LRUCache(_REMEMBERED)  # by key

    def begin(self, engine_id: int) -> None:
        """Another generation is the current one: batches must not take it for an earlier one, even if that is gone."""
        key = next(self._numbers)
        self._keys[engine_id], self._engine_ids[key] = key, engine_id

    def restore(self, engine_id: int, key: int) -> None:
        """An earlier one is the current one again."""
        self._keys[engine_id] = key

    def key_of(self, engine_id: int) -> int:
        """What batches know the current generation by."""
        return int(self._keys.get(engine_id, engine_id))

    def engine_id_of(self, key: int) -> int:
        """The engine id of a generation, current or not."""
        return int(self._engine_ids.get(key, key))
