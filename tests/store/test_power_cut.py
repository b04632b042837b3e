"""A power cut at any moment: of what was not written to the disk, anything may be lost, and no half adapter is served.

`Disk` stands between the store and the file system. It notes what each `fsync` makes durable, and makes the worst
directory tree that a power cut may leave: files have the content of their last `fsync`, directories the names of
theirs, and a rename is there whether anybody has asked for it or not.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lora_plugins.store import layout
from lora_plugins.store import store as store_module
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.store import Store
from tests.make import content
from tests.store.common import DownloadSpec, adapter_files, obtain

NAMES = {"adapter_config.json", "adapter_config.original.json", "adapter_model.safetensors", "manifest.json"}
SYNCED = NAMES - {"adapter_config.original.json"}  # as it arrives, it has the other's name


class Disk:
    """What would be there after a power cut, of one store; `cuts` has a tree for each rename, just after it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._durable: dict[int, bytes | frozenset[str]] = {}  # by inode: content, or names
        self.cuts: list[Path] = []
        self.fsyncs: list[str] = []
        real_fsync = os.fsync

        def fsync(descriptor: int) -> None:
            real_fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.fsyncs.append(path.name)
            self._note(path)

        def then_cut(rename: Callable[..., None]) -> Callable[..., None]:
            def renamed(source: Path, target: Path) -> None:
                rename(source, target)
                if self._root in Path(target).parents:  # not in what the test makes of a tree
                    self.cut()

            return renamed

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", then_cut(os.rename))
        monkeypatch.setattr(os, "replace", then_cut(os.replace))

    def _note(self, path: Path) -> None:
        found = frozenset(os.listdir(path)) if path.is_dir() else path.read_bytes()
        self._durable[path.stat().st_ino] = found

    def cut(self) -> None:
        """Make the tree that a power cut may leave now, beside the store."""
        tree = self._root.with_name(f"after-cut-{len(self.cuts)}")
        self._copy(self._root, tree)
        self.cuts.append(tree)

    def _copy(self, path: Path, target: Path) -> None:
        # The store's own folders are there since its start: only what is in adapters' directories may be lost whole.
        is_own = path == self._root or (path.parent == self._root and path.name.startswith("."))
        durable = self._durable.get(path.stat().st_ino)
        if path.is_dir():
            target.mkdir()
            for name in os.listdir(path):
                if is_own or (isinstance(durable, frozenset) and name in durable):
                    self._copy(path / name, target / name)
        else:
            target.write_bytes(durable if isinstance(durable, bytes) else b"")


@pytest.fixture
def disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(store.layout.root, monkeypatch)


def after(tree: Path) -> Store:
    """The store that finds this after the cut; the files' owner is gone then."""
    for folder in (".processes", ".locks", ".leases"):
        for entry in (tree / folder).iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return Store(tree)


def assert_whole_or_absent(tree: Path, wanted: DownloadSpec) -> None:
    """Every adapter that is there is all that its name says, and the version can be had."""
    for digest in Store(tree).layout.digests():
        assert set(os.listdir(tree / digest)) == NAMES
    store = after(tree)
    assert all(store.verify(digest) for digest in store.layout.digests())
    assert_served(store, wanted)


def assert_served(store: Store, wanted: DownloadSpec) -> None:
    """The version can be had, from the store or fetched again, with the right bytes."""
    stored = obtain(store, wanted)
    assert Manifest.read(stored.directory).digest == stored.digest
    assert content(stored.directory) == wanted.files


def test_a_published_adapter_is_whole_after_a_power_cut(store: Store, disk: Disk) -> None:
    wanted = DownloadSpec(adapter_files())
    stored = obtain(store, wanted)
    disk.cut()
    assert len(disk.cuts) >= 3  # the index, the adapter, and the end
    assert [(tree / stored.digest).exists() for tree in disk.cuts][-2:] == [True, True]
    for tree in disk.cuts:
        assert_whole_or_absent(tree, wanted)


def test_a_replaced_adapter_is_whole_after_a_power_cut(store: Store, disk: Disk) -> None:
    wanted = DownloadSpec(adapter_files())
    stored = obtain(store, wanted)
    weights = stored.directory / "adapter_model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(b"x" * weights.stat().st_size)
    assert not store.verify(stored.digest)
    disk._note(weights)
    disk.fsyncs.clear()
    before = len(disk.cuts)
    assert obtain(store, wanted).fetched
    disk.cut()
    for tree in disk.cuts[before:]:
        assert_served(after(tree), wanted)
    assert store.layout.root.name in disk.fsyncs  # before the mark of the damaged one goes


def test_each_byte_is_written_to_the_disk_once(store: Store, disk: Disk) -> None:
    obtain(store, DownloadSpec(adapter_files()))
    assert set(disk.fsyncs) > SYNCED
    assert len(disk.fsyncs) == len(NAMES) + 1  # and the directory that has them


@pytest.mark.parametrize("left_out", [*sorted(SYNCED), "the directory"])
def test_a_sync_that_is_left_out_is_noticed(
    store: Store, disk: Disk, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    # Of the tests above, not of the store: they would be worth nothing if they passed here.
    def without(real: Callable[[list[Path]], object], paths: list[Path]) -> object:
        return real(
            [path for path in paths if path.name != left_out and (left_out != "the directory" or path.is_file())]
        )

    for name in ("make_durable", "start_syncing"):
        monkeypatch.setattr(store_module, name, partial(without, getattr(store_module, name)))
    wanted = DownloadSpec(adapter_files())
    obtain(store, wanted)
    trees = list(disk.cuts)

    def all_whole() -> None:
        for tree in trees:
            assert_whole_or_absent(tree, wanted)

    with pytest.raises(AssertionError):
        all_whole()


def test_a_lost_index_is_fetched_again(store: Store, disk: Disk) -> None:
    wanted = DownloadSpec(adapter_files())
    stored = obtain(store, wanted)
    disk.cut()
    (index,) = (disk.cuts[-1] / ".index").iterdir()
    assert index.read_bytes() == b""  # nobody has waited for it
    again = obtain(after(disk.cuts[-1]), wanted)
    assert (again.fetched, again.digest) == (True, stored.digest)


def test_all_syncs_of_a_publish_are_asked_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    together = threading.Barrier(3, timeout=60)
    monkeypatch.setattr(layout.os, "fsync", lambda _descriptor: together.wait())
    for name in ("one", "two"):
        (tmp_path / name).touch()
    layout.make_durable([tmp_path / "one", tmp_path / "two", tmp_path])  # it would wait for ever, one by one
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("one", "two")} == {0o444}
