"""A disk without bytes or inodes gives what nobody leases away; folders and files that others remove come back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_plugins.errors import NoFreeSlot, OutOfMemory, SourceUnavailable
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, check, leftovers, obtain, spoil
from tests.store.conftest import mounted
from tests.store.test_disk_errors import no_descriptors

RANK, HIDDEN = 16, 2048  # 256 KiB
UNLIMITED = 1 << 50


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
        except (OutOfMemory, NoFreeSlot):
            return digests
        if not is_leased:
            store.release("", stored.directory)
        digests.append(stored.digest)
        if digests[0] not in store.layout.digests():
            return digests
    raise AssertionError("the disk never fills")


@pytest.mark.parametrize("disk", ["few_bytes", "few_inodes"])
def test_a_full_disk_gives_what_nobody_leases(disk: str, request: pytest.FixtureRequest) -> None:
    store = Store(request.getfixturevalue(disk) / "store", max_bytes=UNLIMITED)
    evicted: list[str] = []
    store.evictor.on_evict = lambda digest, _: evicted.append(digest)
    digests = fill(store, is_leased=False)
    assert len(digests) >= 3
    assert evicted == digests[: len(evicted)], "the one used longest ago first, and no more than are in the way"
    assert len(evicted) <= 2
    last = obtain(store, adapter(1000))
    assert store.verify(last.digest)
    assert leftovers(store) == []


@pytest.mark.parametrize("disk", ["few_bytes", "few_inodes"])
def test_a_full_disk_of_leases_loses_nothing(disk: str, request: pytest.FixtureRequest) -> None:
    store = Store(request.getfixturevalue(disk) / "store", max_bytes=UNLIMITED)
    digests = fill(store, is_leased=True)
    wanted = adapter(1000)
    with pytest.raises((NoFreeSlot, OutOfMemory), match=r"engines still use|disk without free inodes"):
        obtain(store, wanted)
    assert wanted.fetches <= 1, "nothing was removed, so nothing is fetched again"
    assert sorted(digests) == store.layout.digests()
    store.release("", store.layout.adapter(digests[0]))
    assert store.verify(obtain(store, wanted).digest)
    assert digests[0] not in store.layout.digests()


def test_nothing_goes_where_the_rest_would_not_be_enough(few_bytes: Path) -> None:
    store = Store(few_bytes / "store", max_bytes=UNLIMITED)
    stored = obtain(store, adapter(0))
    store.release("", stored.directory)
    with pytest.raises(OutOfMemory, match="full disk"):
        obtain(store, adapter(1, hidden=16 * HIDDEN))
    assert store.layout.digests() == [stored.digest]


def fill_rest(disk: Path) -> None:
    """As somebody else's data does."""
    with contextlib.suppress(OSError), (disk / f"foreign-{len(list(disk.iterdir()))}").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass


def watched(store: Store) -> tuple[list[str], list[bool]]:
    """What goes from now on, and whether leases of names are asked to end."""
    evicted: list[str] = []
    asked: list[bool] = []
    store.evictor.on_evict = lambda digest, _: evicted.append(digest)

    async def relieve() -> None:
        asked.append(True)

    store.relieve = relieve
    return evicted, asked


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_write_that_fails_beside_free_bytes_removes_nothing(store: Store, number: int) -> None:
    stored = obtain(store, adapter(0))
    store.release("", stored.directory)
    evicted, asked = watched(store)

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    wanted = DownloadSpec(adapter_files(), before=fail)
    for _ in range(3):
        with pytest.raises(OutOfMemory, match=os.strerror(number)):
            obtain(store, wanted)
    assert wanted.fetches == (3 if number == errno.EFBIG else 6), "once more, in case that another fetch was the cause"
    assert (evicted, asked, store.pressed_at()) == ([], [], 0)
    assert store.layout.digests() == [stored.digest]


def test_fetches_at_once_each_have_their_room(few_bytes: Path) -> None:
    store = Store(few_bytes / "store", max_bytes=UNLIMITED)
    fill(store, is_leased=False)

    async def obtain_all() -> list[str]:
        wanted = [adapter(1000 + number) for number in range(3)]
        return [it.digest for it in await asyncio.gather(*(store.obtain(it, it.fetch, check) for it in wanted))]

    assert set(asyncio.run(obtain_all())) <= set(store.layout.digests())
    assert leftovers(store) == []


def test_a_fetch_takes_room_that_another_leaves(store: Store) -> None:
    """The other fetch met the full disk at the same time, and has removed its part by now."""
    evicted, _ = watched(store)
    wanted = adapter(0)

    def fail_once() -> None:
        if wanted.fetches == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    wanted.before = fail_once
    assert store.verify(obtain(store, wanted).digest)
    assert (wanted.fetches, evicted, leftovers(store)) == (2, [], [])


@pytest.mark.parametrize(("has_arrived", "expected"), [(False, 2), (True, 1)])
def test_room_is_made_beside_what_downloads_still_need(few_bytes: Path, has_arrived: bool, expected: int) -> None:
    store = Store(few_bytes / "store", max_bytes=UNLIMITED)
    digests = fill(store, is_leased=False)
    size_bytes = sum(size for _, size, _ in adapter(0).promised)
    other, own = (store.layout.new_temporary(store.processes.me(), size_bytes) for _ in range(2))
    other.mkdir()
    store.remove(digests[-1])
    (other / "adapter_model.safetensors").write_bytes(bytes(size_bytes if has_arrived else 0))
    fill_rest(few_bytes)
    evicted, _ = watched(store)
    store._make_room(size_bytes - (1 << 15), 2, own)
    assert len(evicted) == expected
    assert own.is_dir(), "the next fetch that looks for room counts this download, too"


def test_little_more_goes_where_others_take_what_is_freed(few_bytes: Path) -> None:
    store = Store(few_bytes / "store", max_bytes=UNLIMITED)
    digests = fill(store, is_leased=False)
    evicted, asked = watched(store)

    def evict(digest: str, _: int) -> None:
        evicted.append(digest)
        fill_rest(few_bytes)

    store.evictor.on_evict = evict
    with pytest.raises(OutOfMemory, match="full disk"):
        obtain(store, adapter(1000, hidden=2 * HIDDEN))
    assert set(evicted) < set(digests), "as much as the fetch needs, and once more"
    assert asked == []


def test_leases_stay_where_their_copies_would_not_be_enough(few_bytes: Path) -> None:
    store = Store(few_bytes / "store", max_bytes=UNLIMITED)
    fill(store, is_leased=True)
    (evicted, asked), before = watched(store), store.pressed_at()
    with pytest.raises(OutOfMemory, match="full disk"):
        obtain(store, adapter(1000, hidden=16 * HIDDEN))
    assert (evicted, asked, store.pressed_at()) == ([], [], before)


@pytest.mark.parametrize("folder", ["index", "tmp", "locks", "leases", "processes", "uses", "damaged"])
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

    async def fail(download: PartialDownload) -> None:
        (download.directory / "adapter_config.json").write_bytes(b"{}")
        lack.enter_context(no_descriptors())
        raise OSError(24, "Too many open files")

    with contextlib.ExitStack() as lack, pytest.raises(SourceUnavailable, match="Too many open files"):
        asyncio.run(store.obtain(adapter(0), fail, check))
    assert obtain(store, adapter(1)).fetched
    assert leftovers(store) == []


def test_an_adapter_that_could_not_be_removed_whole_goes_later(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory has no digest for a name any more, so that nothing counts its bytes."""
    stored = obtain(store, adapter(0))
    store.leases.release(stored.digest)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(
            shutil, "rmtree", lambda *_, **__: None
        )  # as without a descriptor, or by an error of the disk
        assert store.remove(stored.digest)
    assert len(leftovers(store)) == 1
    obtain(store, adapter(1))
    assert leftovers(store) == []


def test_a_replaced_copy_goes_where_no_lease_can_be_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = obtain(store, adapter(0))
    store.leases.release(stored.digest)
    spoil(stored.directory)
    assert not store.verify(stored.digest)
    full, original = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], store.leases._write

    def write(digest: str) -> None:
        if full:
            raise full.pop()
        original(digest)

    monkeypatch.setattr(store.leases, "_write", write)
    assert store.verify(obtain(store, adapter(0)).digest)
    assert (full, leftovers(store)) == ([], [])


def test_a_full_disk_ends_leases_that_nothing_uses(few_bytes: Path) -> None:
    """Each served name has one, so that without their end nothing would ever go."""
    store = Store(few_bytes / "store", max_bytes=UNLIMITED)
    digests = fill(store, is_leased=True)
    with pytest.raises(NoFreeSlot):
        obtain(store, adapter(1000))
    assert store.pressed_at(), "other servers end theirs"

    async def relieve() -> None:
        store.end_leases([(digests[1], "", None)])

    store.relieve = relieve
    assert store.verify(obtain(store, adapter(1000)).digest)
    assert sorted(set(digests) - {digests[1]}) == sorted(set(store.layout.digests()) & set(digests))
