"""What the store knows without reading all of it: as right as reading all, whoever publishes, uses and removes."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.store import inventory as inventory_module
from lora_plugins.store import sweep as sweep_module
from lora_plugins.store.inventory import Inventory, entries
from lora_plugins.store.layout import SIZES_FILE, Layout
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, obtain

SIZE = sum(map(len, adapter_files().values()))


def nobody(digest: str) -> bool:
    return False


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Four that nobody leases, used one after the other."""
    store = Store(tmp_path / "store", max_bytes=4 * SIZE)
    for seed in range(4):
        fill(store, seed)
    return store


def fill(store: Store, seed: int) -> str:
    digest = obtain(store, DownloadSpec(adapter_files(seed=seed), version=f"{seed}")).digest
    store.leases.release(digest)
    use(store, digest, 1000.0 + seed)
    return digest


def use(store: Store, digest: str, at: float) -> None:
    os.utime(store.layout.folder("uses") / digest, (at, at))


def by_use(store: Store) -> list[str]:
    return [entry.digest for entry in entries(store.layout)]


def test_it_follows_what_other_processes_do(store: Store) -> None:
    here = Inventory(store.layout)
    assert here.look() == 4 * SIZE
    assert list(here.oldest(nobody)) == by_use(store)
    other = Store(store.layout.root)
    first, second, *_ = by_use(store)
    use(other, first, 2000.0)
    assert other.remove(second)
    fill(other, 9)
    assert here.look() == 4 * SIZE
    assert list(here.oldest(nobody)) == by_use(store)
    assert list(here.oldest(nobody)) == by_use(store), "again"


def test_those_that_are_kept_are_left_out(store: Store) -> None:
    here = Inventory(store.layout)
    here.look()
    kept, *others = by_use(store)
    assert list(here.oldest(lambda digest: digest == kept)) == others


def test_a_time_set_back_here_counts(store: Store) -> None:
    fill(store, 4)  # for which the store has looked
    last = by_use(store)[-1]
    store.end_leases([(last, "", 5.0)])
    fill(store, 5)
    assert last not in by_use(store)


def test_a_time_set_back_elsewhere_counts_later(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Inventory(store.layout)
    here.look()
    list(here.oldest(nobody))
    use(store, by_use(store)[-1], 5.0)
    monkeypatch.setattr(inventory_module, "_ORDER_KEPT_S", 0.0)
    assert list(here.oldest(nobody)) == by_use(store)


def test_the_next_process_reads_no_manifest_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory_module, "_UNWRITTEN", 2)
    Inventory(store.layout).look()
    known = json.loads((store.layout.root / SIZES_FILE).read_text())
    assert known == dict.fromkeys(by_use(store), SIZE)
    monkeypatch.setattr(inventory_module, "entry_of", lambda *_: pytest.fail("read again"))
    assert Inventory(store.layout).look() == 4 * SIZE
    assert Store(store.layout.root).max_bytes


def test_a_look_compares_each_name_once(store: Store) -> None:
    """A fetch into a store of 50,000 waits for it."""

    class Known(dict[str, int]):
        looked_up = 0

        def __contains__(self, digest: object) -> bool:
            self.looked_up += 1
            return super().__contains__(digest)

        def keys(self) -> Any:
            pytest.fail("gone through as a whole")

        __iter__ = keys

    here = Inventory(store.layout)
    here.look()
    here._sizes_bytes = known = Known(here._sizes_bytes or {})
    assert here.look() == 4 * SIZE
    assert known.looked_up == len(os.listdir(store.layout.root))


def test_what_comes_as_another_goes_is_seen(store: Store) -> None:
    here, other = Inventory(store.layout), Store(store.layout.root)
    here.look()
    gone = by_use(store)[0]
    assert other.remove(gone)
    come = fill(other, 9)
    here.look()
    assert (here.size_bytes(gone), here.size_bytes(come)) == (0, SIZE)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"x": 1}', "\x00\xff", '{"%s": -1}', '{"%s": true}'])
def test_a_broken_file_of_sizes_is_not_believed(store: Store, text: str) -> None:
    (store.layout.root / SIZES_FILE).write_text(text.replace("%s", by_use(store)[0]))
    assert Inventory(store.layout).look() == 4 * SIZE


def test_an_unreadable_manifest_counts_by_its_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory_module, "_UNWRITTEN", 0)
    first = by_use(store)[0]
    manifest = store.layout.adapter(first) / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text("{")
    here = Inventory(store.layout)
    assert here.look() == here.look() == sum(entry.size_bytes for entry in entries(store.layout))
    assert list(here.oldest(nobody)) == by_use(store)
    assert first not in json.loads((store.layout.root / SIZES_FILE).read_text())


def test_a_fetch_reads_nothing_of_what_it_knows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither manifests nor last uses, but for what goes; what other processes lease stays."""
    first, second, third, _ = by_use(store)
    newest = fill(store, 4)
    assert first not in by_use(store)
    (store.layout.folder("leases") / second / f"{store.processes.me()}").touch()
    looked_at: list[str] = []
    last_use = inventory_module.last_use

    def note(layout: Layout, digest: str) -> float:
        looked_at.append(digest)
        return last_use(layout, digest)

    monkeypatch.setattr(inventory_module, "last_use", note)
    fill(store, 5)
    assert set(looked_at) == {second, third, newest}, (
        "of those that were there before, what goes and what stands before"
    )
    assert third not in by_use(store)
    assert second in by_use(store)


def test_a_large_store_is_swept_in_a_thread(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "_SWEPT_AT_ONCE", 0)
    dead = store.layout.folder("leases") / by_use(store)[0] / f"{store.processes.me().partition('.')[0]}.999999999.5"
    dead.touch()
    Store(store.layout.root)
    for thread in threading.enumerate():
        if thread.name == "lora-plugins-open":
            thread.join(60)
    assert not dead.exists()
