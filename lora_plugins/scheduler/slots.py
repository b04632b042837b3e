"""Who owns which slot of the workers' device memory, and in which order the slots were used."""

from __future__ import annotations

from collections.abc import Iterator


class Slots:
    """Slots by number, from 0; each has one owner or none. Owners are engine ids."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._slot_of: dict[int, int] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def has_free(self) -> bool:
        """Whether a slot has no owner."""
        return bool(self._free)

    def acquire(self, engine_id: int) -> int:
        """A free slot for an owner that has none."""
        slot = self._slot_of[engine_id] = self._free.pop()
        return slot

    def release(self, engine_id: int) -> None:
        """An owner's slot, if it has one, is free."""
        slot = self._slot_of.pop(engine_id, None)
        if slot is not None:
            self._free.append(slot)

    def used(self, engine_id: int) -> None:
        """A request uses an owner's slot."""
        self._slot_of[engine_id] = self._slot_of.pop(engine_id)

    def owners(self) -> Iterator[int]:
        """All owners, the least recently used one first."""
        return iter(list(self._slot_of))
