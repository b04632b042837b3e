"""moto as a process: objects, ETags, anonymous access, reset, and nothing left running."""

from __future__ import annotations

import hashlib
import os

import pytest
import s3fs

from testbed.s3 import MIN_PART, S3, s3_server


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(server: S3) -> S3:
    server.reset()
    return server


def filesystem(s3: S3, monkeypatch: pytest.MonkeyPatch, *, anonymous: bool = False) -> s3fs.S3FileSystem:
    for name, value in s3.env(anonymous=anonymous).items():
        monkeypatch.setenv(name, value)
    return s3fs.S3FileSystem(anon=anonymous, skip_instance_cache=True)


def test_a_client_configured_by_environment_reads_what_was_put(s3, monkeypatch):
    bucket = s3.bucket()
    etags = bucket.put_many("sql", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x" * 1000})
    fs = filesystem(s3, monkeypatch)
    assert etags["adapter_config.json"] == f'"{hashlib.md5(b"{}").hexdigest()}"'
    assert {os.path.basename(f["name"]): f["ETag"] for f in fs.ls("adapters/sql", detail=True)} == etags
    assert fs.cat_file("adapters/sql/adapter_model.safetensors", start=990, end=2000) == b"x" * 10
    with pytest.raises(FileNotFoundError):
        fs.info("adapters/none")


def test_replaced_objects_change_etag_and_deleted_ones_go(s3):
    bucket = s3.bucket()
    first, second = bucket.put("a/b", b"1"), bucket.put("a/b", b"2")
    assert first != second
    assert bucket.get("a/b") == b"2"
    bucket.delete_prefix("a/")
    assert bucket.list() == {}


def test_a_multipart_etag_is_no_md5_of_its_bytes(s3):
    data = os.urandom(MIN_PART + 10)
    bucket = s3.bucket()
    assert bucket.put("big", data, part_size=MIN_PART).endswith('-2"')
    assert bucket.get("big") == data
    with pytest.raises(ValueError, match="part_size"):
        bucket.put("big", data, part_size=10)


def test_a_directory_goes_up_with_its_subdirectories(s3, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f").write_bytes(b"12")
    s3.bucket().put_directory("x", tmp_path)
    assert s3.bucket("adapters").list("x/") == {"x/sub/f": 2}


def test_anonymous_clients_read_public_objects_only(s3, monkeypatch):
    bucket = s3.bucket()
    bucket.put("open", b"1", public=True)
    bucket.put("closed", b"2")
    fs = filesystem(s3, monkeypatch, anonymous=True)
    assert fs.cat_file("adapters/open") == b"1"
    with pytest.raises(PermissionError):
        fs.cat_file("adapters/closed")


def test_reset_forgets_everything_in_the_running_server(s3):
    s3.bucket().put("k", b"1")
    s3.reset()
    os.kill(s3.pid, 0)
    assert s3.bucket().list() == {}


def test_the_process_ends_with_the_block():
    with s3_server() as running:
        os.kill(running.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(running.pid, 0)
