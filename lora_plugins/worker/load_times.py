"""How long this worker's steps and loads take, so that a load shorter than a step is done in the step.

A load in a background thread shares the interpreter, the memory and the cores with the steps beside the load. For a
small adapter, all of these steps together lose more time than the load alone takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds. A step without a batch delays no running request, but the next request may come at any moment.
LONGEST_WITHOUT_BATCH_S = 0.05
_DECAY = 0.9  # the weight of earlier measurements at each new measurement


class LoadTimes:
    """Measures steps with a batch, and loads; a load is expected to take a fixed time and a time for each byte."""

    def __init__(self) -> None:
        self._step_s = 0.0  # the running mean
        self._left_s = 0.0  # the time that this step may still spend on loads
        self._began_at: float | None = None
        # Over the loads, weighted: the number, and the sums of bytes, seconds, bytes² and bytes x seconds (least
        # squares).
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def begin_step(self, *, has_batch: bool) -> None:
        """Note that a step begins, with its commands."""
        self._began_at = None
        self._left_s = self._step_s if has_batch else LONGEST_WITHOUT_BATCH_S

    def begin_batch(self) -> None:
        """Note that the commands have been carried out, and that the step's batch comes next."""
        self._began_at = time.perf_counter()

    def end_batch(self) -> None:
        """Note that the step's batch, if any, has been computed."""
        if self._began_at is not None:
            took_s, self._began_at = time.perf_counter() - self._began_at, None
            self._step_s = _DECAY * self._step_s + (1 - _DECAY) * took_s if self._step_s else took_s

    def take(self, size_bytes: int) -> bool:
        """Take the time of a load of `size_bytes` from this step's rest; False where the rest is too short."""
        expected_s = self.expected_s(size_bytes)
        if expected_s is None or expected_s >= self._left_s:
            return False
        self._left_s -= expected_s
        return True

    def expected_s(self, size_bytes: int) -> float | None:
        """Return the expected seconds of a load; None while unknown (0 bytes: size not known)."""
        n, x, y, xx, xy = self._sums
        if not n or not size_bytes:
            return None
        mean_x, mean_y = x / n, y / n
        spread = xx / n - mean_x**2
        # Loads of a single size say nothing of the fixed part: then the whole time counts as time for bytes.
        by_byte = mean_y / mean_x
        if spread > (0.01 * mean_x) ** 2:
            by_byte = min(max((xy / n - mean_x * mean_y) / spread, 0.0), by_byte)
        return mean_y + by_byte * (size_bytes - mean_x)

    @contextmanager
    def of_load(self, size_bytes: int) -> Iterator[None]:
        """Measure a load of `size_bytes`, in any thread; a failed load is not counted.

        In a background thread the time includes waits for the engine loop: a load that is short there is short in the
        step.
        """
        began_at = time.perf_counter()
        yield
        if size_bytes:
            took_s = time.perf_counter() - began_at
            new = (1.0, float(size_bytes), took_s, float(size_bytes) ** 2, size_bytes * took_s)
            self._sums = tuple(_DECAY * old + one for old, one in zip(self._sums, new, strict=True))  # type: ignore[assignment]
