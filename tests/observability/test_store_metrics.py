"""How full the store is: current, with each manifest read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_plugins.observability.store_metrics import StoreUsage, StoreUsageReader
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, obtain


def test_usage_is_current_and_reads_each_manifest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store", max_bytes=10_000_000)
    reader = StoreUsageReader()
    assert reader.read(store) == StoreUsage(0, 0, 10_000_000)
    stored = [obtain(store, DownloadSpec(adapter_files(seed=seed), version=str(seed))) for seed in range(3)]
    one = sum(map(len, adapter_files().values()))
    assert reader.read(store) == StoreUsage(3, 3 * one, 10_000_000)
    real, read = Manifest.read, []
    monkeypatch.setattr(Manifest, "read", lambda directory: read.append(directory) or real(directory))
    assert reader.read(store) == StoreUsage(3, 3 * one, 10_000_000)
    assert read == []
    store.leases.release(stored[0].digest)
    assert store.remove(stored[0].digest)
    assert reader.read(store) == StoreUsage(2, 2 * one, 10_000_000)
    assert list(reader._sizes) == list(store.layout.digests())


def test_adapter_without_a_readable_manifest_is_skipped(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    stored = obtain(store, DownloadSpec(adapter_files()))
    (store.layout.adapter("f" * 64)).mkdir()
    assert StoreUsageReader().read(store) == StoreUsage(1, sum(map(len, adapter_files().values())), None)
    assert stored.directory.is_dir()
