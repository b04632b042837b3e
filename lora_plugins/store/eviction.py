"""Room in the store: what was used longest ago and is not leased is removed until the rest fits."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.errors import InvalidAdapter, NoFreeSlot, OutOfMemory
from lora_plugins.store.kept_parts import all_parts, discard
from lora_plugins.store.layout import Layout
from lora_plugins.store.leases import Leases
from lora_plugins.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Entry:
    """A published adapter, or something in quarantine.

    Attributes:
        used_at: its last use, in seconds since the epoch; 0 where that is not known.
        manifest: None where it cannot be read.
    """

    digest: str
    size_bytes: int
    used_at: float
    manifest: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Eviction:
    """What was removed, what stays because it is leased though it is older, and the bytes of all that is left."""

    removed: tuple[Entry, ...]
    leased: tuple[Entry, ...]
    left_bytes: int


def entries(layout: Layout) -> list[Entry]:
    """All published adapters, the one used longest ago first."""
    found = []
    for digest in layout.digests():
        manifest = None
        try:
            manifest = Manifest.read(layout.adapter(digest))
            size_bytes = manifest.size_bytes
        except InvalidAdapter:
            try:
                size_bytes = sum(entry.stat().st_size for entry in os.scandir(layout.adapter(digest)))
            except OSError:
                continue  # another process has just removed it, or it is no directory
        try:
            used_at = (layout.folder("uses") / digest).stat().st_mtime
        except FileNotFoundError:
            used_at = 0.0
        found.append(Entry(digest, size_bytes, used_at, manifest))
    return sorted(found, key=_by_use)


def evict(known: Iterable[Entry], max_bytes: int, remove: Callable[[Entry], bool]) -> Eviction:
    """Remove entries in their order until the rest fits; `remove` answers False for one that is leased."""
    known = list(known)
    left_bytes = sum(entry.size_bytes for entry in known)
    removed: list[Entry] = []
    leased: list[Entry] = []
    for entry in known:
        if left_bytes <= max_bytes:
            break
        if remove(entry):
            removed.append(entry)
            left_bytes -= entry.size_bytes
        else:
            leased.append(entry)
    return Eviction(tuple(removed), tuple(leased), left_bytes)


def make_room(
    layout: Layout,
    leases: Leases,
    needed_bytes: int,
    max_bytes: int | None,
    on_evict: Callable[[str, int], None] | None = None,
    *,
    but_parts: Path | None = None,
) -> None:
    """Remove adapters until `needed_bytes` more fit under `max_bytes`; `on_evict` gets the digest and bytes of each.

    Before them go the parts of fetches that failed, but for those at `but_parts`, which are among `needed_bytes`.

    Raises:
        OutOfMemory: it does not fit even in an empty store.
        NoFreeSlot: what would have to go is leased.
    """
    if max_bytes is None:
        return
    if needed_bytes > max_bytes:
        raise OutOfMemory(
            f"an adapter of {needed_bytes} bytes",
            expected=f"at most {max_bytes}, the store's budget",
            remedy="raise LORA_PLUGINS_STORE_MAX_BYTES",
        )
    # First the downloads: what is published meanwhile is then counted twice, not never.
    room_bytes = max_bytes - needed_bytes - pending_bytes(layout)
    known = entries(layout)
    parts = [kept for kept in all_parts(layout) if kept.path != but_parts]
    parts_bytes = sum(kept.size_bytes for kept in parts)
    free_bytes = room_bytes - sum(entry.size_bytes for entry in known)
    for kept in parts:
        if parts_bytes <= free_bytes:
            break
        discard(kept.path)
        parts_bytes -= kept.size_bytes
    room_bytes -= parts_bytes
    eviction = evict(known, room_bytes, lambda entry: remove(layout, leases, entry.digest))
    for entry in eviction.removed:
        if on_evict is not None:
            on_evict(entry.digest, entry.size_bytes)
    if eviction.left_bytes > room_bytes:
        raise NoFreeSlot(
            f"a store of {max_bytes} bytes of which engines still use all that would have to go",
            expected=f"{needed_bytes} bytes that can be made free",
            remedy="ask again later, unload adapters, or raise LORA_PLUGINS_STORE_MAX_BYTES",
        )


def remove(layout: Layout, leases: Leases, digest: str) -> bool:
    """Remove one adapter unless it is leased; returns whether it is gone."""
    with leases.guard(digest):
        if leases.holders(digest):
            return False
        removed = layout.new_quarantine(digest, ".removed")
        try:
            os.rename(layout.adapter(digest), removed)
        except FileNotFoundError:
            return True
        shutil.rmtree(layout.folder("leases") / digest, ignore_errors=True)
    shutil.rmtree(removed, ignore_errors=True)
    for folder in ("uses", "damaged"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(layout.folder(folder) / digest)
    return True


def pending_bytes(layout: Layout) -> int:
    """Bytes that downloads under way will need."""
    return sum(temporary.needed_bytes for temporary in layout.temporaries() if temporary.path.is_dir())


def quarantined(layout: Layout) -> list[Entry]:
    """What was damaged; no engine ever gets a path in there."""
    found = []
    for entry in os.scandir(layout.folder("quarantine")):
        size_bytes = sum(file.stat().st_size for file in os.scandir(entry.path)) if entry.is_dir() else 0
        found.append(Entry(entry.name, size_bytes, entry.stat().st_mtime))
    return sorted(found, key=_by_use)


def discard_quarantined(layout: Layout, name: str) -> None:
    """Remove one entry of the quarantine; one that is gone already is no error."""
    shutil.rmtree(layout.folder("quarantine") / name, ignore_errors=True)


def _by_use(entry: Entry) -> tuple[float, str]:
    return entry.used_at, entry.digest
