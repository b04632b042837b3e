"""Download a set of files in ranges, in parallel, straight to disk, in bounded memory.

A thread of a pool reads a range and writes the bytes to the file. A range that breaks off is asked for again from the
byte at which it broke off; a download that fails leaves nothing to a later download. At most `parallel` ranges of one
download are in flight, small files first, and at first one for each file: on a fast network a small adapter is there
before more connections would be. The pool's size bounds all downloads that share it: memory is at most (threads of the
pool) x (buffer of the reader), 8 x 256 KiB as `ObjectSource` sets it up for S3 and HTTP.

Only what may pass is retried, with exponential backoff and jitter, and every download has one deadline. An error of the
disk is not retried: it is raised as the OSError that it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from lora_plugins.errors import AdapterNotFound, SourceUnavailable
from lora_plugins.resolvers.sources.errors import Transient, map_error
from lora_plugins.resolvers.sources.retries import Deadline, Retries, deadline
from lora_plugins.resolvers.sources.source import SourceFile, VersionChanged
from lora_plugins.resolvers.threads import until_ended
from lora_plugins.store.hashing import GrowingFile
from lora_plugins.store.partial_download import PartialDownload

_MD5_ETAG = re.compile(r'"?([0-9a-fA-F]{32})"?')
_REPORT_EVERY_BYTES = 1 << 20
# A try that got this far does not count against a range: a line that breaks every few MB still ends.
_PROGRESS_BYTES = 64 << 10
# For so long there is one connection for each file: where they have brought all until then, more would have been in
# their way only.
_ALONE_S = 0.01


class RangeReader(Protocol):
    """Reads ranges of files from one place; called from several threads at once."""

    def read(self, file: SourceFile, start: int, end: int, write: Callable[[memoryview], None]) -> None:
        """Hand the bytes from `start` to `end` to `write`, in order; raises what `errors.py` maps."""
        ...

    def has_md5_etag(self, name: str) -> bool:
        """Whether a file's ETag, where it looks like an MD5, is the MD5 of its bytes."""
        ...

    def stop(self) -> None:
        """Make every `read`, now and later, fail soon."""
        ...


@dataclass(frozen=True, slots=True)
class DownloadLimits(Retries):
    """Bounds of one download; the retries are of one range, the time-out of the whole.

    Attributes:
        range_bytes: size of one range, and of what a retry can cost at most.
        parallel: ranges in flight.
    """

    range_bytes: int = 8 << 20
    parallel: int = 8


class _DiskError(Exception):
    """Carries an OSError of the disk past the mapping of network errors."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class _Part:
    """A range of a file and how far it has come."""

    def __init__(self, file: _RangedFile, begin: int, end: int) -> None:
        self.file = file
        self.at = begin
        self.end = end


class _RangedFile:
    """One file on disk: its parts, how much of its beginning is there, and the MD5 of that where it is wanted."""

    def __init__(self, source: SourceFile, download: PartialDownload, range_bytes: int, *, md5: bool) -> None:
        self.source = source
        self._download = download
        self._path = download.directory / source.name
        self._range_bytes = range_bytes
        found = _MD5_ETAG.fullmatch(source.etag) if md5 else None
        self.expected_md5 = found[1].lower() if found else ""
        self._lock = threading.Lock()
        self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self.begin()

    def begin(self) -> None:
        """Start (over) with nothing of the file there."""
        size, step = self.source.size_bytes, self._range_bytes
        self.parts = [_Part(self, start, min(start + step, size)) for start in range(0, size, step)]
        os.ftruncate(self.descriptor, size)
        self._first = 0  # the first part that is not complete
        self._reported = 0
        self._md5 = GrowingFile(self._path, hashlib.md5(usedforsecurity=False))

    def write(self, part: _Part, data: memoryview) -> None:
        if len(data) > part.end - part.at:
            raise ValueError("more bytes than the range has")
        while data:
            try:
                count = os.pwrite(self.descriptor, data, part.at)
            except OSError as error:
                raise _DiskError(error) from error
            part.at += count
            data = data[count:]
        self.report()

    def report(self) -> None:
        """Notify those who follow the file how far its beginning is complete."""
        with self._lock:
            while self._first < len(self.parts) and self.parts[self._first].at == self.parts[self._first].end:
                self._first += 1
            whole = self._first == len(self.parts)
            landed = self.source.size_bytes if whole else self.parts[self._first].at
            if landed == self._reported or not (whole or landed - self._reported >= _REPORT_EVERY_BYTES):
                return
            self._reported = landed
            self._download.landed(self.source.name, landed)
            if self.expected_md5:
                self._md5.landed(landed)

    def is_damaged(self) -> bool:
        """Whether the complete file has another MD5 than its ETag says. For a thread: it waits for the digest."""
        return bool(self.expected_md5) and self.md5() != self.expected_md5

    def md5(self) -> str:
        """Of the complete file, in hexadecimal."""
        return self._md5.finish()[1]

    def close(self) -> None:
        """Let go of the file. For a thread: it waits for who reads it."""
        self._md5.abandon()
        os.close(self.descriptor)


async def download_ranges(
    files: Sequence[SourceFile],
    reader: RangeReader,
    download: PartialDownload,
    *,
    pool: Executor,
    limits: DownloadLimits,
    md5: bool,
) -> None:
    """Write `files` to `download.directory`, all together.

    With `md5`, a file whose ETag is an MD5 is compared with it, and fetched once more where it differs.

    Raises:
        VersionChanged: a file changed or vanished meanwhile. SourceUnavailable: it cannot be had, or not in time, or
            it arrived twice with another MD5 than its ETag. OSError: the disk.
    """
    opened: list[_RangedFile] = []
    try:
        for source in sorted(files, key=lambda file: file.size_bytes):
            opened.append(_RangedFile(source, download, limits.range_bytes, md5=md5))  # noqa: PERF401 - kept where one fails
        async with deadline(limits.fetch_timeout_s(files)) as state:
            await _fetch(opened, reader, pool, limits, state)
            damaged = await asyncio.to_thread(_damaged, opened, reader)
            if damaged:
                # The hashes that follow have seen the damaged bytes; ending their threads may wait for a disk.
                await asyncio.to_thread(download.start_over)
                for file in damaged:
                    file.begin()
                await _fetch(damaged, reader, pool, limits, state)
                await asyncio.to_thread(_refuse_damaged, damaged)
    finally:
        await asyncio.to_thread(_close, opened)


def _close(files: Sequence[_RangedFile]) -> None:
    for file in files:
        file.close()


def _damaged(files: Sequence[_RangedFile], reader: RangeReader) -> list[_RangedFile]:
    return [file for file in files if reader.has_md5_etag(file.source.name) and file.is_damaged()]


def _refuse_damaged(files: Sequence[_RangedFile]) -> None:
    for file in files:
        if file.is_damaged():
            raise SourceUnavailable(
                f"bytes with MD5 {file.md5()}, twice",
                expected=f"MD5 {file.expected_md5}, the object's ETag",
                remedy="upload the file again; where the store's ETags are no MD5, set LORA_PLUGINS_CHECK_MD5=0",
                file=file.source.name,
            )


async def _fetch(
    files: Sequence[_RangedFile], reader: RangeReader, pool: Executor, limits: DownloadLimits, state: Deadline
) -> None:
    """Fetch every part of `files`; when this returns or raises, no thread works on them any more."""
    waiting = deque(part for file in files for part in file.parts)

    async def work() -> None:
        while waiting:
            await _fetch_part(waiting.popleft(), reader, pool, limits, state)

    tasks = [asyncio.create_task(work()) for _ in range(min(len(files), limits.parallel, len(waiting)))]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=_ALONE_S, return_when=asyncio.FIRST_EXCEPTION)
            more = min(limits.parallel - len(tasks), len(waiting))
            tasks += [asyncio.create_task(work()) for _ in range(more)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
    except BaseException:
        reader.stop()
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fetch_part(
    part: _Part, reader: RangeReader, pool: Executor, limits: DownloadLimits, state: Deadline
) -> None:
    async def read_on() -> None:
        began = part.at
        future = pool.submit(_read, part, reader)
        try:
            await until_ended(future, future.cancel)  # `reader` has been stopped when this is cancelled
        except Transient as error:
            if part.at - began < _PROGRESS_BYTES:
                raise
            state.last_failure = error
            await asyncio.sleep(limits.wait_s)

    while part.at < part.end:  # a read that got on counts as no attempt
        await limits.run(read_on, state)


def _read(part: _Part, reader: RangeReader) -> None:
    """Read the rest of a part, in a thread of the pool."""
    name = part.file.source.name
    try:
        reader.read(part.file.source, part.at, part.end, lambda data: part.file.write(part, data))
        if part.at != part.end:
            raise EOFError
    except _DiskError as error:
        raise error.error from None
    except Exception as error:  # noqa: BLE001 - this is the boundary; every one is mapped
        mapped = map_error(error, file=name)
        if isinstance(mapped, AdapterNotFound):
            # It was there when it was located.
            mapped = VersionChanged("an object that is gone", expected="the file", remedy="ask again", file=name)
        raise mapped from None
