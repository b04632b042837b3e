"""What is being fetched: its files are hashed as they land."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lora_plugins.store.partial_download import PartialDownload
from tests.store.test_hashing import answer


def test_every_promised_file_is_hashed_in_order(tmp_path: Path) -> None:
    growing = PartialDownload(tmp_path, ["b", "a"])
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    growing.landed("a", 1)
    files = growing.finish()
    assert [(file.name, (file.size_bytes, file.sha256)) for file in files] == [
        ("b", answer(b"b")),
        ("a", answer(b"a")),
    ]


def test_starting_over_forgets_what_had_landed(tmp_path: Path) -> None:
    growing = PartialDownload(tmp_path, ["a"])
    (tmp_path / "a").write_bytes(b"old" * 1000)
    growing.landed("a", 3000)
    growing.start_over()
    (tmp_path / "a").write_bytes(b"new")
    growing.landed("a", 3)
    (file,) = growing.finish()
    assert (file.size_bytes, file.sha256) == answer(b"new")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    growing = PartialDownload(tmp_path, ["a", "b"])
    (tmp_path / "a").write_bytes(b"a")
    growing.landed("b", 10)
    with pytest.raises(FileNotFoundError):
        growing.finish()
    growing.finish_quietly()


def test_many_threads_may_report(tmp_path: Path) -> None:
    data = os.urandom(1_000_000)
    (tmp_path / "a").write_bytes(data)
    growing = PartialDownload(tmp_path, ["a"])
    tellers = [threading.Thread(target=growing.landed, args=("a", size)) for size in range(0, 1_000_000, 20_000)]
    for teller in tellers:
        teller.start()
    for teller in tellers:
        teller.join()
    (file,) = growing.finish()
    assert (file.size_bytes, file.sha256) == answer(data)
