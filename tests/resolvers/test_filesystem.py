"""The filesystem source: the shared contract, and what only a file system can do to it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.verify import PICKLE_FILES, WEIGHTS_FILE
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, SourceUnavailable
from lora_plugins.names import AdapterName
from lora_plugins.resolvers import filesystem
from lora_plugins.resolvers.filesystem import FilesystemSource
from tests.make import adapter_files, put
from tests.resolvers.contract import SourceContract, SourceHarness, locate, located, verify


class FilesystemHarness(SourceHarness):
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def make_source(self) -> FilesystemSource:
        return FilesystemSource(self.root)

    def put_adapter(self, name: str, files: Mapping[str, bytes]) -> None:
        put(self.root / name, files)

    def break_source(self) -> None:
        self.root.rename(self.root.with_name("gone"))  # a lost mount

    def restore_source(self) -> None:
        self.root.with_name("gone").rename(self.root)


class TestFilesystemSource(SourceContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> FilesystemHarness:
        return FilesystemHarness(tmp_path / "root")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_the_directory_is_the_name_below_the_root(root):
    put(root / "team" / "sql@v2", adapter_files())
    found = located(FilesystemSource(root), "team/sql@v2")
    assert found.directory == root / "team" / "sql@v2"
    assert found.inside == root


def test_it_says_where_it_looks(root):
    assert str(FilesystemSource(root)) == f"filesystem ({root})"


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE, *PICKLE_FILES])
def test_any_file_of_an_adapter_makes_a_directory_one(root, file):
    put(root / "sql", {file: b""})
    if file == CONFIG_FILE:
        assert located(FilesystemSource(root), "sql")
        return
    with pytest.raises(AdapterNotFound) as caught:
        locate(FilesystemSource(root), "sql")
    assert caught.value.file == CONFIG_FILE


def test_other_files_make_no_adapter(root):
    put(root / "sql", {"README.md": b"", "config.json": b"{}", "model.safetensors": b""})
    assert locate(FilesystemSource(root), "sql") is None


def test_a_file_is_no_adapter(root):
    (root / "sql").write_bytes(b"")
    assert locate(FilesystemSource(root), "sql") is None
    assert locate(FilesystemSource(root), "sql/x") is None


def test_a_dangling_configuration_is_there_but_broken(root):
    # Never None: somebody put it there.
    put(root / "sql", adapter_files())
    (root / "sql" / CONFIG_FILE).unlink()
    (root / "sql" / CONFIG_FILE).symlink_to("nowhere")
    with pytest.raises(LoRAPluginsError):
        verify(located(FilesystemSource(root), "sql"))


def test_a_path_longer_than_the_file_system_takes_is_none(root):
    while len(str(root)) < 3850:
        root /= "x" * 100
    root.mkdir(parents=True)
    name = "/".join(["a" * 60] * 4)
    with pytest.raises(OSError, match="too long"):
        os.stat(root / name)
    assert locate(FilesystemSource(root), name) is None


# --- symlinks


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return put(tmp_path / "root-outside" / "sql", adapter_files())


def test_a_directory_symlinked_out_of_the_root_is_refused(root, outside):
    (root / "sql").symlink_to(outside)
    with pytest.raises(InvalidAdapter, match=r"leaves the adapter root.*LORA_PLUGINS_FOLLOW_SYMLINKS"):
        locate(FilesystemSource(root), "sql")


def test_a_symlink_on_the_way_out_of_the_root_is_refused(root, outside):
    (root / "team").symlink_to(outside.parent)
    with pytest.raises(InvalidAdapter, match="leaves the adapter root"):
        locate(FilesystemSource(root), "team/sql")


def test_what_lies_outside_is_not_told_by_a_symlink(root, outside):
    # The same answer whether or not there is an adapter behind it.
    (outside / CONFIG_FILE).unlink()
    (outside / WEIGHTS_FILE).unlink()
    (root / "sql").symlink_to(outside)
    with pytest.raises(InvalidAdapter, match="leaves the adapter root"):
        locate(FilesystemSource(root), "sql")


def test_a_symlink_out_of_the_root_is_followed_where_that_is_allowed(root, outside):
    (root / "sql").symlink_to(outside)
    found = located(FilesystemSource(root, follow_symlinks=True), "sql")
    assert found.inside is None
    assert verify(found) == 4


def test_a_symlink_within_the_root_is_followed(root):
    put(root / "sql-v2", adapter_files())
    (root / "sql").symlink_to("sql-v2")
    assert verify(located(FilesystemSource(root), "sql")) == 4


def test_a_root_that_is_a_symlink_is_a_root(root, tmp_path):
    put(root / "sql", adapter_files())
    (tmp_path / "link").symlink_to(root)
    assert verify(located(FilesystemSource(tmp_path / "link"), "sql")) == 4


@pytest.mark.parametrize("follow", [True, False])
def test_a_symlink_loop_is_refused(root, follow):
    (root / "sql").symlink_to("loop")
    (root / "loop").symlink_to("sql")
    with pytest.raises(InvalidAdapter, match="circle"):
        locate(FilesystemSource(root, follow_symlinks=follow), "sql")


@pytest.mark.timeout(20)
def test_a_named_pipe_for_a_configuration_does_not_hang(root):
    put(root / "sql", adapter_files())
    (root / "sql" / CONFIG_FILE).unlink()
    os.mkfifo(root / "sql" / CONFIG_FILE)
    with pytest.raises(InvalidAdapter, match="not a regular file"):
        verify(located(FilesystemSource(root), "sql"))


# --- a file system that denies or fails


@pytest.mark.parametrize("directory", ["team", "team/sql"])
def test_a_directory_that_may_not_be_entered_is_an_outage(root, directory, permissions_count):
    put(root / "team" / "sql", adapter_files())
    (root / directory).chmod(0)
    try:
        with pytest.raises(SourceUnavailable):
            locate(FilesystemSource(root), "team/sql")
    finally:
        (root / directory).chmod(0o700)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("call", ["stat", "scandir"])
def test_a_file_system_that_fails_is_an_outage(root, monkeypatch, code, call):
    (root / "sql").mkdir()

    def fail(path):
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(filesystem.os, call, fail)
    with pytest.raises(SourceUnavailable, match=os.strerror(code)):
        locate(FilesystemSource(root), "sql")


def test_a_root_that_became_a_file_is_an_outage(root):
    root.rmdir()
    root.write_bytes(b"")
    with pytest.raises(SourceUnavailable, match="no directory"):
        locate(FilesystemSource(root), "sql")


# --- nothing leaves the root


SPELLINGS = st.text(st.sampled_from("abs./@\\ %2e~q"), min_size=1, max_size=12)


@given(spelling=st.one_of(SPELLINGS, st.text(max_size=20)))
def test_no_name_reaches_an_adapter_outside(tmp_path, spelling):
    root = tmp_path / "root"
    if not root.exists():
        for inside in ("a", "team/sql"):
            put(root / inside, adapter_files())
        for beside in ("a", "s", "sql", "root-outside/sql"):
            put(tmp_path / beside, adapter_files())
    try:
        name = AdapterName.parse(spelling)
        found = asyncio.run(FilesystemSource(root).locate(name))
    except LoRAPluginsError:
        return
    if found is not None:
        assert os.path.relpath(os.path.realpath(found.directory), root) == spelling
