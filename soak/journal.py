"""What happened, one JSON object a line, what was wrong, and what a soak prints and keeps of it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS


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


def progress(journal: Journal, latest: Mapping[str, float], resident_mb: Mapping[str, float], seconds: float) -> str:
    """One line."""
    kinds: Counter[str] = Counter()
    for (what, _), count in journal.counts.items():
        kinds[what.partition(" ")[0]] += count
    memory = ", ".join(f"{name} {value:.0f} MB" for name, value in resident_mb.items())
    return (
        f"{journal.at_s:6.0f} of {seconds:.0f} s: {kinds['request']} requests, {kinds['operator']} calls, "
        f"{kinds['source']} changes, {kinds['fault']} faults; held {latest.get('lora_plugins_held', 0):.0f}, "
        f"served {latest.get('served', 0):.0f}; {memory}; {len(journal.violations)} violations"
    )


def table(journal: Journal) -> str:
    """What was done, what came of it, and the longest of each."""
    outcomes: dict[str, Counter[str]] = {}
    for (what, outcome), count in journal.counts.items():
        outcomes.setdefault(what, Counter())[outcome] += count
    lines = [f"{'what':28} {'count':>7} {'longest':>9}  outcomes"]
    for what, found in sorted(outcomes.items()):
        text = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(found.items()))
        lines.append(f"{what:28} {found.total():7} {journal.longest_s[what]:7.2f} s  {text}")
    return "\n".join(lines)


def kept(name: str, journal: Journal, figures: Mapping[str, Any], began: Mapping[str, object]) -> Path:
    """`benchmarks/results/soak-<name>.json`; `began`: the circumstances that it began in, as a soak takes a while."""
    counts: dict[str, dict[str, int]] = {}
    for (what, outcome), count in sorted(journal.counts.items()):
        counts.setdefault(what, {})[outcome] = count
    longest_s = {what: round(took_s, 2) for what, took_s in sorted(journal.longest_s.items())}
    rows = {**figures, "counts": counts, "longest_s": longest_s, "violations": journal.violations[:50]}
    path = RESULTS / f"soak-{name}.json"
    path.write_text(json.dumps({**began, "rows": rows}, indent=1) + "\n")
    return path
