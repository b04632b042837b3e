"""The true ranks, and the vectors, of what a module's slots hold, noted by whoever writes a slot; pure.

vLLM pads every slot to `max_lora_rank`, and the kernels compute at the true rank. In a worker each layer with LoRA has
one `SlotRanks` (`layers.py`). The engine loop or a background thread notes there each write of a slot; the kernels of
the engine loop read, or listen. No thread reads a slot during a write, because no running request uses the slot then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

# Actions that `at_once` has deferred in this thread; None outside of `at_once`.
_deferred: ContextVar[dict[Hashable, Callable[[], None]] | None] = ContextVar("deferred", default=None)


@contextmanager
def at_once() -> Iterator[None]:
    """Defer the actions of `after_writing` in this thread to the end of the block, once for each key.

    A caller that writes a slot in all layers uses the block, so that all ranks reach the device together.
    """
    if _deferred.get() is not None:  # a nested block: the outermost block runs the actions
        yield
        return
    actions: dict[Hashable, Callable[[], None]] = {}
    _deferred.set(actions)
    try:
        yield
    finally:
        # Cleared before the actions run: an action that calls `after_writing` runs at once.
        _deferred.set(None)
        for action in actions.values():
            action()


def after_writing(key: Hashable, action: Callable[[], None]) -> None:
    """Run `action` now, or at the end of `at_once` unless a later action of the same key replaces `action`."""
    if (actions := _deferred.get()) is None:
        action()
    else:
        actions[key] = action


class Vectors(NamedTuple):
    """What a slot's adapter does with a layer's outputs: `g * y + c`, behind the products.

    float32 `[out]`, in host memory, of this worker's outputs.
    """

    g: Any
    c: Any


class SlotRanks:
    """The rank of each slice, for every slot of one module; a slot without a note has the largest ranks.

    Args:
        slots: the number of slots.
        largest: the largest rank of each slice.
        is_empty: whether the slots are known to hold nothing.

    Attributes:
        version: grows with every write of any slot.
        vectors: by slot, where the slot's content has any.
    """

    def __init__(self, slots: int, largest: Sequence[int], *, is_empty: bool = False) -> None:
        self.largest = tuple(largest)
        self.version = 0
        self._ranks = [(0,) * len(self.largest) if is_empty else self.largest] * slots
        self._stamps = [0] * slots
        self.vectors: dict[int, Vectors] = {}
        self._write = threading.Lock()
        self._listeners: list[Callable[[int], None]] = []

    def listen(self, listener: Callable[[int], None]) -> None:
        """Call `listener(slot)` after every `written` and `turn`, in the writing thread."""
        self._listeners.append(listener)

    def writing(self, slot: int) -> None:
        """Note that a write of the slot begins: the earlier ranks no longer hold."""
        self._set(slot, self.largest)

    def written(self, slot: int, ranks: Sequence[int]) -> None:
        """Note the ranks of the slot's new content.

        Raises:
            ValueError: another number of ranks than slices, or a rank above the slot's.
        """
        if len(ranks) != len(self.largest) or not all(
            0 <= rank <= most for rank, most in zip(ranks, self.largest, strict=True)
        ):
            raise ValueError(f"ranks {tuple(ranks)} of slot {slot}, which holds at most {self.largest}")
        self._set(slot, tuple(ranks))
        self._tell(slot)

    def turn(self, slot: int, vectors: Vectors) -> None:
        """Give the slot's present content vectors, until the slot's next write."""
        with self._write:
            self.vectors[slot] = vectors
            self.version += 1  # plans are stale; the stamp stays, as panels are still of the content
        self._tell(slot)

    def __getitem__(self, slot: int) -> tuple[int, ...]:
        return self._ranks[slot]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._ranks)

    def stamp(self, slot: int) -> int:
        """Return a number that no earlier content of this slot had."""
        return self._stamps[slot]

    def _tell(self, slot: int) -> None:
        # Listeners run outside of the lock: a listener may read the ranks or take locks of its own.
        for listener in self._listeners:
            listener(slot)

    def _set(self, slot: int, ranks: tuple[int, ...]) -> None:
        # Writers are the engine loop and a background thread; `version += 1` alone is no atomic step.
        with self._write:
            self._ranks[slot] = ranks
            self.vectors.pop(slot, None)  # with each write, whoever writes: the next adapter may have none
            self._stamps[slot] += 1
            self.version += 1
