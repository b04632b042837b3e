"""Room in the store and on a full disk: remove the least recently used adapters without a lease until a fetch fits.

Runs in a thread of the process that fetches, under a lock that one process of all that share the store holds at a time
(`Store._make_room`). In go the bytes and files of the fetch and the budget; adapters of any process go.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.errors import InvalidAdapter, NoFreeSlot, OutOfMemory, SourceUnavailable
from lora_plugins.store.durable_files import discard
from lora_plugins.store.inventory import Inventory
from lora_plugins.store.layout import Layout, files_bytes
from lora_plugins.store.leases import Leases
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.processes import this_process

_SHARE = 0.8
_KEPT_FREE_SHARE, _KEPT_FREE_BYTES = 0.05, 1 << 30
_OWN_FILES = 6  # inodes of an adapter: directory, manifest, index, time of use, lease, directory of leases


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
        kept_free_bytes: stay free on the disk, beside all adapters and downloads.
        on_evict: called with the digest and bytes of each adapter that goes to make room, in a thread.
    """

    layout: Layout
    leases: Leases
    inventory: Inventory
    kept_free_bytes: int = 0
    on_evict: Callable[[str, int], None] | None = None

    def make_room(
        self, needed_bytes: int, max_bytes: int, needed_files: int = 0, *, own: Path | None = None, kept: str = ""
    ) -> None:
        """Remove adapters, but not `kept`, until `needed_bytes` more fit under `max_bytes` and on the disk.

        What running downloads still need has room beside the bytes. Nothing goes where all that can go would not be
        enough. The temporary directory `own` is the caller's, and no download of another.

        Raises:
            OutOfMemory: the adapter does not fit even into an empty store.
            NoFreeSlot: leases, or other downloads, are in the way.
        """
        if needed_bytes > max_bytes:
            raise OutOfMemory(
                f"an adapter of {needed_bytes} bytes",
                expected=f"at most {max_bytes}, the store's budget",
                remedy="raise LORA_PLUGINS_STORE_MAX_BYTES",
            )
        # Count downloads first: an adapter published between the two counts is then counted twice, not never.
        pending, coming = pending_bytes(self.layout, besides=own)
        stored_bytes, disk = self.inventory.look(), os.statvfs(self.layout.root)
        free_bytes = disk.f_bavail * disk.f_frsize - self.kept_free_bytes
        # `f_files` is 0 where the file system makes inodes on demand. Of the removed adapters, each has two files of
        # the source at least; the division rounds up.
        lacking_files = needed_files + _OWN_FILES - disk.f_favail if disk.f_files else 0
        least = max(0, -(-lacking_files // (_OWN_FILES + 2)))
        if needed_bytes > stored_bytes + free_bytes or (least and least > len(self.layout.digests())):
            raise OutOfMemory(
                f"a full disk below the store: {max(0, stored_bytes + free_bytes)} bytes can be used"
                + (f", and {disk.f_favail} inodes" if least else ""),
                expected=f"{needed_bytes} for the adapter, beside {self.kept_free_bytes} that stay free",
                remedy="free space, or set LORA_PLUGINS_STORE_MAX_BYTES or LORA_PLUGINS_STORE_DIR",
            )
        over_bytes = needed_bytes + max(stored_bytes + pending - max_bytes, coming - free_bytes)
        passed = {kept}
        while over_bytes > 0 or least > 0:  # again, where another process has leased what was chosen
            chosen = self._to_go(over_bytes, least, passed)
            if chosen is None:
                raise NoFreeSlot(
                    f"a store of {max_bytes} bytes of which engines still use all that would have to go",
                    expected=f"{needed_bytes} bytes that can be made free",
                    remedy="ask again later, unload adapters, or raise LORA_PLUGINS_STORE_MAX_BYTES",
                )
            passed.update(chosen)
            for freed_bytes in filter(None, map(self.evict, chosen)):
                over_bytes, least = over_bytes - freed_bytes, least - 1

    def evict(self, digest: str) -> int:
        """Remove one adapter without a lease; returns the bytes freed."""
        size_bytes = self.inventory.size_bytes(digest)
        try:
            if self.leases.holders(digest) or not self.remove(digest):
                return 0
        except OSError:  # the guard's file may need an inode itself
            return 0
        self.inventory.forget(digest)
        if self.on_evict is not None:
            self.on_evict(digest, size_bytes)
        return size_bytes

    def _to_go(self, wanted_bytes: int, least: int, passed: Collection[str]) -> list[str] | None:
        """Adapters of `wanted_bytes` together, `least` at least; None where all without a lease free too little."""
        chosen: list[str] = []
        for digest in self._in_order(passed):
            chosen.append(digest)
            wanted_bytes -= self.inventory.size_bytes(digest)
            if wanted_bytes <= 0 and len(chosen) >= least:
                return chosen
        return None

    def _in_order(self, passed: Collection[str]) -> Iterator[str]:
        """Adapters without a lease: the damaged, the least recently used, and at last those that silent hosts lease."""
        damaged = sorted(filter(self.inventory.size_bytes, damaged_in(self.layout)))
        oldest = (digest for digest in self.inventory.oldest(self.leases.is_ours) if digest not in damaged)
        silent: list[str] = []
        for digest in itertools.chain(damaged, oldest):
            if digest not in passed and not self.leases.holders(digest):
                if self.leases.is_of_the_silent(digest):
                    silent.append(digest)
                else:
                    yield digest
        yield from silent

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


def pending_bytes(layout: Layout, *, besides: Path | None = None) -> tuple[int, int]:
    """Bytes that running downloads, but that of the directory `besides`, take in the end; and those still to come."""
    pending = coming = 0
    for temporary in layout.temporaries():
        if temporary.needed_bytes and temporary.path != besides and temporary.path.is_dir():
            pending += temporary.needed_bytes
            with contextlib.suppress(FileNotFoundError):  # removed at this moment
                coming += max(0, temporary.needed_bytes - files_bytes(temporary.path))
    return pending, coming
