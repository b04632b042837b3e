"""Hashing while a file arrives comes to the same as hashing it whole."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from pathlib import Path

import pytest

from lora_plugins.store import durable_files, hashing
from lora_plugins.store.durable_files import make_durable
from lora_plugins.store.hashing import GrowingFile, HashedEntries, identity_of, sha256_of
from lora_plugins.store.partial_download import PartialDownload

SIZES = [0, 1, 999, 1 << 20, (1 << 20) + 1, 3_500_000]


def answer(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pieces", [0, 1, 2, 17])
def test_a_file_hashed_as_it_grows(tmp_path: Path, size: int, pieces: int) -> None:
    """In no pieces: nothing of the file is reported before all of it is there."""
    data, path = os.urandom(size), tmp_path / "file"
    growing = GrowingFile(path)
    if not pieces:
        path.write_bytes(data)
    else:
        step = size // pieces + 1
        with path.open("ab", buffering=0) as file:
            for start in range(0, size, step):
                file.write(data[start : start + step])
                growing.landed(min(start + step, size))
    assert growing.finish() == sha256_of(path) == answer(data)


def test_only_what_has_landed_is_read(tmp_path: Path) -> None:
    # Ranges arrive in any order: what lies behind the contiguous beginning is not yet what it will be.
    path = tmp_path / "file"
    data = os.urandom(2_000_000)
    path.write_bytes(bytes(len(data)))
    growing = GrowingFile(path)
    with path.open("r+b", buffering=0) as file:
        for start in (1_000_000, 500_000):
            file.seek(start)
            file.write(data[start : start + 500_000])
        file.seek(0)
        file.write(data[:500_000])
        growing.landed(1_500_000)
        growing.landed(700_000)  # older news changes nothing
        file.seek(1_500_000)
        file.write(data[1_500_000:])
    assert growing.finish() == answer(data)


def test_reporting_too_much_is_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    growing = GrowingFile(tmp_path / "file")
    growing.landed(1000)
    assert growing.finish() == answer(b"abc")


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    growing = GrowingFile(tmp_path / "file")
    growing.landed(10)
    with pytest.raises(FileNotFoundError):
        growing.finish()


def test_hashing_has_begun_before_the_file_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    growing = GrowingFile(path)
    growing.landed(1000)
    for _ in range(6000):
        if growing._size_bytes == 1000:
            break
        threading.Event().wait(0.01)
    assert growing._size_bytes == 1000
    assert growing.finish() == answer(b"x" * 1000)


def test_many_files_take_few_threads(tmp_path: Path) -> None:
    names = [f"{number}" for number in range(256)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 1000)
    download = PartialDownload(tmp_path, names)
    before = threading.active_count()
    most = 0
    for name in names:
        download.landed(name, 10)
        most = max(most, threading.active_count())
    download.complete()
    make_durable([tmp_path / name for name in names])
    files = download.finish()
    assert max(most, threading.active_count()) <= before + durable_files._THREADS
    assert [(file.size_bytes, file.sha256) for file in files] == [answer(name.encode() * 1000) for name in names]


def test_a_forked_process_hashes_with_threads_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    sha256_of(tmp_path / "file")
    pid = os.fork()
    if not pid:
        os._exit(sha256_of(tmp_path / "file") != answer(b"x"))
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    made = tmp_path / "entry"
    made.mkdir()
    (made / "b").write_bytes(b"2")
    (made / "a").write_bytes(b"1")
    return made


def test_files_that_were_hashed_need_not_be_again(entry: Path) -> None:
    entries = HashedEntries()
    entries.note("digest", identity_of(entry))
    assert entries.has("digest", identity_of(entry), math.inf)
    assert not entries.has("digest", identity_of(entry), -1.0)
    entries.forget("digest")
    assert not entries.has("digest", identity_of(entry), math.inf)


def test_a_changed_file_differs_and_a_linked_one_does_not(entry: Path) -> None:
    entries = HashedEntries()
    entries.note("digest", identity_of(entry))
    os.link(entry / "a", entry.parent / "link")
    assert not entries.has("digest", identity_of(entry), math.inf)
    assert not entries.differs("digest", identity_of(entry))
    (entry / "a").write_bytes(b"other")
    assert entries.differs("digest", identity_of(entry))
    (entry / "folder").mkdir()
    (entry / "folder" / "c").write_bytes(b"3")
    entries.note("digest", identity_of(entry))
    (entry / "folder" / "c").write_bytes(b"more")
    assert entries.differs("digest", identity_of(entry))


def test_a_directory_that_is_gone_has_no_identity(entry: Path) -> None:
    assert identity_of(entry / "nowhere") is None
    entries = HashedEntries()
    entries.note("digest", None)
    assert not entries.has("digest", identity_of(entry), math.inf)


def test_the_entries_remembered_are_bounded(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_REMEMBERED", 2)
    entries = HashedEntries()
    for digest in ("first", "second", "third"):
        entries.note(digest, identity_of(entry))
    known = [entries.has(digest, identity_of(entry), math.inf) for digest in ("first", "second", "third")]
    assert known == [False, True, True]
