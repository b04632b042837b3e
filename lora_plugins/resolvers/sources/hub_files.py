"""One file of a repository at a commit: copied from the Hub's own cache, or downloaded by `huggingface_hub`.

Runs in a thread of `hub.py` for each file of a fetch. `huggingface_hub` writes to a folder inside the adapter's
directory and renames, so a file's bytes are written once; the user's Hub cache is read but never written.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.utils.tqdm import tqdm

from lora_plugins.resolvers.sources.filesystem import copied
from lora_plugins.resolvers.sources.remote_failures import BrokenAnswer
from lora_plugins.resolvers.sources.source import SourceFile
from lora_plugins.store.hashing import sha256_of

_SCRATCH = ".hub"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_ID = re.compile(r"[0-9a-f]{40}")


class Stopped(Exception):
    """The download was cancelled."""


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository at a commit, with the promised size and digests."""

    repo: str
    commit: str
    path: str
    source: SourceFile


def cached_path(repo: str, path: str, revision: str, cache_dir: Path | None) -> Path | None:
    """The path of a file in the Hub's own cache; None where the cache lacks the file."""
    found = try_to_load_from_cache(repo, path, cache_dir=cache_dir, revision=revision)
    return Path(found) if isinstance(found, str) else None


def describe_cached(found: Path, name: str) -> SourceFile:
    """A file of the Hub's cache under its name in the adapter, with the identity under which the cache keeps the file.

    Raises:
        OSError: the file cannot be read.
    """
    # Snapshots are links to blobs, and a blob's name is its ETag: SHA-256 for LFS files, else the git id.
    identity = Path(os.readlink(found)).name if found.is_symlink() else ""
    size_bytes = found.stat().st_size
    return SourceFile(name, size_bytes, identity, identity if _SHA256.fullmatch(identity) else "")


def copy_cached(file: RepoFile, directory: Path, cache_dir: Path | None, progressed: Callable[[], object]) -> bool:
    """Copy a file from the Hub's cache, as a reflink where the file system can; `progressed` is called for each piece.

    Returns False where the cache has no such file, or a damaged file: the caller then asks the Hub.

    Raises:
        OSError: `directory` cannot be written.
    """
    found = cached_path(file.repo, file.path, file.commit, cache_dir)
    if found is None:
        return False
    try:
        source = found.open("rb")
    except OSError:
        return False
    target = directory / file.source.name
    with source, target.open("wb") as opened:
        for _ in copied(source, opened, os.fstat(source.fileno()).st_size):
            progressed()
    try:
        check_fetched(target, file.source)
        if file.source.sha256 and sha256_of(target)[1] != file.source.sha256:
            raise BrokenAnswer(f"{file.source.name} is damaged in the Hub's cache")
    except BrokenAnswer:
        target.unlink()
        return False
    return True


def download_file(
    api: HfApi, file: RepoFile, directory: Path, stop: threading.Event, progressed: Callable[[], object]
) -> None:
    """Download one file to `directory`; once `stop` is set, give up and leave nothing behind.

    `progressed` is called for every piece that has come.

    Raises:
        Stopped: `stop` was set. BrokenAnswer: other bytes than promised arrived. Whatever `huggingface_hub` raises.
    """
    scratch = directory / _SCRATCH
    try:
        arrived = api.hf_hub_download(
            file.repo,
            file.path,
            revision=file.commit,
            local_dir=scratch,
            cache_dir=scratch / "no-cache",  # `copy_cached` has already looked at the user's cache
            tqdm_class=_watcher(stop, progressed),
        )
        if stop.is_set():
            raise Stopped
        try:
            check_fetched(Path(arrived), file.source)
        except BrokenAnswer:
            os.unlink(arrived)  # else the next attempt would return the same file without a download
            raise
        # Within one file system, so the rename copies no bytes.
        os.replace(arrived, directory / file.source.name)
    finally:
        if stop.is_set():
            # The caller gave the directory up while this thread ran; the thread may have made the directory again.
            shutil.rmtree(directory, ignore_errors=True)


def discard_scratch(directory: Path) -> None:
    """Remove files that `huggingface_hub` keeps for itself beside the adapter's files.

    Raises:
        OSError: a file cannot be removed, and the directory must not be published.
    """
    if (directory / _SCRATCH).exists():
        shutil.rmtree(directory / _SCRATCH)


def check_fetched(path: Path, file: SourceFile) -> None:
    """Compare a file's size, and the git hash of a small file; the store checks SHA-256.

    Raises:
        BrokenAnswer: the file differs.
    """
    size_bytes = path.stat().st_size
    if size_bytes != file.size_bytes:
        raise BrokenAnswer(f"{file.name} has {size_bytes} bytes, not {file.size_bytes}")
    # Git's id of a file: SHA-1 over "blob", the size, a zero byte, and the content.
    if not file.sha256 and _GIT_ID.fullmatch(file.etag):
        digest = hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
        with path.open("rb") as opened:
            hashlib.file_digest(opened, lambda: digest)
        if digest.hexdigest() != file.etag:
            raise BrokenAnswer(f"{file.name} has the git hash {digest.hexdigest()}, not {file.etag}")


def _watcher(stop: threading.Event, progressed: Callable[[], object]) -> Any:
    """A silent progress bar, which reports each piece, and ends the download once `stop` is set."""

    # `huggingface_hub` has no way to cancel a download, but calls `update` for every piece, of 10 MB mostly.
    class Watcher(tqdm):
        monitor_interval = 0  # else each class starts a thread that redraws bars, and never ends

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            if stop.is_set():
                raise Stopped
            progressed()

    return Watcher
