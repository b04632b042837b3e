"""How long steps and copies into slots take: a copy that is short beside a step is made before it, not beside it.

In the background it leaves the others alone, and its adapter waits for a step or two, in which its slot is unassigned.
Before the step it delays all that run, by as much as it takes.
"""

from __future__ import annotations

_AVERAGED = 20


class StepTimes:
    """Means of the last steps with requests, and of the last copies, by byte."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._s_per_byte: float | None = None
        self._began_at: float | None = None

    def step_begins(self, now: float, *, is_running: bool) -> None:
        """A step begins; whether requests run in it."""
        if self._began_at is not None:
            self._step_s += (now - self._began_at - self._step_s) / _AVERAGED
        self._began_at = now if is_running else None

    def copied(self, size_bytes: int, copy_s: float) -> None:
        """A slot was written in the background."""
        s_per_byte = copy_s / max(1, size_bytes)
        before = s_per_byte if self._s_per_byte is None else self._s_per_byte
        self._s_per_byte = before + (s_per_byte - before) / _AVERAGED

    def is_short(self, size_bytes: int, running: int) -> bool:
        """Whether a copy costs the `running` adapters together less than the step that its own would wait."""
        return self._s_per_byte is not None and self._s_per_byte * size_bytes * running <= self._step_s
