"""One fetch at a time for one version: a living owner's lock is waited for, a dead one's is taken over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lora_plugins.errors import SourceUnavailable
from lora_plugins.store import locks
from lora_plugins.store.locks import fetch_lock
from lora_plugins.store.processes import Processes, _host

LONG_S = 600.0  # for what is there in a moment, or never
HOLDER = """
import asyncio, sys
from pathlib import Path
from lora_plugins.store.locks import fetch_lock
from lora_plugins.store.processes import Processes
async def main():
    path = Path(sys.argv[1])
    async with fetch_lock(path, Processes(Path(sys.argv[2])), temporary=path.with_name("temporary"), timeout_s=600):
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    (tmp_path / "processes").mkdir()
    return Processes(tmp_path / "processes")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "locks").mkdir()
    return tmp_path / "locks" / "key.fetch"


@pytest.fixture
def holder(path: Path, tmp_path: Path):
    """Another process that holds the lock until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(path), str(tmp_path / "processes")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("what", ["link", "write_text"])
def test_a_cancelled_fetch_leaves_no_lock(path, processes, monkeypatch, what):
    begun, goes_on = threading.Event(), threading.Event()
    where = os if what == "link" else Path
    original = getattr(where, what)

    def slow(*args):
        if what == "link":  # the lock is taken, which its fetch has not heard of
            original(*args)
        begun.set()
        goes_on.wait(LONG_S)
        return None if what == "link" else original(*args)

    monkeypatch.setattr(where, what, slow)

    async def run() -> None:
        async def fetch() -> None:
            async with fetch_lock(path, processes, temporary=temporary(path), timeout_s=LONG_S):
                raise AssertionError("it was cancelled before")

        fetching = asyncio.create_task(fetch())
        await asyncio.to_thread(begun.wait, LONG_S)
        fetching.cancel()
        await asyncio.sleep(0.01)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching

    asyncio.run(run())
    assert list(path.parent.iterdir()) == []


def temporary(path: Path) -> Path:
    return path.with_name(f"temporary.{os.getpid()}.{os.urandom(4).hex()}")


def take(path: Path, processes: Processes, timeout_s: float = LONG_S) -> None:
    """Acquire and release."""

    async def run() -> None:
        async with fetch_lock(path, processes, temporary=temporary(path), timeout_s=timeout_s):
            assert processes.is_alive(path.read_text())

    asyncio.run(run())


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What came of each try to take the lock: one that is taken over is had at the second."""
    outcomes: list[bool] = []
    attempt = locks._try

    def noted(*arguments: object) -> bool:
        outcomes.append(attempt(*arguments))
        return outcomes[-1]

    monkeypatch.setattr(locks, "_try", noted)
    return outcomes


def left(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path.parent) if not name.endswith(".guard"))


def test_a_lock_names_its_owner_and_leaves_nothing(path, processes):
    take(path, processes)
    assert left(path) == []


def test_an_error_inside_releases_the_lock(path, processes):
    async def run() -> None:
        async with fetch_lock(path, processes, temporary=temporary(path), timeout_s=LONG_S):
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(run())
    assert left(path) == []


def visit_one_at_a_time(path, processes, visitors: int) -> None:
    inside = 0

    async def visit() -> None:
        nonlocal inside
        async with fetch_lock(path, processes, temporary=temporary(path), timeout_s=LONG_S):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.001)
            inside -= 1

    async def run() -> None:
        await asyncio.gather(*(visit() for _ in range(visitors)))

    asyncio.run(run())


def test_one_at_a_time(path, processes):
    visit_one_at_a_time(path, processes, 10)
    assert left(path) == []


def test_a_cancelled_wait_leaves_nothing(path, processes, tries):
    async def run() -> None:
        async with fetch_lock(path, processes, temporary=temporary(path), timeout_s=LONG_S):
            waiting = asyncio.create_task(_enter(path, processes))
            while len(tries) < 3:  # one is the holder's
                await asyncio.sleep(0.001)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert left(path)[0] == path.name
        assert left(path) == []

    asyncio.run(run())


async def _enter(path: Path, processes: Processes) -> None:
    async with fetch_lock(path, processes, temporary=temporary(path), timeout_s=LONG_S):
        pass


def test_an_owner_whose_fetch_goes_on_is_waited_for(path, processes, holder):
    began = time.monotonic()
    threading.Timer(4.0, holder.stdin.close).start()
    take(path, processes, timeout_s=2.5)
    assert time.monotonic() - began > 3.5


def test_an_owner_that_stands_still_is_waited_for_so_long(path, processes, holder):
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(SourceUnavailable, match=r"no sign of life for 0\.3 s"):
        take(path, processes, timeout_s=0.3)
    assert processes.is_alive(path.read_text())
    assert left(path)[0] == path.name  # still held; and of the one that gave up nothing is left
    assert [name for name in left(path) if f".{os.getpid()}." in name] == []
    holder.send_signal(signal.SIGCONT)
    holder.stdin.close()
    take(path, processes)
    assert holder.wait(60) == 0
    assert left(path) == []


def test_a_dead_owners_lock_is_taken_over_at_once(path, processes, holder, tries):
    holder.kill()
    holder.wait()
    assert path.exists()
    take(path, processes)
    assert tries == [False, True]
    assert not path.exists()


@pytest.mark.parametrize(
    "owner",
    [
        b"",
        b"\0" * 20,
        b"\xff\xfe",
        b"nobody",
        b"host.1",
        b"../processes",
        b"a/b.1.1",
        f"{_host()}.999999999.".encode(),  # cut short
        f"{_host()}.1.1".encode(),  # pid 1 did not start at that time: the number was used again
        b"otherhost.1.1",  # has no heartbeat
    ],
    ids=repr,
)
def test_a_lock_without_an_owner_is_taken_over(path, processes, owner, tries):
    path.write_bytes(owner)
    take(path, processes)
    assert tries == [False, True]
    assert left(path) == []


def test_another_hosts_lock_is_waited_for_while_it_beats(path, processes, tmp_path, tries):
    path.write_text("otherhost.1.1")
    beat = tmp_path / "processes" / "otherhost.1.1"
    beat.touch()
    with pytest.raises(SourceUnavailable):
        take(path, processes, timeout_s=0.1)
    now = time.time()
    os.utime(beat, (now - 61, now - 61))
    tries.clear()
    take(path, processes)
    assert tries == [False, True]


def test_takeovers_enter_one_at_a_time(path, processes):
    path.write_text("nobody")
    visit_one_at_a_time(path, processes, 8)
    assert left(path) == []


def test_a_lock_that_changed_hands_stays(path, processes, monkeypatch):
    # Somebody else takes over between our look at the owner and our turn to remove the file.
    path.write_text("nobody")
    guard = locks.FileLock

    def overtaken(*arguments, **options):
        path.write_text(processes.me())
        return guard(*arguments, **options)

    monkeypatch.setattr(locks, "FileLock", overtaken)
    locks.remove_if_dead(path, processes)
    assert path.read_text() == processes.me()
