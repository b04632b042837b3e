"""The true ranks of what lies in a module's slots, learned when a slot is written; pure.

vLLM pads every slot to `max_lora_rank`. What was written is noted here, by whoever writes: the engine loop, or a
background thread. A slot is never read while it is written, for no running request uses it then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class _Pending(threading.local):
    """What `at_once` has deferred in this thread; None outside of it."""

    actions: dict[Hashable, Callable[[], None]] | None = None


_pending = _Pending()


@contextmanager
def at_once() -> Iterator[None]:
    """Have what `after_writing` is given within this, by this thread, done at the end of it, once for each key.

    Around what writes a slot in all layers, so that their ranks reach the device together.
    """
    if _pending.actions is not None:  # within another: at the end of that one
        yield
        return
    _pending.actions = {}
    try:
        yield
    finally:
        actions, _pending.actions = _pending.actions, None
        for action in actions.values():
            action()


def after_writing(key: Hashable, action: Callable[[], None]) -> None:
    """Do `action` now, or at the end of `at_once`, if another of this key has not taken its place."""
    if _pending.actions is None:
        action()
    else:
        _pending.actions[key] = action


class SlotRanks:
    """For every slot of one module the rank of each slice; a slot of which nothing was noted has the largest ones.

    Args:
        slots: their number. largest: of each slice.
        is_empty: whether the slots are known to hold nothing.

    Attributes:
        version: grows with every write of any slot.
    """

    def __init__(self, slots: int, largest: Sequence[int], *, is_empty: bool = False) -> None:
        self.largest = tuple(largest)
        self.version = 0
        self._ranks = [(0,) * len(self.largest) if is_empty else self.largest] * slots
        self._stamps = [0] * slots
        self._write = threading.Lock()
        self._listeners: list[Callable[[int], None]] = []

    def listen(self, listener: Callable[[int], None]) -> None:
        """Have `listener(slot)` called after every `written`, in the thread that wrote."""
        self._listeners.append(listener)

    def writing(self, slot: int) -> None:
        """Note that the slot is about to be written: what was known of it holds no longer."""
        self._set(slot, self.largest)

    def written(self, slot: int, ranks: Sequence[int]) -> None:
        """Note what the slot holds now.

        Raises:
            ValueError: not one rank per slice, or one that is larger than the slot.
        """
        if len(ranks) != len(self.largest) or not all(
            0 <= rank <= most for rank, most in zip(ranks, self.largest, strict=True)
        ):
            raise ValueError(f"ranks {tuple(ranks)} of slot {slot}, which holds at most {self.largest}")
        self._set(slot, tuple(ranks))
        for listener in self._listeners:
            listener(slot)

    def __getitem__(self, slot: int) -> tuple[int, ...]:
        return self._ranks[slot]

    def stamp(self, slot: int) -> int:
        """A number that no earlier content of this slot had."""
        return self._stamps[slot]

    def _set(self, slot: int, ranks: tuple[int, ...]) -> None:
        with self._write:
            self._ranks[slot] = ranks
            self._stamps[slot] += 1
            self.version += 1


def true_ranks(
    lora_a: Any, lora_b: Any, largest: Sequence[int], expand: Callable[[Any, Any], tuple[Any, Any]] | None = None
) -> tuple[int, ...]:
    """The rank of each slice of what vLLM's `set_lora(index, lora_a, lora_b)` is given.

    Args:
        lora_a: `[rank, in]`, shared by all slices, or a list with one of these or None for each slice.
        lora_b: as `lora_a`, `[out, rank]`; read only by `expand`.
        largest: the slot's rank for each slice.
        expand: where a list has fewer members than slices, vLLM's `expand_packed_lora(lora_a, lora_b)`, which makes
            one of each for every slice (vllm/lora/layers/column_parallel_linear.py, 0.32).
    """
    if not isinstance(lora_a, list | tuple):
        return tuple(min(int(lora_a.shape[0]), most) for most in largest)
    if len(lora_a) != len(largest):
        if expand is None:
            return tuple(largest)
        lora_a, _ = expand(lora_a, lora_b)
    return tuple(0 if a is None else min(int(a.shape[0]), most) for a, most in zip(lora_a, largest, strict=True))
