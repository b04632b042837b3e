"""Leases: for as long as a process lives, across removal, and without a trace afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_plugins.errors import SourceUnavailable
from lora_plugins.store.store import Store
from tests.other_processes import other_processes
from tests.store.common import DownloadSpec, adapter_files, is_soon, obtain

LONGEST_S = 60.0


@pytest.fixture
def digest(store: Store) -> str:
    """A published adapter that nobody leases."""
    digest = obtain(store, DownloadSpec(adapter_files())).digest
    store.leases.release(digest)
    return digest


def test_a_missing_adapter_cannot_be_leased(store):
    assert not store.leases.acquire("0" * 64)
    assert store.leases.holders("0" * 64) == []
    assert os.listdir(store.layout.folder("leases")) == []


def test_a_lease_names_its_process_and_can_be_released(store, digest):
    assert store.leases.holders(digest) == []
    for _ in range(2):  # one lease, however often it is taken
        assert store.leases.acquire(digest)
    assert store.leases.holders(digest) == [store.processes.me()]
    assert not store.remove(digest)
    for _ in range(2):
        store.leases.release(digest)
    assert store.leases.holders(digest) == []
    assert store.remove(digest)
    assert not store.leases.acquire(digest)


def test_a_lease_is_of_one_adapter(store, digest):
    other = obtain(store, DownloadSpec(adapter_files(seed=1), version="v2")).digest
    assert store.remove(digest)
    assert not store.remove(other)


def test_another_store_object_of_the_process_shares_its_lease(store, digest):
    store.leases.acquire(digest)
    assert not Store(store.layout.root).remove(digest)


@pytest.mark.parametrize(("silent_s", "held"), [(0, True), (120, False)])
def test_a_lease_of_another_host_ends_with_its_heartbeat(store, digest, silent_s, held):
    name = "otherhost.1.1"
    beat = store.layout.folder("processes") / name
    beat.touch()
    os.utime(beat, (time.time() - silent_s,) * 2)
    (store.layout.folder("leases") / digest).mkdir(exist_ok=True)
    lease = store.layout.folder("leases") / digest / name
    lease.touch()
    assert store.remove(digest) is not held
    assert lease.exists() is held


def test_opening_forgets_the_leases_of_the_dead(store, digest):
    leases = store.layout.folder("leases") / digest
    store.leases.acquire(digest)
    (leases / f"{store.processes.me().partition('.')[0]}.999999999.5").touch()
    Store(store.layout.root)
    assert os.listdir(leases) == [store.processes.me()]


def acquire(root: Path, digest: str) -> int:
    kept.append(Store(root))
    assert kept[-1].leases.acquire(digest)
    return os.getpid()


kept: list[Store] = []  # of another process, while it lives


def test_another_process_holds_its_lease_until_it_dies(store, digest):
    with other_processes() as process:
        pid = process.submit(acquire, store.layout.root, digest).result(60)
        store.leases.acquire(digest)
        assert len(store.leases.holders(digest)) == 2
        store.leases.release(digest)
        assert not store.remove(digest)
        os.kill(pid, signal.SIGKILL)
        assert is_soon(lambda: not store.leases.holders(digest))
    assert store.remove(digest)


def test_only_one_of_leasing_and_removing_wins(store, tmp_path):
    def race(digest: str) -> tuple[bool, bool]:
        removed: list[bool] = []
        thread = threading.Thread(target=lambda: removed.append(Store.remove(store, digest)))
        thread.start()
        taken = store.leases.acquire(digest)
        thread.join()
        return taken, removed[0]

    for seed in range(30):
        digest = obtain(store, DownloadSpec(adapter_files(seed=seed), version=str(seed))).digest
        store.leases.release(digest)
        taken, removed = race(digest)
        assert taken is not removed
        assert store.layout.adapter(digest).exists() is taken


def test_guards_are_a_bounded_number_of_files(store):
    for number in range(600):
        with store.leases.guard(f"{number:064x}"[::-1]):
            pass
    assert len(os.listdir(store.layout.folder("locks"))) <= 257


@pytest.fixture
def read_only(store: Store, digest: str, permissions_count: None) -> Iterator[None]:
    """The store can be read, and nothing in it changed."""
    locks, folders = store.layout.folder("locks"), [store.layout.folder(name) for name in ("locks", "leases", "uses")]
    store.leases.acquire(digest, "served")
    folders += [store.layout.folder("leases") / digest, store.layout.root]
    for path in (*locks.iterdir(), *folders):
        path.chmod(0o500)
    yield
    for path in (*folders, *locks.iterdir()):
        path.chmod(0o700)


def test_a_store_that_cannot_be_written_is_unavailable(store, digest, read_only) -> None:
    for ask in (
        lambda: store.acquire(digest, "other"),
        lambda: store.find_leased("test://adapter", "v1", adapter_files(), "other"),
    ):
        with pytest.raises(SourceUnavailable, match="Permission denied"):
            ask()
    assert not store.leases.is_held(digest, "other")
    assert store.leases.is_held(digest, "served"), "what was leased before stays leased"
    with pytest.raises(SourceUnavailable):
        store.acquire(digest, "served")
    assert store.leases.is_held(digest, "served")


@pytest.mark.parametrize("how", ["read-only", "away"])
def test_a_lease_that_ends_meanwhile_is_removed_later(store, digest, permissions_count, how) -> None:
    other = obtain(store, DownloadSpec(adapter_files(seed=1), version="v2")).digest
    store.leases.acquire(digest, "served")
    folder, away = store.layout.folder("leases") / digest, store.layout.root.with_name("away")
    if how == "away":
        store.layout.root.rename(away)
    else:
        folder.chmod(0o500)
    store.leases.release(digest, "served")
    assert not store.leases.is_held(digest, "served")
    if how == "away":
        away.rename(store.layout.root)
    else:
        folder.chmod(0o700)
    assert store.leases.holders(digest) == [store.processes.me()], "others cannot know it yet"
    store.leases.release(other)
    assert store.leases.holders(digest) == []


@pytest.fixture
def in_the_midst_of_a_removal(
    store, digest, monkeypatch
) -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Ends the lease of `digest` in a thread that does something in the midst of the removal."""
    unlink, threads = Path.unlink, []

    def begin(work: Callable[[], object]) -> threading.Thread:
        def unlink_and_work(path: Path, **options: bool) -> None:
            monkeypatch.setattr(Path, "unlink", unlink)
            work()
            unlink(path, **options)

        monkeypatch.setattr(Path, "unlink", unlink_and_work)
        threads.append(threading.Thread(target=store.leases.release, args=(digest, "served"), daemon=True))
        threads[0].start()
        return threads[0]

    store.leases.acquire(digest, "served")
    yield begin
    threads[0].join(LONGEST_S)


def test_a_hung_disk_holds_up_no_lease_in_memory(store, digest, in_the_midst_of_a_removal) -> None:
    """Which an event loop takes for each request."""
    other = obtain(store, DownloadSpec(adapter_files(seed=1), version="v2")).digest
    store.leases.acquire(other, "served")
    hangs, goes_on = threading.Event(), threading.Event()
    in_the_midst_of_a_removal(lambda: (hangs.set(), goes_on.wait(LONGEST_S)))
    assert hangs.wait(LONGEST_S)
    asked = threading.Thread(target=store.leases.share, args=(other, "another"), daemon=True)
    asked.start()
    asked.join(2)
    is_answered = not asked.is_alive()
    goes_on.set()
    assert is_answered
    assert store.leases.is_held(other, "another")


def test_who_leases_during_a_removal_has_the_file(store, digest, in_the_midst_of_a_removal) -> None:
    acquiring = threading.Thread(target=store.leases.acquire, args=(digest, "again"))

    def acquire() -> None:
        acquiring.start()
        acquiring.join(0.2)  # waits for the removal

    in_the_midst_of_a_removal(acquire).join(LONGEST_S)
    acquiring.join(LONGEST_S)
    assert store.leases.is_held(digest, "again")
    assert store.leases.holders(digest) == [store.processes.me()]


def test_a_finalizer_may_end_a_lease_during_a_removal(store, digest, in_the_midst_of_a_removal) -> None:
    """Garbage collection runs a finalizer in whatever thread allocates."""
    other = obtain(store, DownloadSpec(adapter_files(seed=1), version="v2")).digest
    in_the_midst_of_a_removal(lambda: store.leases.release(other)).join(LONGEST_S)
    assert store.leases.holders(other) == store.leases.holders(digest) == []
