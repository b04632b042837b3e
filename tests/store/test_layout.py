"""What lies below the root, also where it is not ours, is damaged, or cannot be written."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_plugins.errors import InvalidSettings, NoFreeSlot, OutOfMemory, SourceUnavailable
from lora_plugins.settings import Settings
from lora_plugins.store import store as store_module
from lora_plugins.store.eviction import entries, pending_bytes
from lora_plugins.store.layout import Layout, is_digest, is_prefix, key_of, write_small
from lora_plugins.store.opening import open_store
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, check, leftovers, obtain

DIGEST = "0123456789abcdef" * 4


# --- names


@pytest.mark.parametrize(
    ("path", "digest"),
    [
        (f"/store/{DIGEST}", DIGEST),
        (f"/store/{DIGEST}/", None),
        (f"/elsewhere/{DIGEST}", None),
        (f"/store/.quarantine/{DIGEST}", None),
        ("/store/sql", None),
        (DIGEST, None),
    ],
)
def test_a_path_says_which_adapter_lies_there(path: str, digest: str | None) -> None:
    assert Layout(Path("/store")).digest_of(path) == digest


@pytest.mark.parametrize("name", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, f"{'a' * 63}.", ".tmp", "٣" * 64])
def test_what_is_no_digest(name: str) -> None:
    assert is_digest(DIGEST)
    assert not is_digest(name)


@pytest.mark.parametrize("text", ["", DIGEST[:7], DIGEST + "0", "ABCDEF01", "0123456g", "../../etc"])
def test_what_cannot_begin_a_digest_matches_none(store: Store, text: str) -> None:
    stored = obtain(store, DownloadSpec(adapter_files()))
    assert store.layout.matching(stored.digest[:8]) == store.layout.matching(stored.digest) == [stored.digest]
    assert store.layout.matching(text) == []
    assert not is_prefix(text)


def test_keys_of_different_texts_differ() -> None:
    texts = [("a", "b"), ("ab", ""), ("", "ab"), ("a b",), ("a", "b", ""), ("b", "a")]
    assert len({key_of(*parts) for parts in texts}) == len(texts)
    assert all(is_digest(key_of(*parts)) for parts in texts)


def test_a_small_file_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old and long")
    write_small(tmp_path / "file", "new", tmp_path / "temporary")
    assert (tmp_path / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


# --- opening


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


def test_many_processes_may_open_while_others_fetch(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, obtain
for seed in range(8):
    obtain(Store(Path(sys.argv[1])), DownloadSpec(adapter_files(seed=seed), version=str(seed)))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    errors = [process.communicate(timeout=240)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, errors
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
    store = open_store(Settings(store_dir=Path("~/store"), store_max_bytes=100))
    assert store.layout.root == tmp_path / "store"
    with pytest.raises(OutOfMemory, match="LORA_PLUGINS_STORE_MAX_BYTES"):
        obtain(store, DownloadSpec(adapter_files()))


# --- what is not ours, or damaged


def test_what_is_not_ours_is_ignored_and_left(store: Store) -> None:
    wanted = DownloadSpec(adapter_files())
    stored = obtain(store, wanted)
    root = store.layout.root
    (root / "README").write_text("hello")
    (root / "backup").mkdir()
    (root / "backup" / "file").write_text("x")
    (root / ".hidden").mkdir()
    (root / ("A" * 64)).mkdir()
    (root / ("e" * 64)).write_text("a file by a digest's name")
    for folder in ("locks", "processes", "uses", "index", "leases", "damaged", "quarantine"):
        (store.layout.folder(folder) / "somebody's").mkdir()
        (store.layout.folder(folder) / "somebody's" / "file").write_text("x")
    again = Store(root)
    assert not obtain(again, wanted).fetched
    assert again.verify(stored.digest)
    assert stored.digest in [entry.digest for entry in entries(again.layout)]
    assert (root / "README").read_text() == "hello"
    for path in (root / "backup", *(store.layout.folder(name) / "somebody's" for name in ("locks", "processes"))):
        assert (path / "file").read_text() == "x" if path.name == "backup" else path.is_dir()
    assert (root / ("e" * 64)).is_file()


def test_budget_counts_past_what_is_not_ours(tmp_path: Path) -> None:
    size = sum(map(len, adapter_files().values()))
    store = Store(tmp_path / "store", max_bytes=2 * size)
    (store.layout.root / ("e" * 64)).write_text("a file by a digest's name")
    (store.layout.folder("tmp") / "a file").write_text("x")
    for seed in range(4):
        stored = obtain(store, DownloadSpec(adapter_files(seed=seed), version=str(seed)))
        store.leases.release(stored.digest)
    assert len([entry for entry in entries(store.layout) if entry.size_bytes]) == 2
    assert (store.layout.root / ("e" * 64)).is_file()


def test_an_entry_removed_meanwhile_is_not_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = obtain(store, DownloadSpec(adapter_files()))
    gone = "f" * 64
    monkeypatch.setattr(Layout, "digests", lambda self: [gone, stored.digest])
    assert [entry.digest for entry in entries(store.layout)] == [stored.digest]


@pytest.mark.parametrize("text", [b"", b"\0" * 64, b"\xff" * 64, b"../../etc", b"a" * 64, b"{}"])
def test_a_damaged_index_is_fetched_again(store: Store, text: bytes) -> None:
    wanted = DownloadSpec(adapter_files())
    stored = obtain(store, wanted)
    (index,) = store.layout.folder("index").iterdir()
    index.write_bytes(text)
    again = obtain(store, wanted)
    assert (again.fetched, again.directory) == (True, stored.directory)
    assert not obtain(store, wanted).fetched
    assert store.layout.digests() == [stored.digest]


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xff", b'{"files": 5}', None])
def test_a_damaged_manifest_is_fetched_again(store: Store, text: bytes | None) -> None:
    wanted = DownloadSpec(adapter_files())
    stored = obtain(store, wanted)
    manifest = stored.directory / "manifest.json"
    manifest.chmod(0o600)
    manifest.unlink() if text is None else manifest.write_bytes(text)
    assert not store.verify(stored.digest)
    assert obtain(store, wanted).fetched
    assert store.verify(stored.digest)


def test_opening_sweeps_what_dead_processes_left(store: Store) -> None:
    dead, alive = f"{store.processes.me().partition('.')[0]}.999999999.5", store.processes.me()
    tmp, locks = store.layout.folder("tmp"), store.layout.folder("locks")
    for owner in (dead, alive):
        (tmp / f"{owner}.aabb.1000").mkdir()
        (tmp / f"{owner}.aabb.1000" / "adapter_model.safetensors").write_bytes(b"half")
        (tmp / f"{owner}.ccdd.0").write_text("half an index")
        (locks / f"{owner}.fetch").write_text(owner)
        (store.layout.folder("processes") / owner).touch()
    (store.layout.folder("quarantine") / f"{DIGEST}.aabb.removed").mkdir()
    (store.layout.folder("quarantine") / f"{DIGEST}.aabb").mkdir()  # damaged: somebody may want to look at it
    Store(store.layout.root)
    assert set(os.listdir(tmp)) == {f"{alive}.aabb.1000", f"{alive}.ccdd.0"}
    assert f"{alive}.fetch" in os.listdir(locks)
    assert f"{dead}.fetch" not in os.listdir(locks)
    assert os.listdir(store.layout.folder("processes")) == [alive]
    assert os.listdir(store.layout.folder("quarantine")) == [f"{DIGEST}.aabb"]
    assert pending_bytes(store.layout) == 1000


# --- a store that fails while it runs


@pytest.mark.deployment("store on an unmounted file system", "tested", "a fetch into it: L006")
@pytest.mark.parametrize("folder", ["index", "leases", "tmp", "locks"])
def test_a_store_whose_folder_is_lost_is_unavailable(store: Store, folder: str) -> None:
    shutil.rmtree(store.layout.folder(folder))
    store.layout.folder(folder).write_bytes(b"in the way")
    with pytest.raises(SourceUnavailable, match="LORA_PLUGINS_STORE_DIR"):
        obtain(store, DownloadSpec(adapter_files()))


@pytest.mark.deployment("store on a read-only file system", "tested", "a fetch into it: L006")
def test_a_store_that_becomes_read_only_is_unavailable(store: Store, permissions_count: None) -> None:
    store.layout.folder("tmp").chmod(0o500)
    with pytest.raises(SourceUnavailable, match="Permission denied"):
        obtain(store, DownloadSpec(adapter_files()))
    store.layout.folder("tmp").chmod(0o700)
    assert obtain(store, DownloadSpec(adapter_files())).fetched


def test_a_cancelled_fetch_leaves_nothing(store: Store) -> None:
    wanted = DownloadSpec(adapter_files())

    async def run() -> None:
        begun = asyncio.Event()

        async def fetch(arriving: PartialDownload) -> None:
            (arriving.directory / "adapter_config.json").write_bytes(b"half")
            arriving.landed("adapter_config.json", 4)
            begun.set()
            await asyncio.sleep(60)

        fetching = asyncio.create_task(store.obtain(wanted, fetch, check))
        await begun.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching

    asyncio.run(run())
    assert leftovers(store) == []
    assert [name for name in os.listdir(store.layout.folder("locks")) if "fetch" in name] == []
    assert obtain(store, wanted).fetched


def test_a_fetch_cancelled_while_it_makes_room_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    real = store_module.make_room

    def slow(*arguments: object, **named: object) -> list[str]:
        begun.set()
        assert go.wait(60)
        return real(*arguments, **named)

    monkeypatch.setattr(store_module, "make_room", slow)
    wanted = DownloadSpec(adapter_files())

    async def run() -> None:
        fetching = asyncio.create_task(store.obtain(wanted, wanted.fetch, check))
        await asyncio.to_thread(begun.wait)
        fetching.cancel()
        await asyncio.sleep(0)  # it has been told, and room is still being made
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching

    asyncio.run(run())
    assert wanted.fetches == 0
    assert leftovers(store) == []


def test_the_budget_holds_for_fetches_at_once(tmp_path: Path) -> None:
    size = sum(map(len, adapter_files().values()))
    store = Store(tmp_path / "store", max_bytes=3 * size)
    wanted = [DownloadSpec(adapter_files(seed=seed), version=str(seed)) for seed in range(12)]
    peaks: list[int] = []

    async def fetch(one: DownloadSpec, arriving: PartialDownload) -> None:
        await asyncio.sleep(0.02)
        await one.fetch(arriving)
        # In this order nothing that is published meanwhile is counted twice.
        peaks.append(sum(entry.size_bytes for entry in entries(store.layout)) + pending_bytes(store.layout))

    async def run() -> list[object]:
        obtaining = (store.obtain(one, lambda arriving, one=one: fetch(one, arriving), check) for one in wanted)
        return await asyncio.gather(*obtaining, return_exceptions=True)

    results = asyncio.run(run())
    served = [result for result in results if not isinstance(result, BaseException)]
    assert {type(result) for result in results if isinstance(result, BaseException)} == {NoFreeSlot}
    assert 1 <= len(served) <= 3
    assert max(peaks) <= 3 * size
    assert len(store.layout.digests()) == len(served)


# --- a full disk


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.deployment(
    "full disk", "tested", "at every page of a fetch, by quota (RLIMIT_FSIZE) too: L004, nothing half is left"
)
def test_a_full_disk_is_out_of_memory_and_passes(tiny_disk: Path) -> None:
    store = Store(tiny_disk / "store")
    kept = obtain(store, DownloadSpec(adapter_files(), version="kept"))
    large = DownloadSpec(adapter_files(rank=16, hidden=16_384), version="large")
    with pytest.raises(OutOfMemory, match="No space left on device"):
        obtain(store, large)
    assert leftovers(store) == []
    assert store.layout.digests() == [kept.digest]
    assert store.verify(kept.digest)
    assert obtain(store, DownloadSpec(adapter_files(seed=1), version="small")).fetched
    subprocess.run(["mount", "-o", "remount,size=8m", str(tiny_disk)], check=True)
    assert obtain(store, large).fetched


@pytest.mark.deployment(
    "full disk", "tested", "at every page of a fetch, by quota (RLIMIT_FSIZE) too: L004, nothing half is left"
)
@pytest.mark.parametrize("free", [0, 1, 2, 3, 5, 8, 13])
def test_a_disk_that_fills_leaves_no_half_adapter(tiny_disk: Path, free: int) -> None:
    # At first with no page left, then with a few: something of the store's own work fails, whatever it is.
    store = Store(tiny_disk / "store")
    wanted = DownloadSpec(adapter_files())
    filler = tiny_disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, max(0, filler.stat().st_size - free * 4096))
    try:
        stored = obtain(store, wanted)
    except OutOfMemory:
        assert store.layout.digests() == []
        assert leftovers(store) == []
    else:
        assert store.verify(stored.digest)
    filler.unlink()
    stored = obtain(store, wanted)
    assert store.verify(stored.digest)
    assert leftovers(store) == []


@pytest.mark.deployment(
    "full disk", "tested", "at every page of a fetch, by quota (RLIMIT_FSIZE) too: L004, nothing half is left"
)
def test_a_file_larger_than_allowed_is_out_of_memory(tmp_path: Path) -> None:
    # Where nothing can be mounted: the limit on a file's size fails a write in the same way.
    code = """
import resource, signal, sys
from pathlib import Path
from lora_plugins.errors import OutOfMemory
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, obtain
store = Store(Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    obtain(store, DownloadSpec(adapter_files(rank=16, hidden=4096)))
except OutOfMemory as error:
    assert list(store.layout.folder("tmp").iterdir()) == []
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store")], capture_output=True, text=True, check=False, timeout=240
    )
    assert "[L004]" in done.stdout, done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 50_000


@pytest.mark.deployment(
    "full disk", "tested", "at every page of a fetch, by quota (RLIMIT_FSIZE) too: L004, nothing half is left"
)
def test_a_filesystem_source_may_fill_the_disk(tiny_disk: Path, tmp_path: Path) -> None:
    from lora_plugins.resolvers.sources.filesystem import FilesystemSource
    from tests.make import put
    from tests.resolvers.sources.contract import located
    from tests.resolvers.sources.contract import obtain as obtain_from

    put(tmp_path / "adapters" / "sql", adapter_files(rank=16, hidden=16_384))
    source = FilesystemSource(tmp_path / "adapters")
    store = Store(tiny_disk / "store")
    with pytest.raises(OutOfMemory, match="LORA_PLUGINS_STORE_DIR"):
        obtain_from(store, source, located(source, "sql"))
    assert leftovers(store) == []
