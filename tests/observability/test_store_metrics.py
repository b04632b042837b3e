"""The store's size: of what is there now, and each manifest read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_plugins.observability.store_metrics import InStore, StoreSize
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, obtain


def test_what_is_there_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store", max_bytes=10_000_000)
    size = StoreSize()
    assert size.look(store) == InStore(0, 0, 10_000_000)
    stored = [obtain(store, DownloadSpec(adapter_files(seed=seed), version=str(seed))) for seed in range(3)]
    one = sum(map(len, adapter_files().values()))
    assert size.look(store) == InStore(3, 3 * one, 10_000_000)
    real, read = Manifest.read, []
    monkeypatch.setattr(Manifest, "read", lambda directory: read.append(directory) or real(directory))
    assert size.look(store) == InStore(3, 3 * one, 10_000_000)
    assert read == []
    store.leases.release(stored[0].digest)
    assert store.remove(stored[0].digest)
    assert size.look(store) == InStore(2, 2 * one, 10_000_000)
    assert list(size._sizes) == list(store.layout.digests())


def test_one_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    stored = obtain(store, DownloadSpec(adapter_files()))
    (store.layout.adapter("f" * 64)).mkdir()
    assert StoreSize().look(store) == InStore(1, sum(map(len, adapter_files().values())), None)
    assert stored.directory.is_dir()
