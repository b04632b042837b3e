"""Room in the store and on a full disk: remove the least recently used adapters without a lease until a fetch fits.

Runs in a thread of the process that fetches, under a lock that one process of all that share the store holds at a time
(`Store._make_room`). In go the budget and the bytes and files that the fetch needs; adapters are removed whichever
process has fetched them. `leases.py` says which hosts are silent.
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
_OWN_FILES = 6  # inodes of each adapter beside the source's files: directory, manifest, index, use, lease, lease folder


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
        kept_free_bytes: bytes that stay free on the disk, beside all adapters and downloads.
        on_evict: called in a thread with the digest and bytes of each adapter that is removed to make room; None for no
            call.
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

        What running downloads still need counts as taken, except by the caller's own temporary directory, `own`. No
        adapter is removed where the removal of all without a lease would not be enough. `needed_files` are the inodes
        that the source's files will take; `kept` is a digest, or empty.

        Raises:
            OutOfMemory: the adapter does not fit even into an empty store, or onto the disk.
            NoFreeSlot: leases, or other downloads, are in the way.
        """
        if needed_bytes > max_bytes:
            raise OutOfMemory(
                f"an adapter of {needed_bytes} bytes",
                expected=f"at most {max_bytes}, the store's budget",
                remedy="raise LORA_PLUGINS_STORE_MAX_BYTES",
            )
        # Count downloads first: an adapter published between the two counts is then counted twice, not never. All of
        # `pending` counts for the budget; the disk has some of these bytes already, so only `coming` counts there.
        pending, coming = pending_bytes(self.layout, besides=own)
        stored_bytes, disk = self.inventory.look(), os.statvfs(self.layout.root)
        free_bytes = disk.f_bavail * disk.f_frsize - self.kept_free_bytes
        # `f_files` is 0 where the file system makes inodes on demand. `least`: how many adapters must go for inodes.
        # Each removed adapter frees `_OWN_FILES` and at least two files of the source; the division rounds up.
        lacking_files = needed_files + _OWN_FILES - disk.f_favail if disk.f_files else 0
        least = max(0, -(-lacking_files // (_OWN_FILES + 2)))
        if needed_bytes > stored_bytes + free_bytes or (least and least > len(self.layout.digests())):
            raise OutOfMemory(
                f"a full disk below the store: {max(0, stored_bytes + free_bytes)} bytes can be used"
                + (f", and {disk.f_favail} inodes" if least else ""),
                expected=f"{needed_bytes} for the adapter, beside {self.kept_free_bytes} that stay free",
                remedy="free space, or set LORA_PLUGINS_STORE_MAX_BYTES or LORA_PLUGINS_STORE_DIR",
            )
        # The bytes to remove: for the budget or for the disk, whichever takes more.
        over_bytes = needed_bytes + max(stored_bytes + pending - max_bytes, coming - free_bytes)
        passed = {kept}
        while over_bytes > 0 or least > 0:  # choose again where another process has leased a chosen adapter meanwhile
            chosen = self._to_go(over_bytes, least, passed)
            if chosen is None:
                raise NoFreeSlot(
                    f"a store of {max_bytes} bytes of which engines still use all that would have to go",
                    expected=f"{needed_bytes} bytes that can be made free",
                    remedy="ask again later, unload adapters, or raise LORA_PLUGINS_STORE_MAX_BYTES",
                )
            passed.update(chosen)
            for freed_bytes in filter(None, map(self.evict, chosen)):  # 0 bytes: not removed
                over_bytes, least = over_bytes - freed_bytes, least - 1

    def evict(self, digest: str) -> int:
        """Remove one adapter; returns the bytes freed: 0 where the adapter is leased or cannot be removed now."""
        size_bytes = self.inventory.size_bytes(digest)
        try:
            if self.leases.holders(digest) or not self.remove(digest):
                return 0
        except OSError:  # such as no inode for the lock file of `Leases.guard`
            return 0
        self.inventory.forget(digest)
        if self.on_evict is not None:
            self.on_evict(digest, size_bytes)
        return size_bytes

    def _to_go(self, wanted_bytes: int, least: int, passed: Collection[str]) -> list[str] | None:
        """Adapters to remove: `wanted_bytes` together, and at least `least` of them; never one in `passed`.

        None where all adapters without a lease are too few.
        """
        chosen: list[str] = []
        for digest in self._in_order(passed):
            chosen.append(digest)
            wanted_bytes -= self.inventory.size_bytes(digest)
            if wanted_bytes <= 0 and len(chosen) >= least:
                return chosen
        return None

    def _in_order(self, passed: Collection[str]) -> Iterator[str]:
        """Adapters that may go: damaged ones, the least recently used, and at last those that silent hosts lease."""
        # The inventory has no size for a digest that is already gone, whose mark of damage may remain.
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
        """Remove one adapter unless the adapter is leased; returns False for a leased adapter, True for an absent one.

        Raises:
            OSError: the adapter cannot be removed.
        """
        with self.leases.guard(digest):
            if self.leases.holders(digest):
                return False
            # These files go before the adapter. If this process is killed in between, the files that are left belong to
            # an adapter that is still there, whose next removal takes them along.
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
    """The index file that leads to an adapter, by the adapter's manifest.

    None where the manifest is unreadable, or the file names another digest, which must stay.
    """
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
    """The bytes that running downloads will take in the end, and the part of these bytes that is not on disk yet.

    The download into the directory `besides` does not count.
    """
    pending = coming = 0
    for temporary in layout.temporaries():
        if temporary.needed_bytes and temporary.path != besides and temporary.path.is_dir():
            pending += temporary.needed_bytes
            with contextlib.suppress(FileNotFoundError):  # removed at this moment
                coming += max(0, temporary.needed_bytes - files_bytes(temporary.path))
    return pending, coming
