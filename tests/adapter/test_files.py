"""Files that somebody else wrote: regular ones only, inside the root, and every system error is one of ours."""

from __future__ import annotations

import errno
import os
import socket
import threading

import pytest

from lora_plugins.adapter import files
from lora_plugins.adapter.files import map_os_error, open_regular
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, SourceUnavailable


def opened(path):
    with open_regular(path) as (file, size_bytes):
        return file.read(), size_bytes


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("path", ["a.json", "file/a", "x" * 300])
def test_a_path_that_does_not_exist_is_not_found(tmp_path, path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(AdapterNotFound) as caught:
        opened(tmp_path / path)
    assert caught.value.file == path.rpartition("/")[2]


@pytest.mark.timeout(120)
def test_a_named_pipe_with_a_writer_is_refused_too(tmp_path):
    os.mkfifo(tmp_path / "a")
    writer = threading.Thread(target=lambda: open(tmp_path / "a", "wb").close(), daemon=True)
    writer.start()
    with pytest.raises(InvalidAdapter, match="not a regular file"):
        opened(tmp_path / "a")
    os.close(os.open(tmp_path / "a", os.O_RDONLY | os.O_NONBLOCK))  # lets the writer go, should it come late


@pytest.mark.timeout(120)
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path may have 107 bytes only
    os.mkfifo("pipe")
    (tmp_path / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for name in ("pipe", "directory", "socket", "/dev/null"):
            with pytest.raises(InvalidAdapter, match="not a regular file"):
                opened(tmp_path / name)


def test_what_is_refused_leaves_no_descriptor_open(tmp_path):
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = descriptors()
    for _ in range(5):
        for name in ("directory", "pipe", "missing"):
            with pytest.raises((InvalidAdapter, AdapterNotFound)):
                opened(tmp_path / name)
    assert descriptors() == before


def test_a_symlink_loop_is_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(InvalidAdapter, match="circle"):
        opened(tmp_path / "a")


def test_permission_denied_is_an_unavailable_source(tmp_path, permissions_count):
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "a").chmod(0)
    with pytest.raises(SourceUnavailable, match="Permission denied"):
        opened(tmp_path / "a")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
def test_a_file_system_that_fails_is_an_unavailable_source(tmp_path, monkeypatch, code):
    (tmp_path / "a").write_bytes(b"text")

    def fail(path, flags):
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(files.os, "open", fail)
    with pytest.raises(SourceUnavailable) as caught:
        opened(tmp_path / "a")
    assert os.strerror(code) in caught.value.found
    assert caught.value.file == "a"


@pytest.mark.parametrize(
    ("error", "kind"), [(OSError(errno.EIO, "Input/output"), SourceUnavailable), (InvalidAdapter("x"), InvalidAdapter)]
)
def test_errors_while_reading_have_the_files_name(tmp_path, error, kind):
    (tmp_path / "a").write_bytes(b"text")
    with pytest.raises(kind) as caught, open_regular(tmp_path / "a"):
        raise error
    assert caught.value.file == "a"


@pytest.mark.parametrize("code", sorted(errno.errorcode))
def test_every_system_error_becomes_one_of_ours(code):
    error = map_os_error(OSError(code, os.strerror(code)))
    assert isinstance(error, (AdapterNotFound, InvalidAdapter, SourceUnavailable))
    # A 404 is only said where the system says "no such file".
    absent = code in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
    assert isinstance(error, AdapterNotFound) == absent
    assert error.expected
    assert error.remedy
