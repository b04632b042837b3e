"""An adapter during its fetch into the store, before the check and the publication.

Runs in the process that fetches: a source of `resolvers/sources/` writes files into the directory and reports what has
landed; the store takes the files' sizes and digests at the end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

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


class CheckedAdapter(Protocol):
    """The result of a check of an adapter's files."""

    @property
    def canonical(self) -> bytes:
        """The configuration that engines read."""


class PartialDownload:
    """The directory of a running fetch, whose files are hashed as they grow.

    The source that fetches calls `landed` and `start_over`; the store calls the others.
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.directory = directory
        self._names = tuple(names)
        for folder in {(directory / name).parent for name in names} - {directory}:
            folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, GrowingFile] = {}
        self._first = threading.Lock()

    def landed(self, name: str, size_bytes: int = sys.maxsize) -> None:
        """Report that the first `size_bytes` of a file, or all, are on disk; from any thread, or not at all."""
        with self._first:
            if name not in self._files:
                self._files[name] = GrowingFile(self.directory / name)
        self._files[name].landed(size_bytes)

    def start_over(self) -> None:
        """Forget the hashes of all files: the source has found damage, and fetches damaged files again."""
        self.finish_quietly()
        self._files = {}

    def complete(self) -> None:
        """Report that all files are complete; threads hash the rest meanwhile."""
        for name in self._names:
            self.landed(name)

    def finish(self) -> tuple[StoredFile, ...]:
        """Size and SHA-256 of every file, once all are complete."""
        self.complete()
        return tuple(StoredFile(name, *self._files[name].finish()) for name in self._names)

    def finish_quietly(self) -> None:
        """Stop hashing; returns once no thread reads the files."""
        for file in self._files.values():
            file.abandon()
