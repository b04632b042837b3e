"""The few threads that hash and write."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

from lora_plugins.store import threads as threads_module
from lora_plugins.store.hashing import sha256_of
from lora_plugins.store.layout import make_durable
from lora_plugins.store.partial_download import PartialDownload


def answer(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


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
    assert max(most, threading.active_count()) <= before + threads_module._THREADS
    assert [(file.size_bytes, file.sha256) for file in files] == [answer(name.encode() * 1000) for name in names]


def test_a_forked_process_hashes_with_threads_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    sha256_of(tmp_path / "file")
    pid = os.fork()
    if not pid:
        os._exit(sha256_of(tmp_path / "file") != answer(b"x"))
    assert os.waitpid(pid, 0)[1] == 0
