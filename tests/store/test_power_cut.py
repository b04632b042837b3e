"""What is written to the disk for a power cut: each byte once, and all at the same time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lora_plugins.store import durable_files
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, obtain

NAMES = ["adapter_config.json", "adapter_config.json", "adapter_model.safetensors", "manifest.json"]


def test_each_byte_is_written_to_the_disk_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def fsync(descriptor: int, real=os.fsync) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    obtain(store, DownloadSpec(adapter_files()))
    # The configuration as it arrives, and as engines read it; and the directory that has the files.
    assert sorted(name for name in synced if name in NAMES) == NAMES
    assert len(synced) == len(NAMES) + 1


def test_all_syncs_of_a_publish_are_asked_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3, timeout=60)
    monkeypatch.setattr(durable_files.os, "fsync", lambda _descriptor: together.wait())
    for name in ("one", "two"):
        (tmp_path / name).touch()
    durable_files.make_durable([tmp_path / "one", tmp_path / "two", tmp_path])  # it would wait for ever, one by one
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("one", "two")} == {0o444}
