"""What lies below the root, also where it is not ours, is damaged, or cannot be written."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from lora_plugins.adapter.names import is_prefix
from lora_plugins.errors import NoFreeSlot
from lora_plugins.store.durable_files import write_small
from lora_plugins.store.eviction import Evictor, pending_bytes
from lora_plugins.store.inventory import entries
from lora_plugins.store.layout import Layout, Published, is_digest, key_of
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, cancel, check, leftovers, obtain

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


def test_keys_of_different_texts_differ() -> None:
    texts = [("a", "b"), ("ab", ""), ("", "ab"), ("a b",), ("a", "b", ""), ("b", "a")]
    assert len({key_of(*parts) for parts in texts}) == len(texts)
    assert all(is_digest(key_of(*parts)) for parts in texts)


def test_a_small_file_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old and long")
    write_small(tmp_path / "file", ["new"], tmp_path / "temporary")
    assert (tmp_path / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


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
    for folder in ("locks", "processes", "uses", "index", "leases", "damaged"):
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


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *[("index", text) for text in (b"", b"\0" * 64, b"\xff" * 64, b"../../etc", b"a" * 64, b"{}")],
        *[("manifest", text) for text in (b"", b"{", b"\xff\xff", b'{"files": 5}', None)],
    ],
)
def test_a_damaged_file_of_the_store_is_fetched_again(store: Store, file: str, text: bytes | None) -> None:
    wanted = DownloadSpec(adapter_files())
    stored = obtain(store, wanted)
    (path,) = store.layout.folder("index").iterdir() if file == "index" else [stored.directory / "manifest.json"]
    path.chmod(0o600)
    path.unlink() if text is None else path.write_bytes(text)
    assert store.verify(stored.digest) is (file == "index")
    again = obtain(store, wanted)
    assert (again.fetched, again.directory) == (True, stored.directory)
    assert store.verify(stored.digest)
    assert not obtain(store, wanted).fetched
    assert store.layout.digests() == [stored.digest]


# --- a store that fails while it runs


def test_a_cancelled_fetch_leaves_nothing(store: Store) -> None:
    wanted = DownloadSpec(adapter_files())

    async def run() -> None:
        begun = asyncio.Event()

        async def fetch(arriving: PartialDownload) -> None:
            (arriving.directory / "adapter_config.json").write_bytes(b"half")
            arriving.landed("adapter_config.json", 4)
            begun.set()
            await asyncio.sleep(60)

        await cancel(store.obtain(wanted, fetch, check), begun.wait())

    asyncio.run(run())
    assert leftovers(store) == []
    assert [name for name in os.listdir(store.layout.folder("locks")) if "fetch" in name] == []
    assert obtain(store, wanted).fetched


def test_a_fetch_cancelled_while_it_makes_room_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    real = Evictor.make_room

    def slow(*arguments: object, **named: object) -> list[str]:
        begun.set()
        assert go.wait(60)
        return real(*arguments, **named)

    monkeypatch.setattr(Evictor, "make_room", slow)
    wanted = DownloadSpec(adapter_files())

    async def run() -> None:
        began = asyncio.to_thread(begun.wait)
        await cancel(store.obtain(wanted, wanted.fetch, check), began, then=go.set)  # room is still being made

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
        peaks.append(sum(entry.size_bytes for entry in entries(store.layout)) + pending_bytes(store.layout)[0])

    async def run() -> list[object]:
        obtaining = (store.obtain(one, lambda arriving, one=one: fetch(one, arriving), check) for one in wanted)
        return await asyncio.gather(*obtaining, return_exceptions=True)

    results = asyncio.run(run())
    served = [result for result in results if not isinstance(result, BaseException)]
    assert {type(result) for result in results if isinstance(result, BaseException)} == {NoFreeSlot}
    assert 1 <= len(served) <= 3
    assert max(peaks) <= 3 * size
    assert len(store.layout.digests()) == len(served)


OTHERS = ["0" * 64, f"01234567{'f' * 56}", "f" * 64]
LONG_AGO_S = 1_000_000_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Layout(tmp_path).create()
    for digest in (DIGEST, *OTHERS):
        (tmp_path / digest).mkdir()
    return tmp_path


def settle(root: Path, at_s: float = LONG_AGO_S) -> None:
    os.utime(root, (at_s, at_s))


@pytest.mark.parametrize("text", ["", DIGEST[:7], DIGEST + "0", "ABCDEF01", "0123456g", "../../etc"])
def test_what_cannot_begin_a_digest_matches_none(root: Path, text: str) -> None:
    assert Published(Layout(root)).matching(text) == []
    assert not is_prefix(text)


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_beginning_matches_all_digests_that_have_it(root: Path, is_settled: bool) -> None:
    published = Published(Layout(root))
    if is_settled:
        settle(root)
    for _ in range(2):
        assert published.matching(DIGEST[:8]) == [DIGEST, OTHERS[1]]
        assert published.matching(DIGEST[:9]) == published.matching(DIGEST) == [DIGEST]
        assert published.matching("f" * 8) == ["f" * 64]
        assert published.matching("0" * 63) == ["0" * 64]
        assert published.matching("deadbeef") == published.matching("d" * 64) == []


@pytest.mark.parametrize("looked_at", ["long after", "at the moment of"])
def test_what_comes_and_goes_is_seen_at_once(root: Path, looked_at: str) -> None:
    """A change at the moment of a look may leave the time of change as it was."""
    published, now_s = Published(Layout(root)), time.time()
    settle(root, LONG_AGO_S if looked_at == "long after" else now_s)
    new = f"01234567{'0' * 56}"
    assert published.matching(new[:12]) == []
    (root / new).mkdir()
    if looked_at == "at the moment of":
        settle(root, now_s)
    assert published.matching(new[:12]) == published.matching(new) == [new]
    shutil.rmtree(root / new)
    assert published.matching(new[:12]) == published.matching(new) == []


def test_a_store_that_has_not_changed_is_listed_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[object] = []
    monkeypatch.setattr(os, "listdir", lambda path, real=os.listdir: listed.append(path) or real(path))
    published = Published(Layout(root))
    settle(root)
    for number in range(20):
        assert published.matching(f"deadbee{number % 10}") == []
    assert len(listed) == 1
