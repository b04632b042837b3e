"""Mistakes in the product that a soak must see: each put into a copy of the package, which the servers then run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).resolve().parents[1] / "lora_plugins"


class Mutant(NamedTuple):
    """`old`, which `file` has exactly once, becomes `new`."""

    file: str
    old: str
    new: str


MUTANTS = {
    "long-memory": Mutant(  # a fault is remembered for a minute
        "resolvers/known_versions.py",
        "faults_s = SourceUnavailable.retry_after_s",
        "faults_s = 60.0",
    ),
    "lost-lease": Mutant(  # a name that is served has no lease of its version
        "resolvers/versions.py",
        "self._store.leases.hand_over(stored.digest, asker.holder, holder or name)",
        "self._store.leases.release(stored.digest, asker.holder)",
    ),
    "stuck-breaker": Mutant(  # a source that has not answered is never asked again
        "resolvers/breaker.py",
        "if now < self._retry_at:",
        "if now < self._retry_at + 3600:",
    ),
}


def mutated(name: str, home: Path) -> Path:
    """A folder with the package that has this mistake."""
    mutant = MUTANTS[name]
    shutil.copytree(_PACKAGE, home / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    path = home / _PACKAGE.name / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times, expected once")
    path.write_text(text.replace(mutant.old, mutant.new))
    return home
