"""Room in the store: remove the least recently used adapters without a lease until the new adapter fits."""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.errors import InvalidAdapter, NoFreeSlot, OutOfMemory, SourceUnavailable
from lora_plugins.store.inventory import Inventory
from lora_plugins.store.layout import Layout, files_bytes
from lora_plugins.store.leases import Leases
from lora_plugins.store.manifest import Manifest

_SHARE = 0.8
_KEPT_FREE_SHARE, _KEPT_FREE_BYTES = 0.05, 1 << 30


@dataclass(frozen=True, slots=True)
class Entry:
    """A published adapter, or an entry of the quarantine.

    Attributes:
        used_at: the last use, in seconds since the epoch; 0 where unknown.
        manifest: None where the manifest cannot be read.
    """

    digest: str
    size_bytes: int
    used_at: float
    manifest: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Eviction:
    """Entries removed, older entries that stay because of a lease, and the bytes of all entries left."""

    removed: tuple[Entry, ...]
    leased: tuple[Entry, ...]
    left_bytes: int


class Room(enum.Enum):
    """What became of a search for room."""

    FOUND = enum.auto()  # without a removal: another fetch has left the room
    MADE = enum.auto()
    LEASED = enum.auto()  # leases are in the way
    NONE = enum.auto()

    @property
    def is_there(self) -> bool:
        """Whether a write finds room by now."""
        return self in (Room.FOUND, Room.MADE)


def entries(layout: Layout) -> list[Entry]:
    """All published adapters, the least recently used first."""
    found = []
    for digest in layout.digests():
        manifest = None
        try:
            manifest = Manifest.read(layout.adapter(digest))
            size_bytes = manifest.size_bytes
        except (InvalidAdapter, SourceUnavailable):
            try:
                size_bytes = files_bytes(layout.adapter(digest))
            except OSError:
                continue  # another process has just removed it, or it is no directory
        try:
            used_at = (layout.folder("uses") / digest).stat().st_mtime
        except FileNotFoundError:
            used_at = 0.0
        found.append(Entry(digest, size_bytes, used_at, manifest))
    return sorted(found, key=_by_use)


def share_of_disk(layout: Layout, inventory: Inventory) -> tuple[int, int]:
    """The budget where the settings name none, and the bytes to keep free on the disk.

    The budget is 80 % of the store's bytes plus the free bytes, so that a restart finds the same budget.
    """
    disk = os.statvfs(layout.root)
    stored_bytes = inventory.look() + sum(entry.size_bytes for entry in quarantined(layout))
    whole_bytes = stored_bytes + disk.f_bavail * disk.f_frsize
    return int(_SHARE * whole_bytes), min(_KEPT_FREE_BYTES, int(_KEPT_FREE_SHARE * disk.f_blocks * disk.f_frsize))


def evict(known: Iterable[Entry], max_bytes: int, remove: Callable[[Entry], bool]) -> Eviction:
    """Remove entries in their order until the rest fits; `remove` returns False for a leased entry."""
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


@dataclass
class Evictor:
    """Removes adapters that nobody leases from one store, the least recently used first.

    Attributes:
        on_evict: called with the digest and bytes of each adapter that goes to make room, in a thread.
    """

    layout: Layout
    leases: Leases
    inventory: Inventory
    on_evict: Callable[[str, int], None] | None = None

    def make_room(
        self, needed_bytes: int, max_bytes: int | None, *, kept_free_bytes: int = 0, own: Path | None = None
    ) -> Room:
        """Remove adapters until `needed_bytes` more fit under `max_bytes`.

        Entries of the quarantine go first. Where the disk would have less than `kept_free_bytes` left, more entries go.
        The temporary directory `own` is the caller's, and does not count as a download of another.

        Raises:
            OutOfMemory: the adapter does not fit even into an empty store.
        """
        if max_bytes is None:
            return Room.FOUND
        if needed_bytes > max_bytes:
            raise OutOfMemory(
                f"an adapter of {needed_bytes} bytes",
                expected=f"at most {max_bytes}, the store's budget",
                remedy="raise LORA_PLUGINS_STORE_MAX_BYTES",
            )
        # Count downloads first: an adapter published between the two counts is then counted twice, not never.
        pending = pending_bytes(self.layout, besides=own)
        stored_bytes = self.inventory.look()
        damaged = quarantined(self.layout)
        damaged_bytes = sum(entry.size_bytes for entry in damaged)
        budget_bytes = max_bytes
        if kept_free_bytes:
            disk = os.statvfs(self.layout.root)
            used_bytes = stored_bytes + damaged_bytes
            budget_bytes = min(max_bytes, used_bytes + disk.f_bavail * disk.f_frsize - kept_free_bytes)
        if needed_bytes > budget_bytes:
            raise OutOfMemory(
                f"a disk below the store on which {max(0, budget_bytes)} bytes can be used",
                expected=f"{needed_bytes} for the adapter, beside {kept_free_bytes} that stay free",
                remedy="free space, or set LORA_PLUGINS_STORE_MAX_BYTES or LORA_PLUGINS_STORE_DIR",
            )
        room_bytes = budget_bytes - needed_bytes - pending
        chosen = self.to_go(stored_bytes - room_bytes)
        if chosen is None:  # keep all adapters where removing them would not free enough
            return Room.LEASED
        for entry in damaged:
            if damaged_bytes <= room_bytes - stored_bytes:
                break
            discard_quarantined(self.layout, entry.digest)
            damaged_bytes -= entry.size_bytes
        over_bytes = stored_bytes + damaged_bytes - room_bytes
        in_order = itertools.chain(chosen, self.inventory.oldest(self.leases.is_ours))
        while over_bytes > 0:
            digest = next(in_order, None)
            if digest is None:  # another process has leased the rest meanwhile
                return Room.LEASED
            over_bytes -= self.evict(digest)
        return Room.MADE

    def evict(self, digest: str) -> int:
        """Remove one adapter without a lease; returns the bytes freed."""
        size_bytes = self.inventory.size_bytes(digest)
        if self.leases.holders(digest) or not self.remove(digest):
            return 0
        self.inventory.forget(digest)
        if self.on_evict is not None:
            self.on_evict(digest, size_bytes)
        return size_bytes

    def to_go(self, wanted_bytes: int, *, least: int = 0, kept: str = "") -> list[str] | None:
        """The least recently used without a lease, but not `kept`: at least `wanted_bytes` and `least` adapters.

        Adapters that only silent hosts lease go last. None where all adapters together free too little.
        """
        chosen: list[str] = []
        silent: list[str] = []
        if wanted_bytes <= 0 and least <= 0:
            return chosen
        holders, oldest = self.leases.holders, self.inventory.oldest(self.leases.is_ours)
        free = (digest for digest in oldest if digest != kept and not holders(digest))
        for digest, is_last in itertools.chain(((it, False) for it in free), ((it, True) for it in silent)):
            if not is_last and self.leases.is_of_the_silent(digest):
                silent.append(digest)
                continue
            chosen.append(digest)
            wanted_bytes -= self.inventory.size_bytes(digest)
            if wanted_bytes <= 0 and len(chosen) >= least:
                return chosen
        return None

    def remove(self, digest: str) -> bool:
        """Remove one adapter unless it is leased; returns whether it is gone."""
        with self.leases.guard(digest):
            if self.leases.holders(digest):
                return False
            # Before the adapter: what a killed process leaves then belongs to an adapter, which the next removal finds.
            shutil.rmtree(self.layout.folder("leases") / digest, ignore_errors=True)
            for path in filter(None, (_index_of(self.layout, digest), self.layout.folder("uses") / digest)):
                path.unlink(missing_ok=True)
            # Rename under the guard, delete outside: a delete of gigabytes must not block other leases. A killed
            # process leaves a directory that the next start sweeps.
            removed = self.layout.new_quarantine(digest, ".removed")
            try:
                os.rename(self.layout.adapter(digest), removed)
            except FileNotFoundError:
                return True
        shutil.rmtree(removed, ignore_errors=True)
        # The mark describes the removed copy, not the next copy.
        (self.layout.folder("damaged") / digest).unlink(missing_ok=True)
        return True


def all_used(max_bytes: int | None, needed_bytes: int) -> NoFreeSlot:
    """The error for `Room.LEASED` of `Evictor.make_room`."""
    return NoFreeSlot(
        f"a store of {max_bytes} bytes of which engines still use all that would have to go",
        expected=f"{needed_bytes} bytes that can be made free",
        remedy="ask again later, unload adapters, or raise LORA_PLUGINS_STORE_MAX_BYTES",
    )


def _index_of(layout: Layout, digest: str) -> Path | None:
    """The index file of an adapter, by the adapter's manifest; None where unknown, or of another digest."""
    with contextlib.suppress(InvalidAdapter, SourceUnavailable, OSError):
        manifest = Manifest.read(layout.adapter(digest))
        index = layout.index(manifest.uri, manifest.version, manifest.converted.form if manifest.converted else "")
        if index.read_text(errors="replace") == digest:
            return index
    return None


def pending_bytes(layout: Layout, *, besides: Path | None = None, is_rest: bool = False) -> int:
    """Bytes that running downloads take in the end, but not that of the directory `besides`.

    With `is_rest`, without the bytes that have arrived.
    """
    pending = 0
    for temporary in layout.temporaries():
        if temporary.needed_bytes and temporary.path != besides and temporary.path.is_dir():
            arrived_bytes = 0
            with contextlib.suppress(FileNotFoundError):  # removed at this moment
                arrived_bytes = files_bytes(temporary.path) if is_rest else 0
            pending += max(0, temporary.needed_bytes - arrived_bytes)
    return pending


def quarantined(layout: Layout) -> list[Entry]:
    """Damaged entries, and adapters that are being removed; no engine ever gets a path into the quarantine."""
    found = []
    for entry in os.scandir(layout.folder("quarantine")):
        with contextlib.suppress(FileNotFoundError):  # removed at this moment, by this process or another
            size_bytes = files_bytes(entry.path) if entry.is_dir() else 0
            found.append(Entry(entry.name, size_bytes, entry.stat().st_mtime))
    return sorted(found, key=_by_use)


def discard_quarantined(layout: Layout, name: str) -> None:
    """Remove one entry of the quarantine; a missing entry is no error."""
    shutil.rmtree(layout.folder("quarantine") / name, ignore_errors=True)


def _by_use(entry: Entry) -> tuple[float, str]:
    return entry.used_at, entry.digest
