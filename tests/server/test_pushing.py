"""Pushes of one name: one at a time, the newest waits; whatever becomes of one, its directory goes."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, NoFreeSlot, OutOfMemory, PushSuperseded
from lora_plugins.resolvers.sources.pushed import PushedAdapter
from lora_plugins.server.pushing import Pushes
from lora_plugins.store.store import Store
from tests.make import adapter_files, put
from tests.store.common import DownloadSpec, obtain


class Names:
    """Takes every push, as `Lifecycle` does; `taken` are the versions in their order."""

    def __init__(self, root: Path) -> None:
        self.store = Store(root)
        self.server = SimpleNamespace(resolver=SimpleNamespace(store=self.store))
        self.taken: list[str] = []

    def check_pushed(self, name: str, expects: str | None) -> None:
        pass

    async def take(self, name: str, pushed: PushedAdapter, **_: Any) -> str:
        assert {file.name for file in pushed.files} == adapter_files().keys()
        self.taken.append(pushed.version)
        return pushed.version


class Trainer:
    """Sends one body, whose end it decides."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.began, self.sends = asyncio.Event(), asyncio.Event()

    async def receive(self, directory: Path) -> str:
        put(directory, adapter_files())
        self.began.set()
        await self.sends.wait()
        return self.version


@pytest.fixture
def names(tmp_path: Path) -> Names:
    return Names(tmp_path / "store")


def test_the_newest_that_waits_comes_next_and_others_learn_so(names: Names) -> None:
    async def run() -> list[Any]:
        pushes, trainers = Pushes(names), [Trainer(str(number)) for number in range(4)]  # type: ignore[arg-type]
        tasks = []
        for trainer in trainers:
            tasks.append(asyncio.create_task(pushes.push("policy", trainer.receive)))
            await asyncio.sleep(0)
        await trainers[0].began.wait()
        other = Trainer("other")
        other.sends.set()
        await pushes.push("another name", other.receive)  # waits for nobody
        for trainer in trainers:
            trainer.sends.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(run())
    assert names.taken == ["other", "0", "3"]
    assert [type(outcome) for outcome in outcomes[1:3]] == [PushSuperseded] * 2
    assert outcomes[3].waited_s > outcomes[0].waited_s


@pytest.mark.parametrize("gone", ["while it waits", "as it begins"])
def test_a_trainer_that_leaves_keeps_nobody_waiting(names: Names, gone: str) -> None:
    async def run() -> None:
        pushes, trainers = Pushes(names), [Trainer(str(number)) for number in range(3)]  # type: ignore[arg-type]
        first = asyncio.create_task(pushes.push("policy", trainers[0].receive))
        await trainers[0].began.wait()
        second = asyncio.create_task(pushes.push("policy", trainers[1].receive))
        await asyncio.sleep(0)
        trainers[0].sends.set()
        if gone == "as it begins":
            await first
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        trainers[2].sends.set()
        await asyncio.wait_for(pushes.push("policy", trainers[2].receive), 60)

    asyncio.run(run())
    assert names.taken[-1] == "2"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (InvalidAdapter("no adapter"), InvalidAdapter),
        (OSError(28, "No space left on device"), OutOfMemory),
        (asyncio.CancelledError(), asyncio.CancelledError),
    ],
)
def test_a_push_that_ends_early_leaves_nothing(
    names: Names, fault: BaseException, error: type[LoRAPluginsError]
) -> None:
    async def receive(directory: Path) -> str:
        put(directory, adapter_files())
        raise fault

    async def run() -> None:
        pushes, trainer = Pushes(names), Trainer("next")  # type: ignore[arg-type]
        with pytest.raises(error):
            await pushes.push("policy", receive)
        trainer.sends.set()
        await pushes.push("policy", trainer.receive)

    asyncio.run(run())
    assert names.taken == ["next"]
    assert not names.store.layout.temporaries()


def test_a_push_on_a_full_disk_makes_room(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sends its body twice but the trainer, and without more room each push would be 507."""
    stored = obtain(names.store, DownloadSpec(adapter_files()))
    names.store.release("", stored.directory)
    free_bytes = 500
    allocate = os.posix_fallocate

    def within_a_quota(descriptor: int, start: int, size_bytes: int) -> None:
        if size_bytes > free_bytes and names.store.layout.digests():
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, start, size_bytes)

    async def fill(directory: Path) -> str:
        (directory / "part").write_bytes(bytes(free_bytes))
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        pushes, trainer = Pushes(names), Trainer("1")  # type: ignore[arg-type]
        with pytest.raises(OutOfMemory):
            await pushes.push("policy", fill)
        assert names.store.layout.digests() == []
        trainer.sends.set()
        await pushes.push("policy", trainer.receive)

    monkeypatch.setattr(os, "posix_fallocate", within_a_quota)
    asyncio.run(run())
    assert names.taken == ["1"]


def test_a_principal_pushes_so_often_within_a_minute(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lora_plugins.server.pushing.time.monotonic", lambda: now[0])
    pushes = Pushes(names)  # type: ignore[arg-type]
    pushes.count("a", 2)
    now[0] += 30
    pushes.count("a", 2)
    with pytest.raises(NoFreeSlot, match="2 pushes of a within a minute") as refused:
        pushes.count("a", 2)
    assert refused.value.retry_after_s == 30
    pushes.count("b", 2)
    now[0] += 30
    pushes.count("a", 2)
