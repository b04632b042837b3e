"""Published adapters (entries) of a store with their sizes and last uses, for commands and for eviction.

`entries` reads all from the disk, for commands. `Inventory` keeps sizes and uses in memory, so that eviction is quick
in a store of 50,000 entries; it runs in threads of API servers. Other processes publish and remove too, so every look
lists the store's root and reads only the new entries. The size of a digest never changes: the file `.sizes` keeps sizes
for the next process to start with. The time of an adapter's last use only grows, so eviction reads the time of the
oldest known entry again before removing the entry. Exception: a process that ends a lease may set a time back, which
other processes see within ten minutes.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, MsgspecError, json

from lora_plugins.adapter.paced_work import paced
from lora_plugins.errors import InvalidAdapter, SourceUnavailable
from lora_plugins.store.durable_files import write_small
from lora_plugins.store.layout import SIZES_FILE, Layout, files_bytes, is_digest
from lora_plugins.store.manifest import Manifest

_UNWRITTEN = 500  # `.sizes` may lack so many sizes, which the next process then reads itself in about 50 ms
_ORDER_KEPT_S = 600.0  # other processes may set times of use back; all are read again after this time
_Size = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Entry:
    """A published adapter.

    Attributes:
        used_at: the last use, in seconds since the epoch; 0 where unknown.
        size_bytes: of the source's files by the manifest; without a readable manifest, of the files on disk.
        manifest: None where the manifest cannot be read.
    """

    digest: str
    size_bytes: int
    used_at: float
    manifest: Manifest | None = None


def last_use(layout: Layout, digest: str) -> float:
    """The last use of an adapter, in seconds since the epoch; 0 where unknown."""
    try:
        return os.stat(f"{layout.folder('uses')}/{digest}").st_mtime
    except FileNotFoundError:
        return 0.0


def entry_of(layout: Layout, digest: str) -> Entry | None:
    """A published adapter; None where another process has just removed it, or it is no directory."""
    directory, manifest = layout.adapter(digest), None
    try:
        manifest = Manifest.read(directory)
        size_bytes = manifest.size_bytes
    except (InvalidAdapter, SourceUnavailable):
        try:
            size_bytes = files_bytes(directory)
        except OSError:
            return None
    return Entry(digest, size_bytes, last_use(layout, digest), manifest)


def entries(layout: Layout) -> list[Entry]:
    """All published adapters, the least recently used first."""
    found = [entry for digest in layout.digests() if (entry := entry_of(layout, digest)) is not None]
    return sorted(found, key=lambda entry: (entry.used_at, entry.digest))


class Inventory:
    """The inventory of one store, for one process. Callable from any thread; methods read the file system."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.RLock()
        self._sizes_bytes: dict[str, int] | None = None  # by digest; None before the first look
        self._total_bytes = 0
        self._unwritten = 0  # sizes that are not in the file `.sizes` yet
        self._unreadable: set[str] = set()  # digests whose manifest could not be read
        self._uses: dict[str, float] = {}  # by digest, as last seen
        self._order: list[tuple[float, str]] = []  # a heap of `_uses`, with outdated times among them
        self._ordered_at = float("-inf")  # when `order` last read all uses, in seconds of time.monotonic()

    def look(self) -> int:
        """Take up adapters published or removed since the last look, by any process; returns the bytes of all adapters.

        Raises:
            OSError: the store cannot be read.
        """
        with self._lock:
            sizes = self._sizes_bytes
            if sizes is None:
                sizes = self._sizes_bytes = self._read()
                self._total_bytes = sum(sizes.values())
            listed = os.listdir(self._layout.root)
            # An unreadable manifest may be readable now: forgotten here, the adapter is read again below.
            for digest in self._unreadable.copy():
                self.forget(digest)
            others = list(itertools.filterfalse(sizes.__contains__, listed))
            # Fewer known digests are listed than are known: some are gone. The difference of sets is built only then.
            if len(listed) - len(others) < len(sizes):
                for digest in sizes.keys() - listed:
                    self.forget(digest)
            for digest in paced(filter(is_digest, others)):
                if (entry := entry_of(self._layout, digest)) is None:
                    continue
                sizes[digest] = entry.size_bytes
                self._total_bytes += entry.size_bytes
                self._unwritten += 1
                if entry.manifest is None:  # perhaps only for now; until then, the size is that of the files on disk
                    self._unreadable.add(digest)
                if self._ordered_at > float("-inf"):  # the first `order` reads all uses anyway
                    self.note_use(digest, entry.used_at)
            if self._unwritten > _UNWRITTEN:
                self._write(sizes)
            return self._total_bytes

    def readable(self) -> tuple[int, int]:
        """Look again; return how many adapters have a readable manifest, and the bytes of these adapters.

        Raises:
            OSError: the store cannot be read.
        """
        with self._lock:
            total_bytes = self.look()
            unreadable = [self.size_bytes(digest) for digest in self._unreadable]
            return len(self._sizes_bytes or {}) - len(unreadable), total_bytes - sum(unreadable)

    def size_bytes(self, digest: str) -> int:
        """The size of an adapter that the last look found; 0 for others."""
        return (self._sizes_bytes or {}).get(digest, 0)

    def forget(self, digest: str) -> None:
        """Take an adapter out of the inventory; an unknown digest is no error. The next look adds a present adapter."""
        with self._lock:
            self._total_bytes -= (self._sizes_bytes or {}).pop(digest, 0)
            self._uses.pop(digest, None)
            self._unreadable.discard(digest)

    def note_use(self, digest: str, used_at: float) -> None:
        """Note when an adapter was used last: seconds since 1970, or 0 for unknown."""
        with self._lock:
            self._uses[digest] = used_at
            heapq.heappush(self._order, (used_at, digest))

    def oldest(self, is_kept: Callable[[str], bool]) -> Iterator[str]:
        """The adapters of the last look, least recently used first, but those for which `is_kept` answers True."""
        self.order()
        passed: dict[str, float] = {}  # taken from the heap by this iteration, and put back at its end
        try:
            while self._order:
                with self._lock:
                    used_at, digest = heapq.heappop(self._order)
                    # The adapter is gone, the time is outdated, or the heap has the same time twice.
                    if digest not in (self._sizes_bytes or {}) or self._uses.get(digest) != used_at or digest in passed:
                        continue
                    if not is_kept(digest):
                        # Another process may have used the adapter since: put the adapter back with the newer time.
                        now = last_use(self._layout, digest)
                        if now > used_at:
                            self.note_use(digest, now)
                            continue
                    passed[digest] = used_at
                if not is_kept(digest):  # asked again: the read from the disk took time, and a lease may be new
                    yield digest
        finally:
            with self._lock:
                for digest, used_at in passed.items():
                    heapq.heappush(self._order, (used_at, digest))

    def order(self) -> None:
        """Read the last uses of all adapters, unless the last full read is younger than ten minutes."""
        with self._lock:
            if time.monotonic() - self._ordered_at < _ORDER_KEPT_S:
                return
            self._uses = {digest: last_use(self._layout, digest) for digest in paced(self._sizes_bytes or {})}
            self._order = [(used_at, digest) for digest, used_at in self._uses.items()]
            heapq.heapify(self._order)
            self._ordered_at = time.monotonic()

    def _read(self) -> dict[str, int]:
        try:
            known = json.decode((self._layout.root / SIZES_FILE).read_bytes(), type=dict[str, _Size])
        except (OSError, ValueError, MsgspecError):
            return {}
        return {digest: size_bytes for digest, size_bytes in known.items() if is_digest(digest)}

    def _write(self, sizes: dict[str, int]) -> None:
        known = {digest: size for digest, size in sizes.items() if digest not in self._unreadable}
        with contextlib.suppress(OSError):  # the next process then reads the sizes from the manifests
            temporary = self._layout.new_temporary("sizes")
            write_small(self._layout.root / SIZES_FILE, [json.encode(known).decode()], temporary, is_durable=False)
        self._unwritten = 0
