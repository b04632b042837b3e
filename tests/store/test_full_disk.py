"""A disk without bytes or inodes gives what nobody leases away; folders and files that others remove come back."""

from __future__ import annotations

import asyncio
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_plugins.errors import OutOfMemory, SourceUnavailable
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, check, leftovers, obtain

RANK, HIDDEN = 16, 2048  # 256 KiB


def mounted(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def few_bytes(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "size=1m")


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "size=64m,nr_inodes=80")


def adapter(number: int, hidden: int = HIDDEN) -> DownloadSpec:
    return DownloadSpec(adapter_files(rank=RANK, hidden=hidden, seed=number), uri=f"test://{number}")


def fill(store: Store, *, is_leased: bool) -> list[str]:
    """Obtain adapters until the disk has no room for one more; returns their digests."""
    digests: list[str] = []
    for number in range(100):
        wanted = adapter(number)
        try:
            stored = obtain(store, wanted)
        except OutOfMemory:
            return digests
        if not is_leased:
            store.release("", stored.directory)
        digests.append(stored.digest)
        if digests[0] not in store.layout.digests():
            return digests
    raise AssertionError("the disk never fills")


@pytest.mark.parametrize("disk", ["few_bytes", "few_inodes"])
def test_a_full_disk_gives_what_nobody_leases(disk: str, request: pytest.FixtureRequest) -> None:
    store = Store(request.getfixturevalue(disk) / "store")
    evicted: list[str] = []
    store.on_evict = lambda digest, _: evicted.append(digest)
    digests = fill(store, is_leased=False)
    assert len(digests) >= 3
    assert evicted == digests[: len(evicted)], "the one used longest ago first, and no more than are in the way"
    assert len(evicted) <= 2
    last = obtain(store, adapter(1000))
    assert store.verify(last.digest)
    assert leftovers(store) == []


@pytest.mark.parametrize(("disk", "found"), [("few_bytes", "full disk"), ("few_inodes", "disk without free inodes")])
def test_a_full_disk_of_leases_says_what_is_missing(disk: str, found: str, request: pytest.FixtureRequest) -> None:
    store = Store(request.getfixturevalue(disk) / "store")
    digests = fill(store, is_leased=True)
    wanted = adapter(1000)
    with pytest.raises(OutOfMemory, match=found):
        obtain(store, wanted)
    assert wanted.fetches <= 1, "nothing was removed, so nothing is fetched again"
    assert sorted(digests) == store.layout.digests()
    store.release("", store.layout.adapter(digests[0]))
    assert store.verify(obtain(store, wanted).digest)
    assert digests[0] not in store.layout.digests()


def test_nothing_goes_where_the_rest_would_not_be_enough(few_bytes: Path) -> None:
    store = Store(few_bytes / "store")
    stored = obtain(store, adapter(0))
    store.release("", stored.directory)
    with pytest.raises(OutOfMemory, match="full disk"):
        obtain(store, adapter(1, hidden=16 * HIDDEN))
    assert store.layout.digests() == [stored.digest]


@pytest.mark.parametrize("folder", ["index", "tmp", "locks", "leases", "processes", "uses", "damaged", "quarantine"])
def test_folders_that_a_cleaner_removes_are_made_again(store: Store, folder: str) -> None:
    stored = obtain(store, adapter(0))
    shutil.rmtree(store.layout.folder(folder))
    assert obtain(store, adapter(1)).fetched
    shutil.rmtree(store.layout.folder(folder), ignore_errors=True)
    assert store.acquire(stored.digest, "other") is not None
    assert store.leases.holders(stored.digest) != [], "others see the lease"
    store.release("other", stored.directory)
    store.release("", stored.directory)
    shutil.rmtree(store.layout.folder(folder), ignore_errors=True)
    assert store.remove(stored.digest)


def test_a_store_that_is_away_is_not_made_again(store: Store) -> None:
    """An unmounted file system leaves an empty directory, and what is written there hides below the next mount."""
    stored = obtain(store, adapter(0))
    away = store.layout.root.rename(store.layout.root.with_name("away"))
    store.layout.root.mkdir()
    with pytest.raises(SourceUnavailable):
        obtain(store, adapter(1))
    with pytest.raises(SourceUnavailable):
        store.acquire(stored.digest, "other")
    assert list(store.layout.root.iterdir()) == []
    store.layout.root.rmdir()
    away.rename(store.layout.root)
    assert obtain(store, adapter(1)).fetched


def test_what_a_fetch_could_not_remove_is_removed_later(tmp_path: Path) -> None:
    """Without a file descriptor no directory is removed, and the room that a fetch has announced stays taken."""
    size_bytes = sum(size for _, size, _ in adapter(0).promised)
    store = Store(tmp_path / "store", max_bytes=size_bytes * 3 // 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def fail(download: PartialDownload) -> None:
        (download.directory / "adapter_config.json").write_bytes(b"{}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        raise OSError(24, "Too many open files")

    async def lack() -> None:
        try:
            with pytest.raises(SourceUnavailable, match="Too many open files"):
                await store.obtain(adapter(0), fail, check)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    asyncio.run(lack())
    assert obtain(store, adapter(1)).fetched
    assert leftovers(store) == []


def test_a_full_disk_ends_leases_that_nothing_uses(few_bytes: Path) -> None:
    """Each served name has one, so that without their end nothing would ever go."""
    store = Store(few_bytes / "store")
    digests = fill(store, is_leased=True)
    with pytest.raises(OutOfMemory):
        obtain(store, adapter(1000))
    assert store.pressed_at(), "other servers end theirs"

    async def relieve() -> None:
        store.end_leases([(digests[1], "", None)])

    store.relieve = relieve
    assert store.verify(obtain(store, adapter(1000)).digest)
    assert sorted(set(digests) - {digests[1]}) == sorted(set(store.layout.digests()) & set(digests))
