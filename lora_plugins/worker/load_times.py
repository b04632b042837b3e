"""How long this worker's steps and its loads take, so that a load shorter than a step is done in the step.

A load in a background thread shares the interpreter, the memory and the cores with the steps beside it: of a small
adapter, all of these together become slower by more than the load takes by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_WITHOUT_BATCH_S = 0.05
_DECAY = 0.9  # of what was measured before, with each new measurement


class LoadTimes:
    """Measures steps with a batch, and loads; loads are expected to take a fixed time and a time for each byte."""

    def __init__(self) -> None:
        self._step_s = 0.0  # the mean
        self._left_s = 0.0  # what this step may still spend on loads
        self._began_at: float | None = None
        # Of the loads, weighted: their number, and the sums of bytes, seconds, bytes² and bytes x seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def begin_step(self, *, has_batch: bool) -> None:
        """A step begins, with its commands."""
        self._began_at = None
        self._left_s = self._step_s if has_batch else LONGEST_WITHOUT_BATCH_S

    def begin_batch(self) -> None:
        """The commands have been carried out; the step's batch comes next."""
        self._began_at = time.perf_counter()

    def end_batch(self) -> None:
        """The step's batch, if it had one, has been computed."""
        if self._began_at is not None:
            took_s, self._began_at = time.perf_counter() - self._began_at, None
            self._step_s = _DECAY * self._step_s + (1 - _DECAY) * took_s if self._step_s else took_s

    def take(self, size_bytes: int) -> bool:
        """Whether the rest of this step's time is more than a load of so many bytes needs, which then is taken."""
        expected_s = self.expected_s(size_bytes)
        if expected_s is None or expected_s >= self._left_s:
            return False
        self._left_s -= expected_s
        return True

    def expected_s(self, size_bytes: int) -> float | None:
        """What a load of so many bytes takes; None where that cannot be known yet (0 bytes: size not known)."""
        n, x, y, xx, xy = self._sums
        if not n or not size_bytes:
            return None
        mean_x, mean_y = x / n, y / n
        spread = xx / n - mean_x**2
        # Loads of one size say nothing of the fixed part, and as much for each byte as there can be is assumed.
        by_byte = mean_y / mean_x
        if spread > (0.01 * mean_x) ** 2:
            by_byte = min(max((xy / n - mean_x * mean_y) / spread, 0.0), by_byte)
        return mean_y + by_byte * (size_bytes - mean_x)

    @contextmanager
    def of_load(self, size_bytes: int) -> Iterator[None]:
        """Around a load of so many bytes, in any thread; one that fails is not counted.

        In a background thread it waits for the engine loop too: what is short there is short in the step.
        """
        began_at = time.perf_counter()
        yield
        if size_bytes:
            took_s = time.perf_counter() - began_at
            new = (1.0, float(size_bytes), took_s, float(size_bytes) ** 2, size_bytes * took_s)
            self._sums = tuple(_DECAY * old + one for old, one in zip(self._sums, new, strict=True))  # type: ignore[assignment]
