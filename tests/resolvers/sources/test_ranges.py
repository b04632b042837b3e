"""Ranged downloads against readers that break off anywhere: property tests without a network."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources import ranges
from lora_plugins.resolvers.sources.checksums import Checksum
from lora_plugins.resolvers.sources.ranges import DownloadLimits, RangeReader, download_ranges
from lora_plugins.resolvers.sources.remote_failures import HttpStatus
from lora_plugins.resolvers.sources.source import SourceFile, VersionChanged
from lora_plugins.store.partial_download import PartialDownload
from tests.repetitions import times

FAST = DownloadLimits(range_bytes=1000, parallel=3, timeout_s=120, attempts=4, wait_s=0.0001, max_wait_s=0.001)


class Shelf:
    """A reader of bytes in memory; `breaks` says after how many bytes a read fails, -1 for never."""

    def __init__(
        self, files: dict[str, bytes], breaks: list[int] | None = None, error: Exception | None = None
    ) -> None:
        self.files = files
        self.breaks = breaks or []
        self.error = error or ConnectionResetError()
        self.reads: list[tuple[str, int, int]] = []
        self.sent = 0
        self.running = 0

    async def read(self, file: SourceFile, start: int, end: int, write: Callable[[bytes], None]) -> None:
        self.running += 1
        try:
            await self.send(file, start, end, write)
        finally:
            self.running -= 1

    async def send(self, file: SourceFile, start: int, end: int, write: Callable[[bytes], None]) -> None:
        self.reads.append((file.name, start, end))
        after = self.breaks.pop(0) if self.breaks else -1
        upto = end if after < 0 else min(end, start + after)
        self.sent += upto - start
        for at in range(start, upto, 300):
            write(self.files[file.name][at : min(at + 300, upto)])
            await asyncio.sleep(0)
        if after >= 0:
            raise self.error


def run(shelf: Shelf, directory: Path, limits: DownloadLimits = FAST, *, md5: bool = True, etags=None) -> tuple:
    files = [SourceFile(name, len(data), (etags or {}).get(name, _md5(data))) for name, data in shelf.files.items()]
    of_etags = {file.name: Checksum.of_etag(file.etag) for file in files if md5}
    shelf.checksums = {name: checksum for name, checksum in of_etags.items() if checksum is not None}
    arriving = PartialDownload(directory, list(shelf.files))

    async def download() -> None:
        turns = asyncio.Semaphore(limits.parallel)
        try:
            await download_ranges(files, RangeReader(shelf.read, shelf.checksums), arriving, turns=turns, limits=limits)
        finally:
            assert shelf.running == 0, "a range is read after the download's end"

    try:
        asyncio.run(download())
    except BaseException:
        arriving.finish_quietly()
        raise
    return arriving.finish()


def _md5(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@settings(max_examples=times(60, short=30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=3),
    breaks=st.lists(st.integers(-1, 1200), max_size=3),
    range_bytes=st.integers(1, 3000),
)
def test_after_any_breaks_each_byte_is_read_once(sizes, breaks, range_bytes) -> None:
    range_bytes = max(range_bytes, max(sizes) // 20)
    shelf = Shelf({f"f{i}": os.urandom(size) for i, size in enumerate(sizes)}, list(breaks))
    limits = DownloadLimits(20, 4, 0.0001, 0.001, range_bytes, parallel=3)
    with tempfile.TemporaryDirectory() as directory:
        stored = run(shelf, Path(directory), limits)
        for file, (name, data) in zip(stored, shelf.files.items(), strict=True):
            assert Path(directory, name).read_bytes() == data
            assert (file.name, file.size_bytes, file.sha256) == (name, len(data), hashlib.sha256(data).hexdigest())
    assert shelf.sent == sum(sizes)


def test_small_files_come_first(tmp_path: Path) -> None:
    shelf = Shelf({"weights": bytes(5000), "config": b"{}"})
    run(shelf, tmp_path, DownloadLimits(range_bytes=1000, parallel=1))
    assert shelf.reads[0][0] == "config"


class Counting(Shelf):
    """Notes how many read at once; with `meet`, a read begins once so many have."""

    def __init__(self, files: dict[str, bytes], meet: int = 1) -> None:
        super().__init__(files)
        self.meet = meet
        self.met = asyncio.Event()
        self.most = 0

    async def send(self, file: SourceFile, start: int, end: int, write: Callable[[bytes], None]) -> None:
        self.most = max(self.most, self.running)
        if self.running >= self.meet:
            self.met.set()
        await asyncio.wait_for(self.met.wait(), 60)
        await super().send(file, start, end, write)


def test_a_file_that_is_soon_there_takes_one_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_ALONE_S", 60.0)
    shelf = Counting({"weights": bytes(9000)})
    run(shelf, tmp_path, DownloadLimits(range_bytes=1000, parallel=8))
    assert (shelf.most, len(shelf.reads)) == (1, 9)


def test_more_connections_join_a_slow_one(tmp_path: Path) -> None:
    shelf = Counting({"weights": bytes(9000)}, meet=3)
    run(shelf, tmp_path, DownloadLimits(range_bytes=1000, parallel=3))
    assert shelf.most == 3


def test_a_range_that_never_gets_on_is_given_up(tmp_path: Path) -> None:
    shelf = Shelf({"weights": bytes(500)}, [0] * 100)
    with pytest.raises(SourceUnavailable, match="cannot be reached"):
        run(shelf, tmp_path)
    assert len(shelf.reads) == FAST.attempts


@pytest.mark.parametrize(("status", "kind"), [(403, SourceUnavailable), (412, VersionChanged), (404, VersionChanged)])
def test_what_no_retry_helps_is_tried_once(tmp_path: Path, status: int, kind: type[Exception]) -> None:
    shelf = Shelf({"weights": bytes(500)}, [0] * 100, HttpStatus(status))
    with pytest.raises(kind):
        run(shelf, tmp_path)
    assert len(shelf.reads) == 1


def test_disk_error_is_raised_as_it_is(tmp_path: Path) -> None:
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    shelf = Shelf({"weights": os.urandom(5000)})
    try:
        with pytest.raises(OSError, match="too large") as caught:
            run(shelf, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not isinstance(caught.value, SourceUnavailable)
    assert len(shelf.reads) <= FAST.parallel


def test_damage_twice_is_refused_unless_etags_are_no_md5(tmp_path: Path) -> None:
    shelf = Shelf({"weights": bytes(5000)})
    with pytest.raises(SourceUnavailable, match="MD5") as caught:
        run(shelf, tmp_path, etags={"weights": _md5(b"other")})
    assert "LORA_PLUGINS_CHECK_MD5=0" in caught.value.remedy
    run(Shelf({"weights": bytes(5000)}), tmp_path, md5=False, etags={"weights": _md5(b"other")})
    run(Shelf({"weights": bytes(5000)}), tmp_path, etags={"weights": _md5(b"other")[:-1] + '-2"'})
    assert (tmp_path / "weights").read_bytes() == bytes(5000)
