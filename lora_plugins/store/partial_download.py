"""What is being fetched into the store, before it is checked and published."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from lora_plugins.store import kept_parts
from lora_plugins.store.hashing import GrowingFile
from lora_plugins.store.manifest import StoredFile


class DownloadSpec(Protocol):
    """The part of `resolvers.sources.source.RemoteAdapter` that the store needs."""

    @property
    def uri(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def promised(self) -> Sequence[tuple[str, int, str]]:
        """Name, size in bytes and SHA-256 (or empty) of every file, as the source lists them."""
        ...


class CheckedAdapter(Protocol):
    """What a check has found an adapter's files to be."""

    @property
    def canonical(self) -> bytes:
        """The configuration that engines read."""
        ...


class PartialDownload:
    """A directory that an adapter is being fetched into, hashed as its files grow.

    The source that fetches calls `landed`, `start_over` and `leave`; the store calls the others.

    Attributes:
        kept: which ranges of its files an earlier fetch of the same version has left there, in order.
        left: which ranges this fetch has brought; a later one may go on from them.
    """

    def __init__(self, directory: Path, names: Sequence[str], kept: kept_parts.Ranges | None = None) -> None:
        self.directory = directory
        self.kept = dict(kept or {})
        self.left: kept_parts.Ranges = {}
        self._names = tuple(names)
        self._files: dict[str, GrowingFile] = {}
        self._first = threading.Lock()

    def landed(self, name: str, size_bytes: int) -> None:
        """Report that the first `size_bytes` of a file are on disk; may be called from any thread, or not at all."""
        with self._first:
            if name not in self._files:
                self._files[name] = GrowingFile(self.directory / name)
        self._files[name].landed(size_bytes)

    def start_over(self, names: Iterable[str]) -> None:
        """Forget what has landed, and what was kept of these files: they are fetched again from their beginning."""
        self.finish_quietly()
        self._files = {}
        for name in names:
            self.kept.pop(name, None)

    def leave(self, ranges: kept_parts.Ranges) -> None:
        """Report, as the fetch fails, which ranges are whole and of the located version."""
        self.left = ranges

    @property
    def resumed_bytes(self) -> int:
        """What was not fetched, as an earlier fetch had."""
        return sum(end - begin for ranges in self.kept.values() for begin, end in ranges)

    def complete(self) -> None:
        """Report that all files are complete; what is left of them is hashed meanwhile."""
        for name in self._names:
            self.landed(name, 0)
            self._files[name].complete()

    def finish(self) -> tuple[StoredFile, ...]:
        """Size and SHA-256 of every file, once all are complete."""
        self.complete()
        return tuple(StoredFile(name, *self._files[name].finish()) for name in self._names)

    def finish_quietly(self) -> None:
        """Follow the files no more."""
        for file in self._files.values():
            file.abandon()
