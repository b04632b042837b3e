"""Download a set of files in ranges, in parallel, straight to disk, in bounded memory.

Runs on fsspec's loop thread for each fetch from an object store (`object_store.py`). In go the located files and a
reader of one place; afterwards the bytes are in the directory of the download, hashed on the way.

A broken range goes on at the byte at which the range broke off; a failed download leaves nothing to a later download.
At most `parallel` ranges of one download are in flight, small files first, and at first one for each file: on a fast
network a small adapter has arrived before more connections would be open. The turns that all downloads of a source
share bound their memory: at most (turns) x (buffer of the reader), 8 x 256 KiB as `ObjectSource` configures S3 and
HTTP.

Only passing failures are retried, with exponential backoff and jitter; a download ends only after a silence of
`timeout_s`. Errors of the disk are raised unchanged, without a retry.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from lora_plugins.errors import AdapterNotFound, SourceUnavailable
from lora_plugins.resolvers.sources.checksums import Checksum
from lora_plugins.resolvers.sources.remote_failures import Transient, map_error
from lora_plugins.resolvers.sources.retries import Deadline, Retries, deadline
from lora_plugins.resolvers.sources.source import SourceFile, VersionChanged
from lora_plugins.store.hashing import GrowingFile
from lora_plugins.store.partial_download import PartialDownload

_REPORT_EVERY_BYTES = 1 << 20
# A try with this many bytes does not count as a failed attempt: a line that breaks every few MB still finishes.
_PROGRESS_BYTES = 64 << 10
# Seconds with one connection for each file: where these suffice, more connections would only slow them down.
_ALONE_S = 0.01


Write = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class RangeReader:
    """Reads ranges of files from one place.

    Attributes:
        read: hands the bytes of a file from a start to an end to the last argument, in order; raises errors that
            `remote_failures.py` maps.
        checksums: of whole files, by name; a read removes one that its answer shows to be of other bytes.
    """

    read: Callable[[SourceFile, int, int, Write], Awaitable[None]]
    checksums: dict[str, Checksum] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DownloadLimits(Retries):
    """Bounds of one download; retries are of one range, the time-out of a silence of the whole download.

    Attributes:
        range_bytes: size of one range, and the most that a retry can cost.
        parallel: ranges in flight.
    """

    range_bytes: int = 8 << 20
    parallel: int = 8


class _DiskError(Exception):
    """Carries an OSError of the disk past the mapping of network errors."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(eq=False, slots=True)
class _Range:
    """A range of a file, and its progress."""

    file: _RangedFile
    at: int
    end: int


class _RangedFile:
    """One file on disk: its parts, the complete beginning, and the beginning's digest where a checksum is known."""

    def __init__(
        self, source: SourceFile, download: PartialDownload, range_bytes: int, checksum: Checksum | None
    ) -> None:
        self.source = source
        self._download = download
        self._path = download.directory / source.name
        self._range_bytes = range_bytes
        self.checksum = checksum
        self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self.begin()

    def begin(self) -> None:
        """Start (over) with an empty file of full length."""
        size, step = self.source.size_bytes, self._range_bytes
        self.parts = [_Range(self, start, min(start + step, size)) for start in range(0, size, step)]
        # Full length from the start, because ranges arrive in any order.
        os.ftruncate(self.descriptor, size)
        self._first = 0  # the first part that is not complete
        self._reported = 0
        self._digest = GrowingFile(self._path, self.checksum.digest()) if self.checksum is not None else None

    def write(self, part: _Range, data: bytes) -> None:
        if len(data) > part.end - part.at:
            raise ValueError("more bytes than the range has")
        rest = memoryview(data)
        while rest:
            try:
                count = os.pwrite(self.descriptor, rest, part.at)  # may write less than asked
            except OSError as error:
                raise _DiskError(error) from error
            part.at += count
            rest = rest[count:]
        self._report()

    def _report(self) -> None:
        """Report the complete beginning of the file to the hashing threads."""
        while self._first < len(self.parts) and self.parts[self._first].at == self.parts[self._first].end:
            self._first += 1
        whole = self._first == len(self.parts)
        landed = self.source.size_bytes if whole else self.parts[self._first].at
        if landed == self._reported or not (whole or landed - self._reported >= _REPORT_EVERY_BYTES):
            return
        self._reported = landed
        self._download.landed(self.source.name, landed)
        if self._digest is not None:
            self._digest.landed(landed)

    def damage(self) -> str:
        """The digest of a complete file that differs from its checksum; empty for a sound file. For a thread: waits."""
        if self._digest is None or self.checksum is None:
            return ""
        found = self._digest.finish()[1]
        return found if found != self.checksum.value else ""

    def close(self) -> None:
        """Close the file. For a thread: the call waits for the hashing thread."""
        if self._digest is not None:
            self._digest.abandon()
        os.close(self.descriptor)


async def download_ranges(
    files: Sequence[SourceFile],
    reader: RangeReader,
    download: PartialDownload,
    *,
    turns: asyncio.Semaphore,
    limits: DownloadLimits,
) -> None:
    """Write `files` to `download.directory`, all together; each range takes one of `turns` for the time of a read.

    A file with a checksum of `reader` is compared with it, and fetched once more after a difference.

    Raises:
        VersionChanged: a file changed or vanished meanwhile.
        SourceUnavailable: a file cannot be had, no byte comes any more, or a file arrived twice with another checksum.
        OSError: the disk refuses.
    """
    opened: list[_RangedFile] = []
    try:
        opened.extend(  # after an error, with the files before
            _RangedFile(source, download, limits.range_bytes, reader.checksums.get(source.name))
            for source in sorted(files, key=lambda file: file.size_bytes)
        )
        async with deadline(limits.timeout_s) as state:
            await _fetch(opened, reader, turns, limits, state)
            damaged = await asyncio.to_thread(_damaged, opened, reader)
            if damaged:
                # The hashing threads have seen damaged bytes; stopping the threads may wait for a disk, hence the
                # thread.
                await asyncio.to_thread(download.start_over)
                for file in damaged:
                    file.begin()
                await _fetch(damaged, reader, turns, limits, state)
                await asyncio.to_thread(_refuse_damaged, damaged)
    finally:
        await asyncio.to_thread(_close, opened)


def _close(files: Sequence[_RangedFile]) -> None:
    for file in files:
        file.close()


def _damaged(files: Sequence[_RangedFile], reader: RangeReader) -> list[_RangedFile]:
    return [file for file in files if file.source.name in reader.checksums and file.damage()]


def _refuse_damaged(files: Sequence[_RangedFile]) -> None:
    for file in files:
        found, checksum = file.damage(), file.checksum
        if found and checksum is not None:
            raise SourceUnavailable(
                f"bytes with {checksum.algorithm} {found}, twice",
                expected=f"{checksum.algorithm} {checksum.value}, {checksum.said_by}",
                remedy="upload the file again; where the store's ETags and checksums are not those of the bytes, set "
                "LORA_PLUGINS_CHECK_MD5=0",
                file=file.source.name,
            )


async def _fetch(
    files: Sequence[_RangedFile], reader: RangeReader, turns: asyncio.Semaphore, limits: DownloadLimits, state: Deadline
) -> None:
    """Fetch every part of `files`; on return or error, nobody writes the parts any more."""
    waiting = deque(part for file in files for part in file.parts)

    async def work() -> None:
        while waiting:
            await _fetch_part(waiting.popleft(), reader, turns, limits, state)

    tasks = [asyncio.create_task(work()) for _ in range(min(len(files), limits.parallel, len(waiting)))]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=_ALONE_S, return_when=asyncio.FIRST_EXCEPTION)
            more = min(limits.parallel - len(tasks), len(waiting))
            tasks += [asyncio.create_task(work()) for _ in range(more)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        # A cancelled read closes its connection first; only then may the files be closed.
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fetch_part(
    part: _Range, reader: RangeReader, turns: asyncio.Semaphore, limits: DownloadLimits, state: Deadline
) -> None:
    async def read_on() -> None:
        began = part.at
        try:
            async with turns:
                await _read(part, reader, state)
        except Transient as error:
            if part.at - began < _PROGRESS_BYTES:
                raise
            state.last_failure = error
            await asyncio.sleep(limits.wait_s)

    while part.at < part.end:  # a read with progress counts as no attempt
        await limits.run(read_on, state)


async def _read(part: _Range, reader: RangeReader, state: Deadline) -> None:
    """Read the rest of a part."""
    name = part.file.source.name

    def write(data: bytes) -> None:
        part.file.write(part, data)
        state.progressed()

    try:
        await reader.read(part.file.source, part.at, part.end, write)
        if part.at != part.end:
            # A body may end early without any error of the connection.
            raise EOFError
    except _DiskError as error:
        raise error.error from None
    except Exception as error:  # noqa: BLE001 - the boundary to the libraries: every error is mapped
        mapped = map_error(error, file=name)
        if isinstance(mapped, AdapterNotFound):
            # `locate` has seen the object, so the adapter has changed rather than never existed.
            mapped = VersionChanged("an object that is gone", expected="the file", remedy="ask again", file=name)
        raise mapped from None
