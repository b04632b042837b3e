"""The store that the settings name is opened, also by many at once, and swept."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from lora_plugins.errors import InvalidSettings, OutOfMemory
from lora_plugins.settings import Settings
from lora_plugins.store.eviction import pending_bytes
from lora_plugins.store.store import Store, open_store
from tests.other_processes import other_processes
from tests.store.common import DownloadSpec, adapter_files, leftovers, obtain

DIGEST = "0123456789abcdef" * 4


def test_a_store_can_be_opened_again_and_again(store: Store) -> None:
    stored = obtain(store, DownloadSpec(adapter_files()))
    again = Store(store.layout.root)
    assert again.layout.digests() == [stored.digest]
    assert not obtain(again, DownloadSpec(adapter_files())).fetched


def test_many_may_open_at_once(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def open_one(_: int) -> Store:
        start.wait()
        return Store(tmp_path / "a" / "deep" / "store")

    with ThreadPoolExecutor(8) as executor:
        stores = list(executor.map(open_one, range(8)))
    assert len({store.processes.me() for store in stores}) == 1
    assert obtain(stores[0], DownloadSpec(adapter_files())).fetched
    assert not obtain(stores[7], DownloadSpec(adapter_files())).fetched


def fetch_eight(root: Path) -> None:
    for seed in range(8):
        obtain(Store(root), DownloadSpec(adapter_files(seed=seed), version=str(seed)))


def test_many_processes_may_open_while_others_fetch(tmp_path: Path) -> None:
    with other_processes(3) as processes:
        list(processes.map(fetch_eight, [tmp_path / "store"] * 3))
    store = Store(tmp_path / "store")
    assert len(store.layout.digests()) == 8
    assert all(store.verify(digest) for digest in store.layout.digests())
    assert leftovers(store) == []


@pytest.mark.deployment("store on a read-only file system", "refused", "at start: L007")
@pytest.mark.parametrize("there", ["read-only root", "read-only parent", "read-only folder", "a file", "below a file"])
def test_a_root_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path, permissions_count: None, there: str) -> None:
    root = tmp_path / "parent" / "store"
    root.parent.mkdir()
    if there == "read-only root":
        root.mkdir()
        root.chmod(0o500)
    elif there == "read-only parent":
        root.parent.chmod(0o500)
    elif there == "read-only folder":
        Store(root)
        (root / ".processes").chmod(0o500)
        for name in os.listdir(root / ".processes"):
            (root / ".processes" / name).chmod(0o600)
        shutil.rmtree(root / ".tmp")
        root.chmod(0o500)
    else:
        root.write_bytes(b"")
        root = root / "below" if there == "below a file" else root
    try:
        with pytest.raises(InvalidSettings, match="LORA_PLUGINS_STORE_DIR") as caught:
            open_store(Settings(store_dir=root))
        assert str(root) in str(caught.value)
    finally:
        with contextlib.suppress(OSError):
            (tmp_path / "parent").chmod(0o700)
            (tmp_path / "parent" / "store").chmod(0o700)


def test_opening_leaves_a_waiting_fetch_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its lock file is there before its owner's name is in it.
    real = Path.write_text

    def slow(path: Path, *arguments: str) -> int:
        path.touch()
        Store(store.layout.root)
        return real(path, *arguments)

    monkeypatch.setattr(Path, "write_text", slow)
    assert obtain(store, DownloadSpec(adapter_files())).fetched


def test_the_settings_reach_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    env = {"LORA_PLUGINS_STORE_DIR": "~/store", "LORA_PLUGINS_STORE_MAX_BYTES": "100"}
    store = open_store(Settings.from_env(env))
    assert store.layout.root == tmp_path / "store"
    with pytest.raises(OutOfMemory, match="LORA_PLUGINS_STORE_MAX_BYTES"):
        obtain(store, DownloadSpec(adapter_files()))


def test_opening_sweeps_what_dead_processes_left(store: Store) -> None:
    dead, alive = f"{store.processes.me().partition('.')[0]}.999999999.5", store.processes.me()
    tmp, locks = store.layout.folder("tmp"), store.layout.folder("locks")
    for owner in (dead, alive):
        (tmp / f"{owner}.aabb.1000").mkdir()
        (tmp / f"{owner}.aabb.1000" / "adapter_model.safetensors").write_bytes(b"half")
        (tmp / f"{owner}.ccdd.0").write_text("half an index")
        (locks / f"{owner}.fetch").touch()
        (store.layout.folder("processes") / owner).touch()
    (store.layout.folder("quarantine") / f"{DIGEST}.aabb").mkdir(parents=True)  # of an earlier release
    with FileLock(locks / f"{alive}.fetch"):
        Store(store.layout.root)
    assert set(os.listdir(tmp)) == {f"{alive}.aabb.1000", f"{alive}.ccdd.0"}
    assert f"{alive}.fetch" in os.listdir(locks)
    assert f"{dead}.fetch" not in os.listdir(locks)
    assert os.listdir(store.layout.folder("processes")) == [alive]
    assert os.listdir(store.layout.folder("quarantine")) == []
    assert pending_bytes(store.layout)[0] == 1000
