"""Download a set of files in ranges, in parallel, straight to disk, in bounded memory.

Runs on fsspec's loop thread for each fetch from an object store (`object_store.py`). In go the located files and a
reader of one place; afterwards the bytes are in the directory of the download, hashed on the way.

A broken range goes on at the byte at which the range broke off; a failed download leaves nothing to a later download.
At most `parallel` ranges of one download are in flight, small files first. For the first moment (`_ALONE_S`), only one
range for each file is in flight: on a fast network a small adapter has arrived before more connections would be open.
All downloads of a source share a semaphore, whose permits are called turns; each read takes a turn. So their memory is
at most (turns) x (buffer of the reader), 8 x 256 KiB as `ObjectSource` configures S3 and HTTP.

Only failures that may pass (`Transient`) are retried, with exponential backoff and jitter; a slow download is given up
only after `timeout_s` without a byte. Errors of the disk are raised unchanged, without a retry.
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
# Seconds with one connection for each file: where a download ends in this time, more connections would slow it down.
_ALONE_S = 0.01


Write = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class RangeReader:
    """Reads ranges of files from one place.

    Attributes:
        read: called with a file, a start, an end (exclusive) and a `Write`, which gets the bytes in order; raises
            errors that `remote_failures.py` maps.
        checksums: of whole files, by name. A read removes a file's checksum where the answer shows that it is no
            checksum of the plain bytes, as with the ETag of an encrypted object.
    """

    read: Callable[[SourceFile, int, int, Write], Awaitable[None]]
    checksums: dict[str, Checksum] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DownloadLimits(Retries):
    """Bounds of one download; `attempts` count for each range, `timeout_s` is the longest time without any byte.

    Attributes:
        range_bytes: size of one range, and the most that a retry can cost.
        parallel: the most ranges in flight.
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
    """A range of a file (a part), and its progress.

    Attributes:
        at: where the next byte goes, an offset in the file.
        end: the offset behind the last byte.
    """

    file: _RangedFile
    at: int
    end: int


class _RangedFile:
    """One file on disk: its parts, and how many bytes from its start on are complete.

    Where a checksum is known, a thread hashes the complete beginning as it grows.
    """

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
        self._first = 0  # the index of the first part that is not complete
        self._reported = 0  # bytes of the complete beginning at the last report
        self._digest = GrowingFile(self._path, self.checksum.digest()) if self.checksum is not None else None

    def write(self, part: _Range, data: bytes) -> None:
        """Write the next bytes of a part.

        Raises:
            ValueError: more bytes than the range has.
            _DiskError: the disk refuses.
        """
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
        """Report the complete beginning of the file to the hashing threads, once a MiB, and at the end."""
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
        """The digest of a complete file, if it differs from the checksum; empty for a sound file or without a checksum.

        For a thread: the call waits for the hashing thread.
        """
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
    """Write `files` to `download.directory`, in parallel; each read of a range takes one of `turns`.

    A file with a checksum in `reader.checksums` is compared with the checksum, and fetched once more after a
    difference.

    Raises:
        VersionChanged: a file changed or vanished meanwhile.
        SourceUnavailable: a file cannot be had, no byte comes any more, or a file arrived twice with another checksum.
        OSError: the disk refuses.
    """
    opened: list[_RangedFile] = []
    try:
        # A generator: where one file cannot be opened, `opened` has the files before, which `finally` closes.
        opened.extend(
            _RangedFile(source, download, limits.range_bytes, reader.checksums.get(source.name))
            for source in sorted(files, key=lambda file: file.size_bytes)
        )
        async with deadline(limits.timeout_s) as state:
            await _fetch(opened, reader, turns, limits, state)
            damaged = await asyncio.to_thread(_damaged, opened, reader)
            if damaged:
                # The download's hashing threads have seen damaged bytes, so all begin again. In a thread: stopping them
                # may wait for a disk.
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
    # A read may have removed the file's checksum from `reader.checksums`: then no comparison is possible.
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
            more = min(limits.parallel - len(tasks), len(waiting))  # 0 where all parts are taken
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
    """Fetch a part, from where the last read broke off, until the part is complete.

    Raises:
        LoRAPluginsError, OSError: as `download_ranges`.
    """

    async def read_on() -> None:
        began = part.at
        try:
            async with turns:
                await _read(part, reader, state)
        except Transient as error:
            if part.at - began < _PROGRESS_BYTES:
                raise  # for `limits.run`, which counts the attempt
            state.last_failure = error
            await asyncio.sleep(limits.wait_s)

    # After a read with progress, `read_on` returns without an error: `run` begins to count attempts again.
    while part.at < part.end:
        await limits.run(read_on, state)


async def _read(part: _Range, reader: RangeReader, state: Deadline) -> None:
    """Read the rest of a part, and map errors.

    Raises:
        VersionChanged: the object has changed or is gone.
        RemoteFailure: any other failure of the source.
        OSError: the disk refuses.
    """
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
