"""What happened, one JSON object a line, and what was wrong: read when a seed fails."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any


class Journal:
    """The event log of one soak, its counts, and its violations.

    Attributes:
        counts: of everything that was written, by kind and outcome.
        violations: what broke an invariant, with the time since the start in seconds.
    """

    def __init__(self, path: Path, *, prints: bool = True) -> None:
        self.path = path
        self._file = path.open("w", buffering=1)
        self._prints = prints
        self.started = time.monotonic()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.longest_s: dict[str, float] = {}
        self.violations: list[dict[str, Any]] = []

    @property
    def at_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def write(self, kind: str, what: str, outcome: str | int, took_s: float = 0.0, **more: Any) -> None:
        """Note one thing that was done, and what became of it."""
        self.counts[f"{kind} {what}", str(outcome)] += 1
        key = f"{kind} {what}"
        self.longest_s[key] = max(self.longest_s.get(key, 0.0), took_s)
        self._line({"at_s": round(self.at_s, 3), "kind": kind, "what": what, "outcome": outcome,
                    "took_s": round(took_s, 3), **more})  # fmt: skip

    def violation(self, invariant: str, text: str, **more: Any) -> None:
        """An invariant does not hold: the soak has failed, and goes on to show what else."""
        found = {"at_s": round(self.at_s, 3), "invariant": invariant, "text": text, **more}
        self.violations.append(found)
        self._line({"kind": "VIOLATION", **found})
        if self._prints and len(self.violations) <= 50:
            print(f"VIOLATION at {found['at_s']:.1f} s, {invariant}: {text} {more or ''}", flush=True)

    def close(self) -> None:
        self._file.close()

    def _line(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, default=str) + "\n")
