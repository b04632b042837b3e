"""What a failed fetch leaves behind: found by one fetch, whole or not at all, and gone where the room is needed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from lora_plugins.errors import OutOfMemory, SourceUnavailable
from lora_plugins.store import kept_parts
from lora_plugins.store.kept_parts import all_parts, keep, place_of, take
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, leftovers, obtain

WEIGHTS = "adapter_model.safetensors"
RANGES = {WEIGHTS: [(0, 100), (200, 300)]}
SIZES = {WEIGHTS: len(adapter_files()[WEIGHTS])}


def fail(store: Store, wanted: DownloadSpec, error: Exception) -> None:
    """Fetch, and fail after something has arrived."""

    async def half(download: PartialDownload) -> None:
        (download.directory / WEIGHTS).write_bytes(bytes(len(wanted.files[WEIGHTS])))
        download.leave(RANGES)
        raise error

    whole, wanted.fetch = wanted.fetch, half
    with pytest.raises((SourceUnavailable, OutOfMemory)):
        obtain(store, wanted)
    wanted.fetch = whole


def test_the_next_fetch_finds_the_files_and_their_ranges(store: Store) -> None:
    wanted = DownloadSpec(adapter_files())
    fail(store, wanted, SourceUnavailable("an outage"))
    found: list[object] = []

    async def fetch(download: PartialDownload) -> None:
        found.extend([dict(download.kept), sorted(os.listdir(download.directory))])
        await DownloadSpec.fetch(wanted, download)

    wanted.fetch = fetch
    assert obtain(store, wanted).fetched
    assert found == [RANGES, ["adapter_model.safetensors"]]
    assert all_parts(store.layout) == []
    assert leftovers(store) == []


def test_one_of_two_who_take_it_has_it(store: Store, tmp_path: Path) -> None:
    fail(store, DownloadSpec(adapter_files()), SourceUnavailable("an outage"))
    place = place_of(store.layout, "test://adapter", "v1")
    assert take(place, tmp_path / "one", SIZES) == RANGES
    assert take(place, tmp_path / "two", SIZES) == {}
    assert os.listdir(tmp_path / "two") == []


def test_the_later_of_two_who_keep_it_counts(store: Store, tmp_path: Path) -> None:
    place = place_of(store.layout, "test://adapter", "v1")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
        keep(place, tmp_path / name, RANGES)
    assert (place / "adapter_model.safetensors").read_text() == "two"
    assert len(all_parts(store.layout)) == 1


def test_another_version_of_the_adapter_removes_it(store: Store) -> None:
    fail(store, DownloadSpec(adapter_files()), SourceUnavailable("an outage"))
    fail(store, DownloadSpec(adapter_files(), uri="test://other"), SourceUnavailable("an outage"))
    obtain(store, DownloadSpec(adapter_files(seed=1), version="v2"))
    assert [parts.path for parts in all_parts(store.layout)] == [place_of(store.layout, "test://other", "v1")]


def test_what_is_a_day_old_goes_when_more_is_kept(store: Store) -> None:
    fail(store, DownloadSpec(adapter_files()), SourceUnavailable("an outage"))
    (old,) = all_parts(store.layout)
    os.utime(old.path, (old.kept_at - kept_parts.KEPT_S - 1,) * 2)
    fail(store, DownloadSpec(adapter_files(), uri="test://other"), SourceUnavailable("an outage"))
    assert [parts.path for parts in all_parts(store.layout)] == [place_of(store.layout, "test://other", "v1")]


def test_a_full_disk_gets_the_room_of_all_parts(store: Store) -> None:
    fail(store, DownloadSpec(adapter_files()), SourceUnavailable("an outage"))
    fail(store, DownloadSpec(adapter_files(), uri="test://other"), OSError(errno.ENOSPC, "full"))
    assert all_parts(store.layout) == []


def test_parts_that_cannot_be_kept_are_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_parts, "sync_directory", _refuse)
    monkeypatch.setattr(kept_parts.os, "fsync", _refuse)
    fail(store, DownloadSpec(adapter_files()), SourceUnavailable("an outage"))
    assert all_parts(store.layout) == []
    assert leftovers(store) == []


def _refuse(_: object) -> None:
    raise OSError(errno.EIO, "no")


def test_a_process_that_dies_while_it_goes_on_leaves_nothing(store: Store) -> None:
    fail(store, DownloadSpec(adapter_files()), SourceUnavailable("an outage"))
    place = place_of(store.layout, "test://adapter", "v1")
    take(place, store.layout.new_temporary("nobody.1.1", 500), SIZES)
    again = Store(store.layout.root)
    assert leftovers(again) == []
    assert obtain(again, DownloadSpec(adapter_files())).fetched


def test_a_store_of_an_earlier_release_gets_the_folder(store: Store) -> None:
    shutil.rmtree(store.layout.folder("parts"))
    assert obtain(Store(store.layout.root), DownloadSpec(adapter_files())).fetched
