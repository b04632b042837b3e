"""One file of a repository at a commit: out of the Hub's own cache, or downloaded by `huggingface_hub`.

Downloads run in threads of their own: they cannot be interrupted while the Hub is silent, and must not hold places in a
pool that others wait for. `huggingface_hub` writes to a folder inside the adapter's directory and renames, so a file's
bytes are written once; the user's Hub cache is read but never written.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from huggingface_hub import HfApi, try_to_load_from_cache

from lora_plugins.resolvers.sources.hub.errors import Damaged
from lora_plugins.resolvers.sources.source import SourceFile
from lora_plugins.store.hashing import sha256_of

_T = TypeVar("_T")
_FICLONE = 0x40049409
_SCRATCH = ".hub"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_ID = re.compile(r"[0-9a-f]{40}")


class Stopped(Exception):
    """Nobody waits for this download any more."""


async def in_own_thread(work: Callable[[], _T]) -> _T:
    """Run `work` in a new thread that neither the event loop nor the interpreter waits for at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def deliver(result: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type] # None only where _T is

    def run() -> None:
        result: _T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            loop.call_soon_threadsafe(deliver, result, failure)

    threading.Thread(target=run, name="lora-plugins-hub", daemon=True).start()
    return await future


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository at a commit, and what was promised of it."""

    repo: str
    commit: str
    path: str
    file: SourceFile


def cached_path(repo: str, path: str, revision: str, cache_dir: Path | None) -> Path | None:
    """Where the Hub's own cache has a file, if it has."""
    found = try_to_load_from_cache(repo, path, cache_dir=cache_dir, revision=revision)
    return Path(found) if isinstance(found, str) else None


def describe_cached(found: Path) -> SourceFile:
    """A file of the Hub's cache, with the identity that the cache keeps it by.

    Raises:
        OSError: it cannot be read.
    """
    identity = Path(os.readlink(found)).name if found.is_symlink() else ""
    size_bytes = found.stat().st_size
    return SourceFile(found.name, size_bytes, identity, identity if _SHA256.fullmatch(identity) else "")


def copy_cached(wanted: RepoFile, directory: Path, cache_dir: Path | None) -> bool:
    """Copy a file out of the Hub's cache, as a reflink where the file system can.

    Returns False where the cache has no such file, or a damaged one: the Hub has it whole.

    Raises:
        OSError: `directory` cannot be written.
    """
    found = cached_path(wanted.repo, wanted.path, wanted.commit, cache_dir)
    if found is None:
        return False
    try:
        source = found.open("rb")
    except OSError:
        return False
    target = directory / wanted.file.name
    with source, target.open("wb") as copied:
        try:
            fcntl.ioctl(copied.fileno(), _FICLONE, source.fileno())
        except OSError:
            shutil.copyfileobj(source, copied, 1 << 20)
    try:
        check_arrived(target, wanted.file)
        if wanted.file.sha256 and sha256_of(target)[1] != wanted.file.sha256:
            raise Damaged(f"{wanted.file.name} is damaged in the Hub's cache")
    except Damaged:
        target.unlink()
        return False
    return True


def download(api: HfApi, wanted: RepoFile, directory: Path, stop: threading.Event) -> None:
    """Download one file to `directory`; once `stop` is set, give up and leave nothing behind.

    Raises:
        Stopped: `stop` was set. Damaged: other bytes than promised arrived. Whatever `huggingface_hub` raises.
    """
    scratch = directory / _SCRATCH
    try:
        arrived = api.hf_hub_download(
            wanted.repo,
            wanted.path,
            revision=wanted.commit,
            local_dir=scratch,
            cache_dir=scratch / "no-cache",  # the user's cache was looked at before
            tqdm_class=_watcher(stop),
        )
        if stop.is_set():
            raise Stopped
        try:
            check_arrived(Path(arrived), wanted.file)
        except Damaged:
            os.unlink(arrived)  # or the next attempt would be handed it again
            raise
        os.replace(arrived, directory / wanted.file.name)
    finally:
        if stop.is_set():
            # The directory was given up while this was running, and may have been made anew by it.
            shutil.rmtree(directory, ignore_errors=True)


def discard_scratch(directory: Path) -> None:
    """Remove what `huggingface_hub` keeps for itself beside the files.

    Raises:
        OSError: it cannot be removed, and the directory must not be published.
    """
    if (directory / _SCRATCH).exists():
        shutil.rmtree(directory / _SCRATCH)


def check_arrived(path: Path, file: SourceFile) -> None:
    """Hold a file against its size, and a small one against its name in git; SHA-256 is what the store looks at.

    Raises:
        Damaged: it is another one.
    """
    size_bytes = path.stat().st_size
    if size_bytes != file.size_bytes:
        raise Damaged(f"{file.name} has {size_bytes} bytes, not {file.size_bytes}")
    if not file.sha256 and _GIT_ID.fullmatch(file.etag):
        digest = hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
        with path.open("rb") as opened:
            while piece := opened.read(1 << 20):
                digest.update(piece)
        if digest.hexdigest() != file.etag:
            raise Damaged(f"{file.name} has the git name {digest.hexdigest()}, not {file.etag}")


def _watcher(stop: threading.Event) -> Any:
    """A progress bar that shows nothing and ends the download once `stop` is set."""

    class Watcher:
        def __init__(self, *_: object, total: int | None = None, initial: int = 0, **__: object) -> None:
            self.total = total
            self.n = initial

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            if stop.is_set():
                raise Stopped

        def close(self) -> None: ...
        def refresh(self, *_: object, **__: object) -> None: ...
        def set_postfix_str(self, *_: object, **__: object) -> None: ...
        def set_description(self, *_: object, **__: object) -> None: ...

    return Watcher
