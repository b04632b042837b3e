"""Room for an adapter under the byte budget, by removing what was used longest ago and is not leased."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from lora_plugins.errors import InvalidAdapter, NoFreeSlot, OutOfMemory
from lora_plugins.store.layout import Layout
from lora_plugins.store.leases import Leases
from lora_plugins.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Entry:
    """A published adapter and its last use, in seconds since the epoch."""

    digest: str
    size_bytes: int
    used_at: float


def entries(layout: Layout) -> list[Entry]:
    """All published adapters, the one used longest ago first."""
    found = []
    for digest in layout.digests():
        try:
            size_bytes = Manifest.read(layout.adapter(digest)).size_bytes
        except InvalidAdapter:
            try:
                size_bytes = sum(entry.stat().st_size for entry in os.scandir(layout.adapter(digest)))
            except OSError:
                continue  # another process has just removed it, or it is no directory
        try:
            used_at = (layout.folder("uses") / digest).stat().st_mtime
        except FileNotFoundError:
            used_at = 0.0
        found.append(Entry(digest, size_bytes, used_at))
    return sorted(found, key=lambda entry: (entry.used_at, entry.digest))


def make_room(
    layout: Layout,
    leases: Leases,
    needed_bytes: int,
    max_bytes: int | None,
    on_evict: Callable[[str, int], None] | None = None,
) -> list[str]:
    """Remove adapters until `needed_bytes` more fit under `max_bytes`; tells and returns what was removed.

    Raises:
        OutOfMemory: it does not fit even in an empty store.
        NoFreeSlot: what would have to go is leased.
    """
    if max_bytes is None:
        return []
    if needed_bytes > max_bytes:
        raise OutOfMemory(
            f"an adapter of {needed_bytes} bytes",
            expected=f"at most {max_bytes}, the store's budget",
            remedy="raise LORA_PLUGINS_STORE_MAX_BYTES",
        )
    arriving = arriving_bytes(layout)  # first: what is published meanwhile is then counted twice, not never
    known = entries(layout)
    excess = sum(entry.size_bytes for entry in known) + arriving + needed_bytes - max_bytes
    removed = []
    for entry in known:
        if excess <= 0:
            break
        if remove(layout, leases, entry.digest):
            removed.append(entry.digest)
            excess -= entry.size_bytes
            if on_evict is not None:
                on_evict(entry.digest, entry.size_bytes)
    if excess > 0:
        raise NoFreeSlot(
            f"a store of {max_bytes} bytes of which engines still use all that would have to go",
            expected=f"{needed_bytes} bytes that can be made free",
            remedy="ask again later, unload adapters, or raise LORA_PLUGINS_STORE_MAX_BYTES",
        )
    return removed


def remove(layout: Layout, leases: Leases, digest: str) -> bool:
    """Remove one adapter unless it is leased; returns whether it is gone."""
    with leases.guard(digest):
        if leases.holders(digest):
            return False
        aside = layout.folder("quarantine") / f"{digest}.{os.urandom(4).hex()}.removed"
        try:
            os.rename(layout.adapter(digest), aside)
        except FileNotFoundError:
            return True
    shutil.rmtree(aside, ignore_errors=True)
    for folder in ("uses", "damaged"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(layout.folder(folder) / digest)
    return True


def arriving_bytes(layout: Layout) -> int:
    """Bytes that fetches under way will need; each announces its own in its directory's name."""
    sizes = (entry.name.rpartition(".")[2] for entry in os.scandir(layout.folder("tmp")) if entry.is_dir())
    return sum(int(size) for size in sizes if size.isdigit())
