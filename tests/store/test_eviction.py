"""Room where leases are in the way, and the budget of a store that was given none."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_plugins.adapter.config import CONFIG_FILE, ORIGINAL_CONFIG_FILE
from lora_plugins.errors import NoFreeSlot, OutOfMemory, SourceUnavailable
from lora_plugins.store import eviction
from lora_plugins.store.eviction import damaged_in
from lora_plugins.store.inventory import Inventory
from lora_plugins.store.layout import MANIFEST_FILE
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, cancel, check, leftovers, obtain

SIZE = sum(map(len, adapter_files().values()))
GIB = 1 << 30


@pytest.fixture
def full(tmp_path: Path) -> tuple[Store, list[str]]:
    """A store for three, which are there and leased."""
    store = Store(tmp_path / "store", max_bytes=3 * SIZE)
    return store, [fill(store, seed) for seed in range(1, 4)]


def release(store: Store, digests: list[str]) -> None:
    for seed, digest in enumerate(digests, 1):
        store.leases.release(digest, seed)


def fill(store: Store, seed: int) -> str:
    wanted = DownloadSpec(adapter_files(seed=seed), version=f"{seed}")
    return asyncio.run(store.obtain(wanted, wanted.fetch, check, holder=seed)).digest


def test_leases_that_nothing_uses_end_before_a_fetch_fails(full) -> None:
    store, digests = full

    async def relieve() -> None:
        store.end_leases([(digests[1], 2, None)])

    store.relieve = relieve
    fourth = fill(store, 4)
    assert set(store.layout.digests()) == {digests[0], digests[2], fourth}
    assert store.pressed_at() == 0, "there was room"
    with pytest.raises(NoFreeSlot):
        fill(store, 5)
    assert store.pressed_at() > 0


def test_leases_end_whole_although_their_caller_leaves(full) -> None:
    store, digests = full

    async def leave() -> None:
        began = asyncio.Event()

        async def relieve() -> None:
            began.set()
            await asyncio.sleep(0.05)
            store.end_leases([(digests[1], 2, None)])

        store.relieve = relieve
        wanted = DownloadSpec(adapter_files(seed=4), version="4")
        await cancel(store.obtain(wanted, wanted.fetch, check), began.wait())
        assert wanted.fetches == 0

    asyncio.run(leave())
    assert not store.leases.holders(digests[1])
    assert leftovers(store) == []


def test_nothing_goes_where_all_of_it_is_not_enough(full) -> None:
    store, digests = full
    store.leases.release(digests[0], 1)
    large = DownloadSpec(adapter_files(hidden=40), version="large")
    with pytest.raises(NoFreeSlot):
        obtain(store, large)
    assert store.layout.digests() == sorted(digests)


def test_what_was_used_longest_ago_goes_first(full) -> None:
    store, digests = full

    async def relieve() -> None:
        now = os.stat(store.layout.root).st_mtime
        store.end_leases([(digest, seed, now - 10 * seed) for seed, digest in enumerate(digests, 1)])

    store.relieve = relieve
    fill(store, 4)
    assert digests[2] not in store.layout.digests()


def test_a_release_may_say_what_goes_first(full) -> None:
    store, digests = full
    for seed, digest in enumerate(digests, 1):
        store.release(seed, store.layout.adapter(digest), used_at=0.0 if digest == digests[-1] else None)
    fill(store, 4)
    assert digests[-1] not in store.layout.digests()


def test_use_keeps_an_adapter(full) -> None:
    store, digests = full
    for seed, digest in enumerate(digests, 1):
        store.leases.release(digest, seed)
        os.utime(store.layout.folder("uses") / digest, (seed, seed))
    assert fill(store, 1) == digests[0]
    store.leases.release(digests[0], 1)
    fourth = fill(store, 4)
    assert set(store.layout.digests()) == {digests[0], digests[2], fourth}


def test_a_shared_lease_outlives_the_first(full) -> None:
    store, (digest, *_) = full
    request = object()
    assert store.leases.share(digest, request)
    store.leases.release(digest, 1)
    assert not store.remove(digest)
    store.leases.release(digest, request)
    assert not store.leases.share(digest, request), "there is none to share"
    assert store.remove(digest)


def test_damage_is_in_the_budget_and_goes_first(full) -> None:
    store, digests = full
    release(store, digests)
    (store.layout.adapter(digests[2]) / "adapter_model.safetensors").write_bytes(b"")
    assert not store.verify(digests[2])
    fourth = fill(store, 4)
    assert set(store.layout.digests()) == {digests[0], digests[1], fourth}, "before adapters used longer ago"
    assert damaged_in(store.layout) == set()
    fill(store, 5)
    assert digests[0] not in store.layout.digests()


def test_damage_that_an_engine_reads_stays(full) -> None:
    store, digests = full
    (store.layout.adapter(digests[2]) / "adapter_model.safetensors").write_bytes(b"")
    assert not store.verify(digests[2])
    with pytest.raises(NoFreeSlot):
        fill(store, 4)
    assert store.layout.digests() == sorted(digests)


def as_first_release_wrote(store: Store, digest: str) -> None:
    """Rewrite an entry as lora-plugins 0.1 did: the source's own configuration, and a manifest without another."""
    directory = store.layout.adapter(digest)
    os.rename(directory / ORIGINAL_CONFIG_FILE, directory / CONFIG_FILE)
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    del manifest["canonical"], manifest["converted"]
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest))


def test_entries_of_the_first_release_stay_in_the_budget(full) -> None:
    store, digests = full
    for seed, digest in enumerate(digests, 1):
        store.leases.release(digest, seed)
        as_first_release_wrote(store, digest)
    store = Store(store.layout.root, max_bytes=3 * SIZE)
    for seed, digest in enumerate(digests, 1):
        assert fill(store, seed) == digest
        assert Manifest.read(store.layout.adapter(digest)).canonical.name == CONFIG_FILE
        assert len(store.layout.digests()) <= 3


def test_an_entry_of_the_first_release_outlives_a_failed_fetch(full) -> None:
    store, digests = full
    as_first_release_wrote(store, digests[0])
    store.max_bytes = 4 * SIZE

    def is_away() -> None:
        raise SourceUnavailable("no answer", expected="an answer", remedy="ask again")

    wanted = DownloadSpec(adapter_files(seed=1), version="1", before=is_away)
    with pytest.raises(SourceUnavailable, match="no answer"):
        obtain(store, wanted)
    assert digests[0] in store.layout.digests()


def test_what_is_removed_leaves_no_index(full) -> None:
    store, digests = full
    index = store.layout.folder("index")
    assert len(list(index.iterdir())) == 3
    release(store, digests)
    for seed in range(4, 8):
        store.leases.release(fill(store, seed), seed)
    assert sorted(path.read_text() for path in index.iterdir()) == store.layout.digests()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the file system says of itself: 100 GiB, of which 50 are free."""
    disk = SimpleNamespace(f_frsize=1, f_blocks=100 * GIB, f_bavail=50 * GIB, f_files=0, f_favail=0)
    monkeypatch.setattr(eviction.os, "statvfs", lambda _: disk)
    return disk


def test_without_a_budget_a_share_of_the_disk_is_one(tmp_path, disk) -> None:
    assert Store(tmp_path / "set", max_bytes=7).max_bytes == 7
    store = Store(tmp_path / "store")
    assert store.max_bytes == 40 * GIB
    obtain(store, DownloadSpec(adapter_files()))
    disk.f_bavail -= SIZE
    assert Store(tmp_path / "store").max_bytes == 40 * GIB, "the same after a restart"


def test_room_is_kept_free_on_the_disk(tmp_path, disk) -> None:
    """Others fill it, too."""
    store = Store(tmp_path / "store")
    first = fill(store, 1)
    store.leases.release(first, 1)
    disk.f_bavail = GIB + SIZE // 2
    second = fill(store, 2)
    assert store.layout.digests() == [second]
    with pytest.raises(NoFreeSlot, match="engines still use"):
        fill(store, 3)
    store.leases.release(second, 2)
    disk.f_bavail = GIB - 2 * SIZE
    with pytest.raises(OutOfMemory, match="stay free"):
        fill(store, 3)
    assert store.layout.digests() == [second], "all of it would not be enough"


def test_a_small_disk_keeps_a_twentieth_free(tmp_path, disk) -> None:
    disk.f_blocks, disk.f_bavail = 100 * SIZE, 5 * SIZE + SIZE // 2
    with pytest.raises(OutOfMemory, match="stay free"):
        fill(Store(tmp_path / "store"), 1)


def test_manifests_are_read_once_to_make_room(full, monkeypatch) -> None:
    store, digests = full
    store.end_leases([(digest, seed, None) for seed, digest in enumerate(digests, 1)])
    inventory = Inventory(store.layout)
    assert inventory.look() == 3 * SIZE
    store.remove(digests[0])
    monkeypatch.setattr(Manifest, "read", lambda *_: pytest.fail("read again"))
    assert inventory.look() == 2 * SIZE


def test_what_is_not_leased_yet_is_not_shared(full, monkeypatch) -> None:
    """Between a holder's claim and the file that others see, the entry may go."""
    store, (digest, *_) = full
    store.leases.release(digest, 1)
    shared: list[bool] = []
    is_dir = Path.is_dir

    def share_meanwhile(path: Path) -> bool:
        if path.name == digest and not shared:
            shared.append(store.leases.share(digest, "request"))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", share_meanwhile)
    assert store.leases.acquire(digest, "name")
    assert shared == [False]
    assert store.leases.share(digest, "request")


@pytest.mark.parametrize("is_full_disk", [False, True])
def test_the_room_of_a_dead_process_is_free(tmp_path: Path, is_full_disk: bool) -> None:
    store = Store(tmp_path / "store", max_bytes=SIZE)
    store.layout.new_temporary("0-0.1.1", SIZE).mkdir()
    if is_full_disk:
        store._make_room(1, 0)
        assert leftovers(store) == []
    assert obtain(store, DownloadSpec(adapter_files())).fetched
