"""One fetch at a time for one version: a living process's lock is waited for, a dead one's is free."""

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
from tests.store.common import cancel

LONG_S = 600.0  # for what is there in a moment, or never
HOLDER = """
import asyncio, sys
from pathlib import Path
from lora_plugins.store.locks import fetch_lock
async def main():
    async with fetch_lock(Path(sys.argv[1]), timeout_s=600):
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "locks").mkdir()
    return tmp_path / "locks" / "key.fetch"


@pytest.fixture
def holder(path: Path):
    """Another process that holds the lock until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_cancelled_fetch_leaves_no_lock(path, monkeypatch, is_taken):
    begun, goes_on = threading.Event(), threading.Event()
    original = locks._take

    def slow(lock):
        if is_taken:  # which its fetch has not heard of
            original(lock)
        begun.set()
        goes_on.wait(LONG_S)
        return original(lock)

    monkeypatch.setattr(locks, "_take", slow)

    async def run() -> None:
        async def fetch() -> None:
            async with fetch_lock(path, timeout_s=LONG_S):
                raise AssertionError("it was cancelled before")

        await cancel(fetch(), asyncio.to_thread(begun.wait, LONG_S), then=goes_on.set)

    asyncio.run(run())
    assert list(path.parent.iterdir()) == []
    monkeypatch.undo()
    take(path)


async def enter(path: Path, timeout_s: float = LONG_S) -> None:
    async with fetch_lock(path, timeout_s=timeout_s):
        assert path.exists()


def take(path: Path, timeout_s: float = LONG_S) -> None:
    """Acquire and release."""
    asyncio.run(enter(path, timeout_s))


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What came of each try to take the lock."""
    outcomes: list[bool] = []
    attempt = locks._take

    def noted(*arguments: object) -> bool:
        outcomes.append(attempt(*arguments))
        return outcomes[-1]

    monkeypatch.setattr(locks, "_take", noted)
    return outcomes


def left(path: Path) -> list[str]:
    return os.listdir(path.parent)


def test_a_lock_leaves_nothing(path):
    take(path)
    assert left(path) == []


def test_an_error_inside_releases_the_lock(path):
    async def run() -> None:
        async with fetch_lock(path, timeout_s=LONG_S):
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(run())
    assert left(path) == []


def test_one_at_a_time(path):
    inside = 0

    async def visit() -> None:
        nonlocal inside
        async with fetch_lock(path, timeout_s=LONG_S):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.001)
            inside -= 1

    async def run() -> None:
        await asyncio.gather(*(visit() for _ in range(10)))

    asyncio.run(run())
    assert left(path) == []


def test_a_cancelled_wait_leaves_nothing(path, tries):
    async def waited() -> None:
        while len(tries) < 3:  # one is the holder's
            await asyncio.sleep(0.001)

    async def run() -> None:
        async with fetch_lock(path, timeout_s=LONG_S):
            await cancel(enter(path), waited())
            assert left(path) == [path.name]
        assert left(path) == []

    asyncio.run(run())


def test_an_owner_whose_fetch_goes_on_is_waited_for(path, holder):
    began = time.monotonic()
    threading.Timer(2.5, holder.stdin.close).start()
    take(path, timeout_s=1.5)
    assert time.monotonic() - began > 2


def test_an_owner_that_stands_still_is_waited_for_so_long(path, holder):
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(SourceUnavailable, match=r"no sign of life for 0\.3 s"):
        take(path, timeout_s=0.3)
    assert left(path) == [path.name]  # still held
    holder.send_signal(signal.SIGCONT)
    holder.stdin.close()
    take(path)
    assert holder.wait(60) == 0
    assert left(path) == []


def test_a_dead_owners_lock_is_free_at_once(path, holder, tries):
    holder.kill()
    holder.wait()
    assert path.exists()
    take(path)
    assert tries == [True]
    assert left(path) == []


def test_a_lock_of_an_earlier_release_is_free(path, tries):
    path.write_text("0-0.1.1")
    take(path)
    assert tries == [True]
    assert left(path) == []


def test_only_a_lock_that_nobody_holds_is_swept(path, holder):
    locks.remove_unheld(path)
    assert left(path) == [path.name]
    holder.kill()
    holder.wait()
    locks.remove_unheld(path)
    assert left(path) == []


def test_a_removed_lock_blocks_nobody(path, holder, tries):
    """A lock whose file was removed under its holder, as by a cleaner, saves no work and blocks nobody."""
    path.unlink()
    take(path)
    assert tries == [True]
