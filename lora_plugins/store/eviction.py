"""Room in the store and on a full disk: remove the least recently used adapters without a lease until a fetch fits."""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.errors import InvalidAdapter, NoFreeSlot, OutOfMemory, SourceUnavailable
from lora_plugins.store.errors import FULL
from lora_plugins.store.inventory import Inventory
from lora_plugins.store.layout import Layout, discard, files_bytes
from lora_plugins.store.leases import Leases
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.processes import this_process

_SHARE = 0.8
_KEPT_FREE_SHARE, _KEPT_FREE_BYTES = 0.05, 1 << 30
_OWN_FILES = 6  # inodes of an adapter: directory, manifest, index, time of use, lease, directory of leases
_OWN_PAGES = 3  # manifest, index, and a configuration in its canonical form
_PAGE_BYTES = 4096


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


def share_of_disk(layout: Layout, inventory: Inventory) -> tuple[int, int]:
    """The budget where the settings name none, and the bytes to keep free on the disk.

    The budget is 80 % of the store's bytes plus the free bytes, so that a restart finds the same budget.
    """
    disk = os.statvfs(layout.root)
    whole_bytes = inventory.look() + disk.f_bavail * disk.f_frsize
    return int(_SHARE * whole_bytes), min(_KEPT_FREE_BYTES, int(_KEPT_FREE_SHARE * disk.f_blocks * disk.f_frsize))


@dataclass
class Evictor:
    """Removes adapters that nobody leases from one store: damaged first, then the least recently used.

    Attributes:
        on_evict: called with the digest and bytes of each adapter that goes to make room, in a thread.
    """

    layout: Layout
    leases: Leases
    inventory: Inventory
    on_evict: Callable[[str, int], None] | None = None

    def make_room(
        self, needed_bytes: int, max_bytes: int, *, kept_free_bytes: int = 0, own: Path | None = None
    ) -> Room:
        """Remove adapters until `needed_bytes` more fit under `max_bytes`.

        Where the disk would have less than `kept_free_bytes` left, more adapters go.
        The temporary directory `own` is the caller's, and does not count as a download of another.

        Raises:
            OutOfMemory: the adapter does not fit even into an empty store.
        """
        if needed_bytes > max_bytes:
            raise OutOfMemory(
                f"an adapter of {needed_bytes} bytes",
                expected=f"at most {max_bytes}, the store's budget",
                remedy="raise LORA_PLUGINS_STORE_MAX_BYTES",
            )
        # Count downloads first: an adapter published between the two counts is then counted twice, not never.
        pending = pending_bytes(self.layout, besides=own)
        stored_bytes = self.inventory.look()
        budget_bytes = max_bytes
        if kept_free_bytes:
            disk = os.statvfs(self.layout.root)
            budget_bytes = min(max_bytes, stored_bytes + disk.f_bavail * disk.f_frsize - kept_free_bytes)
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
        over_bytes = stored_bytes - room_bytes
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
        """The damaged and the least recently used without a lease, but not `kept`: `wanted_bytes` and `least` adapters.

        Adapters that only silent hosts lease go last. None where all adapters together free too little.
        """
        chosen: list[str] = []
        silent: list[str] = []
        if wanted_bytes <= 0 and least <= 0:
            return chosen
        damaged = sorted(filter(self.inventory.size_bytes, damaged_in(self.layout)))
        oldest = (digest for digest in self.inventory.oldest(self.leases.is_ours) if digest not in damaged)
        in_order = itertools.chain(damaged, oldest)
        free = (digest for digest in in_order if digest != kept and not self.leases.holders(digest))
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
            removed = self.layout.new_temporary(this_process())
            try:
                os.rename(self.layout.adapter(digest), removed)
            except FileNotFoundError:
                return True
        discard(removed)
        # The mark describes the removed copy, not the next copy.
        (self.layout.folder("damaged") / digest).unlink(missing_ok=True)
        return True


def all_used(max_bytes: int, needed_bytes: int) -> NoFreeSlot:
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


def damaged_in(layout: Layout) -> set[str]:
    """The digests of damaged adapters that no fetch has replaced yet, whichever process found the damage."""
    try:
        return set(os.listdir(layout.folder("damaged")))
    except OSError:
        return set()


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


def give_way(evictor: Evictor, needed_bytes: int, needed_files: int, *, kept: str = "") -> Room:
    """Remove adapters from a full disk, but not `kept`, until so many bytes and files have room.

    What running downloads still need has room beside them, where adapters can give that much.

    Adapters go only where that gives the room, and only while each removal raises
    what is free. Only a write can tell the limit of a quota: then adapters go one by one, and none where not even a
    page can be written and no download runs, because nothing shows that a removal would help.
    """
    layout = evictor.layout
    stored_bytes = evictor.inventory.look()
    others_bytes = pending_bytes(layout, is_rest=True)
    disk = os.statvfs(layout.root)
    # Each file takes whole pages; `f_files` is 0 where the file system makes inodes on demand.
    wanted_bytes = needed_bytes + (needed_files + _OWN_PAGES) * _PAGE_BYTES - disk.f_bavail * disk.f_frsize
    wanted_files = needed_files + _OWN_FILES - disk.f_favail if disk.f_files else 0

    def evict(digest: str) -> int:
        with contextlib.suppress(OSError):  # the guard's file may need an inode itself
            return evictor.evict(digest)
        return 0

    def choose(wanted_bytes: int, least: int = 1) -> list[str] | None:
        for beside_bytes in (others_bytes, 0):
            chosen = evictor.to_go(wanted_bytes + beside_bytes, least=least, kept=kept)
            if chosen is not None:
                return chosen
        return None

    if wanted_bytes + others_bytes <= 0 and wanted_files <= 0:
        return _evict_until_held(layout, choose(needed_bytes) or [], needed_bytes, others_bytes, evict)
    # Each adapter frees `_OWN_FILES` inodes and at least two files of the source; the division rounds up.
    least = max(1, -(-wanted_files // (_OWN_FILES + 2)))
    chosen = choose(wanted_bytes, least)
    if chosen is None:
        is_enough = stored_bytes >= wanted_bytes and len(layout.digests()) >= least
        return Room.LEASED if is_enough else Room.NONE
    fields = [field for field, lack in (("f_bfree", wanted_bytes), ("f_ffree", wanted_files)) if lack > 0]
    # Running downloads may take what is freed, because their needs count above.
    return _evict_while_free_rises(layout, chosen, needed_bytes, [] if others_bytes else fields, evict)


def _evict_while_free_rises(
    layout: Layout, chosen: list[str], needed_bytes: int, fields: list[str], evict: Callable[[str], int]
) -> Room:
    """Remove the chosen adapters while each removal raises these fields of `os.statvfs`."""
    room = Room.NONE
    for digest in chosen:
        before = os.statvfs(layout.root)
        if not evict(digest):
            continue
        room, after = Room.MADE, os.statvfs(layout.root)
        if any(getattr(after, field) <= getattr(before, field) for field in fields):
            # Others take at once what is freed, or the file system frees later, but does so for a write.
            return Room.MADE if _can_hold(layout, needed_bytes) else Room.NONE
    return room


def _evict_until_held(
    layout: Layout, chosen: list[str], needed_bytes: int, others_bytes: int, evict: Callable[[str], int]
) -> Room:
    """Remove the chosen adapters one by one until a quota has room; `others_bytes` is what downloads still need."""
    room = Room.FOUND
    for digest in chosen:
        if _can_hold(layout, needed_bytes + others_bytes):
            return room
        # The quota may be full of what is not ours.
        if not others_bytes and not _can_hold(layout, 1):
            return Room.NONE
        if evict(digest):
            room = Room.MADE
    return room if _can_hold(layout, needed_bytes) else Room.NONE


def _can_hold(layout: Layout, size_bytes: int) -> bool:
    """Whether a file of this size finds room."""
    path = layout.new_temporary("room")
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))
    except OSError as error:
        return error.errno not in FULL
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return True
