"""Published whole or not at all, fetched once, found again, never changed."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_plugins.errors import InvalidAdapter, SourceUnavailable
from lora_plugins.store.manifest import Manifest, digest_of
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store
from tests.make import content
from tests.other_processes import other_processes
from tests.store.common import DownloadSpec, adapter_files, check, leftovers, obtain, spoil


def test_fetched_adapter_is_published_under_its_digest(store: Store) -> None:
    wanted = DownloadSpec(adapter_files())
    stored = obtain(store, wanted)
    manifest = Manifest.read(stored.directory)
    assert stored.fetched
    assert stored.directory == store.layout.root / manifest.digest
    assert manifest.digest == digest_of(manifest.files)
    assert (manifest.uri, manifest.version) == (wanted.uri, wanted.version)
    assert content(stored.directory) == wanted.files
    assert leftovers(store) == []


def test_same_bytes_from_two_sources_are_stored_once(store: Store) -> None:
    first = obtain(store, DownloadSpec(adapter_files(), uri="test://a"))
    second = obtain(store, DownloadSpec(adapter_files(), uri="test://b"))
    assert first.directory == second.directory
    assert len(store.layout.digests()) == 1


def test_parts_of_an_earlier_release_are_removed_at_start(store: Store) -> None:
    parts = store.layout.root / ".parts" / f"{'a' * 64}.{'b' * 64}"
    parts.mkdir(parents=True)
    (parts / "adapter_model.safetensors").write_bytes(b"half")
    Store(store.layout.root)
    assert not parts.exists()
    assert parts.parent.is_dir(), "a server of that release that is still up lists the folder"


@pytest.mark.parametrize("promise", ["size", "sha256"])
def test_broken_promise_is_refused_and_leaves_nothing(store: Store, promise: str) -> None:
    wanted = DownloadSpec(adapter_files())
    good = dict(wanted.files)

    async def fetch(arriving: PartialDownload) -> None:
        data = good["adapter_model.safetensors"]
        spoilt = data[:-1] if promise == "size" else data[:-1] + bytes([data[-1] ^ 1])
        (arriving.directory / "adapter_config.json").write_bytes(good["adapter_config.json"])
        (arriving.directory / "adapter_model.safetensors").write_bytes(spoilt)

    with pytest.raises(SourceUnavailable, match="not what the source promised"):
        asyncio.run(store.obtain(wanted, fetch, check))
    assert store.layout.digests() == []
    assert leftovers(store) == []


def test_unservable_adapter_is_not_published(store: Store) -> None:
    files = adapter_files()
    files["adapter_config.json"] = b"{}"
    with pytest.raises(InvalidAdapter, match="no key 'r'"):
        obtain(store, DownloadSpec(files))
    assert store.layout.digests() == []
    assert leftovers(store) == []


def test_failed_fetch_leaves_nothing_and_can_be_repeated(store: Store) -> None:
    def fail() -> None:
        raise SourceUnavailable("an outage")

    wanted = DownloadSpec(adapter_files(), before=fail)
    with pytest.raises(SourceUnavailable):
        obtain(store, wanted)
    assert leftovers(store) == []
    wanted.before = lambda: None
    assert obtain(store, wanted).fetched


def test_an_event_loop_removes_no_lease_itself(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose disk hangs would have all requests wait."""
    stored = obtain(store, DownloadSpec(adapter_files()))
    removed_by: list[threading.Thread] = []
    unlink = Path.unlink

    def noted(path: Path, **options: bool) -> None:
        removed_by.append(threading.current_thread())
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", noted)

    async def run() -> None:
        executor = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(executor)
        store.release("nobody", stored.directory)
        with executor._shutdown_lock:  # a finalizer of what leases it runs in the midst of `submit`
            store.release("", stored.directory)
        assert not store.is_leased("", stored.directory), "at once for this process"
        assert store.acquire(stored.digest, "again")
        await asyncio.sleep(0)
        await asyncio.to_thread(bool)
        assert store.leases.holders(stored.digest), "who leases it meanwhile keeps it"
        store.release("again", stored.directory)

    asyncio.run(run())
    assert store.leases.holders(stored.digest) == []
    assert removed_by, "by a thread"
    assert threading.main_thread() not in removed_by


def test_a_release_beside_other_holders_takes_no_thread(store: Store) -> None:
    stored = obtain(store, DownloadSpec(adapter_files()))  # its holder stays, as the name of a served adapter does
    assert store.share(str(stored.directory), "request")

    async def release() -> asyncio.Future[None] | None:
        return store.release("request", stored.directory)

    assert asyncio.run(release()) is None, "there is no file to remove"
    assert not store.is_leased("request", stored.directory)
    assert store.leases.holders(stored.digest) == [store.processes.me()]


def test_many_coroutines_fetch_once(store: Store) -> None:
    wanted = DownloadSpec(adapter_files())

    async def all_at_once() -> set[Path]:
        stored = await asyncio.gather(*(store.obtain(wanted, wanted.fetch, check) for _ in range(50)))
        return {item.directory for item in stored}

    assert len(asyncio.run(all_at_once())) == 1
    assert wanted.fetches == 1


def fetch_noted(root: Path, log: Path) -> None:
    def note() -> None:
        with log.open("a") as file:
            file.write("fetch\n")
        time.sleep(0.5)

    obtain(Store(root), DownloadSpec(adapter_files(), before=note))


def test_processes_fetch_once(store: Store, tmp_path: Path) -> None:
    with other_processes(4) as processes:
        list(processes.map(fetch_noted, [store.layout.root] * 4, [tmp_path / "log"] * 4))
    assert (tmp_path / "log").read_text() == "fetch\n"


@pytest.mark.parametrize("is_leased", [True, False])
def test_damage_is_found_marked_and_fetched_again(store: Store, is_leased: bool) -> None:
    wanted = DownloadSpec(adapter_files())
    stored = obtain(store, wanted)
    if not is_leased:
        store.leases.release(stored.digest)
    spoil(stored.directory)
    assert not store.verify(stored.digest)
    assert not store.has(stored.directory)
    assert store.acquire(stored.digest) is None
    assert stored.directory.exists(), "until its replacement is there"
    again = obtain(store, wanted)
    assert again.fetched
    assert store.verify(again.digest)
    assert leftovers(store) == []


def test_damage_is_marked_where_it_cannot_be_counted(store: Store) -> None:
    """As on a full disk, which may still have an inode for the mark."""
    stored = obtain(store, DownloadSpec(adapter_files()))
    spoil(stored.directory)
    (store.layout.folder("replaced") / stored.digest).mkdir()
    with pytest.raises(IsADirectoryError):
        store.verify(stored.digest)
    assert store.is_marked(stored.digest)


def test_file_missing_from_an_entry_is_fetched_again(store: Store) -> None:
    wanted = DownloadSpec(adapter_files())
    stored = obtain(store, wanted)
    (stored.directory / "adapter_model.safetensors").unlink()
    assert obtain(store, wanted).fetched
    assert store.verify(stored.digest)
