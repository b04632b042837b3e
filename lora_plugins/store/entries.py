"""Published adapters of a store: which are whole, which are damaged, and under which path engines load them now.

Runs in API servers and in commands, mostly in threads, as `Store` inherits it. In goes a digest; the answers come from
the files below the store's root, which all processes share: the adapter's own directory, a mark in `.damaged` for an
adapter that some process found damaged, and in `.replaced` a count of the copies of a digest found damaged so far.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from lora_plugins.errors import InvalidAdapter, SourceUnavailable
from lora_plugins.store.disk_errors import is_damage, store_errors
from lora_plugins.store.durable_files import sync_directory
from lora_plugins.store.eviction import damaged_in
from lora_plugins.store.hashing import HashedEntries, identity_of, sha256_of
from lora_plugins.store.layout import Layout
from lora_plugins.store.leases import Leases
from lora_plugins.store.manifest import Manifest, digest_of


class Entries:
    """The published adapters of one store.

    Attributes:
        on_damage: called in a thread with the digest of each adapter that is found damaged.
    """

    def __init__(self, layout: Layout, leases: Leases) -> None:
        self.layout, self.leases = layout, leases
        self.on_damage: Callable[[str], None] | None = None
        self._hashed = HashedEntries()

    def has(self, directory: Path) -> bool:
        """Whether a published adapter is there and not known to be damaged; takes a few microseconds."""
        try:
            return directory.is_dir() and not self.is_marked(directory.name)
        except OSError:  # the store does not answer
            return False

    def digest_at(self, path: str) -> str | None:
        """The digest of the adapter at `path`; None where `path` is no adapter of this store."""
        return self.layout.digest_of(path)

    def is_marked(self, digest: str) -> bool:
        """Whether some process has marked the adapter as damaged."""
        with store_errors():
            return self._mark(digest).exists()

    def is_whole(self, digest: str, names: Collection[str] | None = None) -> bool:
        """Whether every file is there in its size, and with `names` no others; only `verify` reads every byte."""
        if self.is_marked(digest):
            return False
        directory = self.layout.adapter(digest)
        return self._agrees(
            digest,
            lambda manifest: (
                (names is None or {it.name for it in manifest.files} == {*names})
                and all((directory / it.name).stat().st_size == it.size_bytes for it in manifest.on_disk)
            ),
        )

    def is_sound(self, digest: str, *, max_age_s: float = math.inf) -> bool:
        """Whether a published adapter has the bytes that its digest says.

        The files are hashed, as by `verify`, unless this process has hashed the same files at most `max_age_s` ago.

        Raises:
            SourceUnavailable: the files cannot be read at the moment.
        """
        if self.is_marked(digest):
            return False
        if self._hashed.has(digest, identity_of(self.layout.adapter(digest)), max_age_s):
            return True
        try:
            return self.verify(digest)
        except SourceUnavailable:
            raise
        except OSError:  # damaged, and the mark cannot be written
            return False

    def verify(self, digest: str) -> bool:
        """Hash every file of a published adapter again.

        `verify` marks a damaged adapter, to be fetched again; the adapter stays until the fetch replaces it, or until
        room is needed. For an absent adapter the answer is False, without a mark.

        Raises:
            SourceUnavailable: a file cannot be read at the moment.
            OSError: the adapter is damaged, and the store cannot be written.
        """
        directory = self.layout.adapter(digest)
        identity = identity_of(directory)

        def has_its_bytes(manifest: Manifest) -> bool:
            return manifest.digest == digest == digest_of(manifest.files) and all(
                sha256_of(directory / file.name) == (file.size_bytes, file.sha256) for file in manifest.on_disk
            )

        if self._agrees(digest, has_its_bytes):
            self._hashed.note(digest, identity)
            return True
        self._hashed.forget(digest)
        if not directory.exists():  # a removal, by any process, is no damage
            return False
        if self.on_damage is not None:
            self.on_damage(digest)
        with self.leases.guard(digest):
            try:
                if not self.is_marked(digest) or not self._replaced(digest).exists():
                    self._note_replaced(digest)
            finally:  # a full disk may still have an inode
                self._mark(digest).touch()
        return False

    def changed(self, served: Collection[str], some: Iterable[str]) -> tuple[set[str], set[str]]:
        """Of the `served` digests, the damaged; of `some`, the digests whose files were replaced or written to.

        For a thread: the call reads the file system.
        """
        marked = damaged_in(self.layout).intersection(served)
        found = {digest: identity_of(self.layout.adapter(digest)) for digest in some if digest not in marked}
        return marked, {digest for digest, identity in found.items() if self._hashed.differs(digest, identity)}

    def engine_path(self, digest: str, *, other_than: str = "") -> str:
        """The path by which engines load an adapter now: another spelling after each copy that was found damaged.

        Keys of cached prefixes hold the path, so prefixes that were computed with damaged weights are not found. For a
        thread.

        Raises:
            OSError: the path is `other_than`, and another cannot be noted.
        """
        try:
            replaced = self._replaced(digest).stat().st_size
        except OSError:
            replaced = 0
        path = f"{self.layout.root}/{'./' * replaced}{digest}"
        if path != other_than:
            return path
        self._note_replaced(digest)
        return self.engine_path(digest)

    def put_in_place(self, arrived: Path, digest: str, damaged: Path) -> None:
        """Publish what has arrived; a damaged adapter in its place goes to the path `damaged`."""
        target, mark = self.layout.adapter(digest), self._mark(digest)
        identity = identity_of(arrived)
        if target.exists() and not self.is_whole(digest):
            if not mark.exists():
                self._note_replaced(digest)
            os.rename(target, damaged)
        try:
            os.rename(arrived, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return  # another name or source has brought the same bytes
        self._hashed.note(digest, identity)
        # A reader of `arrived` after a power cut finds all files. The cut may undo the new name, except where the
        # damaged adapter would then be there without its mark.
        if mark.exists():
            sync_directory(self.layout.root)
            mark.unlink(missing_ok=True)

    def _agrees(self, digest: str, compare: Callable[[Manifest], bool]) -> bool:
        """The answer of `compare` for an entry's manifest; False where files are missing, or are no regular files.

        Raises:
            SourceUnavailable: the entry cannot be read at the moment, which does not make the entry damaged.
        """
        with store_errors():
            try:
                return compare(Manifest.read(self.layout.adapter(digest)))
            except (InvalidAdapter, OSError) as error:
                if is_damage(error):
                    return False
                raise

    def _note_replaced(self, digest: str) -> None:
        """Have `engine_path` return another path from here on, in all processes."""
        with self._replaced(digest).open("ab") as file:
            file.write(b".")

    def _mark(self, digest: str) -> Path:
        return self.layout.folder("damaged") / digest

    def _replaced(self, digest: str) -> Path:
        return self.layout.folder("replaced") / digest
