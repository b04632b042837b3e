"""Room on a full disk: remove the least recently used adapters without a lease until a write finds room."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from lora_plugins.store.errors import FULL
from lora_plugins.store.eviction import Evictor, Room, discard_quarantined, pending_bytes, quarantined
from lora_plugins.store.layout import Layout

_OWN_FILES = 6  # inodes of an adapter: directory, manifest, index, time of use, lease, directory of leases
_OWN_PAGES = 3  # manifest, index, and a configuration in its canonical form
_PAGE_BYTES = 4096


def give_way(evictor: Evictor, needed_bytes: int, needed_files: int, *, kept: str = "") -> Room:
    """Remove adapters from a full disk, but not `kept`, until so many bytes and files have room.

    What running downloads still need has room beside them, where adapters can give that much.

    Entries of the quarantine go first. Adapters go only where that gives the room, and only while each removal raises
    what is free. Only a write can tell the limit of a quota: then adapters go one by one, and none where not even a
    page can be written and no download runs, because nothing shows that a removal would help.
    """
    layout = evictor.layout
    damaged = quarantined(layout)
    for entry in damaged:
        discard_quarantined(layout, entry.digest)
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
        if damaged:
            return Room.MADE
        return _evict_until_held(layout, choose(needed_bytes) or [], needed_bytes, others_bytes, evict)
    # Each adapter frees `_OWN_FILES` inodes and at least two files of the source; the division rounds up.
    least = max(1, -(-wanted_files // (_OWN_FILES + 2)))
    chosen = choose(wanted_bytes, least)
    if chosen is None:
        if damaged:
            return Room.MADE
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
