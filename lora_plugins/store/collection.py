"""What leaves a store for it to fit a budget, decided before anything is touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lora_plugins.store.eviction import Entry
from lora_plugins.store.layout import Layout


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes, what would go but is leased, and whether the rest fits.

    Attributes:
        remove: adapters to remove, the one used longest ago first.
        leased: adapters that are older than the last one removed, but that a living process may read.
        before_bytes, after_bytes: of all published adapters.
        fits: whether `after_bytes` is within the budget.
    """

    remove: tuple[Entry, ...]
    leased: tuple[Entry, ...]
    before_bytes: int
    after_bytes: int
    fits: bool


def plan(known: Iterable[Entry], is_leased: Callable[[str], bool], max_bytes: int) -> Plan:
    """Choose as the store's own eviction does; `known` comes with the one used longest ago first."""
    entries = list(known)
    before = after = sum(entry.size_bytes for entry in entries)
    remove: list[Entry] = []
    leased: list[Entry] = []
    for entry in entries:
        if after <= max_bytes:
            break
        if is_leased(entry.digest):
            leased.append(entry)
        else:
            remove.append(entry)
            after -= entry.size_bytes
    return Plan(tuple(remove), tuple(leased), before, after, after <= max_bytes)


def quarantined(layout: Layout) -> list[Entry]:
    """What was damaged and put aside; no engine is ever told of a path in there."""
    found = []
    for entry in os.scandir(layout.folder("quarantine")):
        size_bytes = sum(file.stat().st_size for file in os.scandir(entry.path)) if entry.is_dir() else 0
        found.append(Entry(entry.name, size_bytes, entry.stat().st_mtime))
    return sorted(found, key=lambda item: (item.used_at, item.digest))


def discard_quarantined(layout: Layout, name: str) -> None:
    """Remove one entry of the quarantine; one that is gone already is no error."""
    shutil.rmtree(layout.folder("quarantine") / name, ignore_errors=True)
