"""What a soak prints as it goes and at its end, and what is kept of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS
from benchmarks.soak.journal import Journal


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
