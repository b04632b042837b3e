"""Pushes: bodies arrive at the same time, one changes its name at a time, the newest waits; nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, NoFreeSlot, OutOfMemory, PushSuperseded, SlowBody
from lora_plugins.lifecycle import arrivals
from lora_plugins.lifecycle.arrivals import Body
from lora_plugins.lifecycle.principal_limits import Share
from lora_plugins.lifecycle.pushing import Pushes
from lora_plugins.lifecycle.registry import ServedAdapter
from lora_plugins.resolvers.sources.pushed import PushedAdapter
from lora_plugins.store.eviction import pending_bytes
from lora_plugins.store.store import Store
from tests.make import adapter_files, put
from tests.store.common import DownloadSpec, obtain

MB = 1 << 20


def owns_nothing(_: str) -> bool:
    return False


class Names:
    """Takes every push, as `Lifecycle` does; `taken` are the versions in their order, `broken` those it refuses."""

    def __init__(
        self, root: Path, *, max_bytes: int | None = None, timeout_s: float = 60, max_s: float | None = None
    ) -> None:
        self.store = Store(root, max_bytes=max_bytes)
        settings = SimpleNamespace(fetch_timeout_s=timeout_s, fetch_max_s=max_s, max_adapter_bytes=64 * MB)
        self.server = SimpleNamespace(resolver=SimpleNamespace(store=self.store, settings=settings))
        self.registry = SimpleNamespace(all=list[ServedAdapter])
        self.taken: list[str] = []
        self.broken: set[str] = set()
        self.begins, self.ends = asyncio.Event(), asyncio.Event()
        self.ends.set()

    def check_pushed(self, name: str, expects: str | None) -> None:
        pass

    async def take(self, name: str, pushed: PushedAdapter, **_: Any) -> str:
        assert {file.name for file in pushed.files} == adapter_files().keys()
        self.begins.set()
        await self.ends.wait()
        if pushed.version in self.broken:
            raise InvalidAdapter("NaN")
        self.taken.append(pushed.version)
        return pushed.version


class Trainer:
    """Sends one body, whose end it decides."""

    def __init__(self, version: str, sender: str = "", *, part: float = 1, size_bytes: int | None = 5) -> None:
        self.version = version
        self.began, self.sends = asyncio.Event(), asyncio.Event()
        self.body = Body(self._pieces(), size_bytes, Share(sender, part), owns_nothing)
        self.pieces = [b"x" * 5]

    async def _pieces(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            self.began.set()
            yield piece
        await self.sends.wait()

    async def receive(self, pieces: AsyncIterator[bytes], directory: Path) -> str:
        put(directory, adapter_files())
        async for _ in pieces:
            pass
        return self.version

    def push(self, pushes: Pushes, name: str = "policy") -> asyncio.Task[Any]:
        return asyncio.create_task(pushes.push(name, self.body, self.receive))


@pytest.fixture
def names(tmp_path: Path) -> Names:
    return Names(tmp_path / "store")


def run(steps: Any) -> None:
    async def within_a_minute() -> None:
        async with asyncio.timeout(60):
            await steps()

    asyncio.run(within_a_minute())


def test_the_newest_that_waits_comes_next_and_others_learn_so(names: Names) -> None:
    async def steps() -> None:
        names.ends.clear()
        pushes, trainers = Pushes(names), [Trainer(str(number)) for number in range(4)]  # type: ignore[arg-type]
        tasks = []
        for trainer in trainers:
            trainer.sends.set()
            tasks.append(trainer.push(pushes))
            await names.begins.wait()
        for superseded in tasks[1:3]:
            with pytest.raises(PushSuperseded):
                await superseded
        names.ends.set()
        outcomes = await asyncio.gather(tasks[0], tasks[3])
        assert outcomes[1].waited_s > outcomes[0].waited_s

    run(steps)
    assert names.taken == ["0", "3"]


def test_a_stalled_body_keeps_no_later_push_waiting(names: Names) -> None:
    async def steps() -> None:
        pushes, stalled, operators = Pushes(names), Trainer("old", "a"), Trainer("new")  # type: ignore[arg-type]
        task = stalled.push(pushes)
        await stalled.began.wait()
        operators.sends.set()
        await operators.push(pushes)
        stalled.sends.set()
        with pytest.raises(PushSuperseded):
            await task
        last = Trainer("last")
        last.sends.set()
        await last.push(pushes)

    run(steps)
    assert names.taken == ["new", "last"]


def test_a_later_push_that_fails_supersedes_nothing(names: Names) -> None:
    async def steps() -> None:
        names.broken.add("later")
        names.ends.clear()
        pushes, earlier, later = Pushes(names), Trainer("earlier"), Trainer("later")  # type: ignore[arg-type]
        tasks = [earlier.push(pushes), later.push(pushes)]
        await earlier.began.wait()
        later.sends.set()
        await names.begins.wait()
        earlier.sends.set()
        await asyncio.sleep(0.05)
        names.ends.set()
        await tasks[0]
        with pytest.raises(InvalidAdapter, match="NaN"):
            await tasks[1]

    run(steps)
    assert names.taken == ["earlier"]


@pytest.mark.parametrize("gone", ["while it waits", "as it begins"])
def test_a_trainer_that_leaves_keeps_nobody_waiting(names: Names, gone: str) -> None:
    async def steps() -> None:
        names.ends.clear()
        pushes, trainers = Pushes(names), [Trainer(str(number)) for number in range(3)]  # type: ignore[arg-type]
        for trainer in trainers:
            trainer.sends.set()
        first = trainers[0].push(pushes)
        await names.begins.wait()
        second = trainers[1].push(pushes)
        await asyncio.sleep(0.05)
        names.ends.set()
        if gone == "as it begins":
            await first
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await trainers[2].push(pushes)

    run(steps)
    assert names.taken[-1] == "2"
    assert not names.store.layout.temporaries()


def test_a_principal_has_few_places_and_others_find_one(names: Names) -> None:
    """Once, one tenant held 214 temporary directories."""

    async def steps() -> None:
        pushes, stalled = Pushes(names), [Trainer(str(number), "a") for number in range(20)]  # type: ignore[arg-type]
        tasks = [trainer.push(pushes, f"a/{trainer.version}") for trainer in stalled]
        await asyncio.gather(*(trainer.began.wait() for trainer in stalled[:4]))
        other = Trainer("other", "b")
        other.sends.set()
        await other.push(pushes)
        assert sum(trainer.began.is_set() for trainer in stalled) == 4
        assert len(names.store.layout.temporaries()) == 8, "a directory and its room for each"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(steps)
    assert names.taken == ["other"]
    assert not names.store.layout.temporaries()


def test_a_push_without_a_place_is_refused(tmp_path: Path) -> None:
    names = Names(tmp_path / "store", timeout_s=0.1)
    names.ends.clear()

    async def steps() -> None:
        pushes, trainers = Pushes(names), [Trainer(str(number), "a") for number in range(5)]  # type: ignore[arg-type]
        for trainer in trainers:
            trainer.sends.set()
        tasks = [trainer.push(pushes, f"a/{trainer.version}") for trainer in trainers]
        with pytest.raises(NoFreeSlot, match="4 pushes of a that arrive"):
            await tasks[4]
        names.ends.set()
        await asyncio.gather(*tasks[:4])

    run(steps)
    assert sorted(names.taken) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("fault", ["a MiB", "a silence", "the whole"])
def test_a_slow_body_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    store = tmp_path / "store"
    names = Names(store, timeout_s=0.1 if fault == "a silence" else 60, max_s=0.2 if fault == "the whole" else None)
    monkeypatch.setattr(arrivals, "_LEAST_S", 0.2 if fault == "a MiB" else 60)

    async def drips() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.15)
            yield b"x" * (1000 if fault == "a MiB" else MB)

    async def steps() -> None:
        pushes, trainer = Pushes(names), Trainer("slow")  # type: ignore[arg-type]
        trainer.body = Body(drips(), 60 * MB if fault == "a MiB" else 2 * MB, Share("a", 1), owns_nothing)
        with pytest.raises(SlowBody, match="bytes have come") as refused:
            await trainer.push(pushes)
        assert refused.value.http_status == 408

    run(steps)
    assert not names.store.layout.temporaries()


def test_a_slow_body_that_goes_on_is_served(tmp_path: Path) -> None:
    """2 GB at 3 MB/s were once refused after 500 s."""
    names = Names(tmp_path / "store", timeout_s=0.5)

    async def drips() -> AsyncIterator[bytes]:
        for _ in range(15):
            await asyncio.sleep(0.05)
            yield b"x" * 1000

    async def steps() -> None:
        trainer = Trainer("1")
        trainer.body = Body(drips(), 15_000, Share("a", 1), owns_nothing)
        await trainer.push(Pushes(names))  # type: ignore[arg-type]

    run(steps)
    assert names.taken == ["1"]


def test_a_slow_disk_is_no_slow_body(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_LEAST_S", 0.1)

    async def steps() -> None:
        trainer = Trainer("1")
        trainer.pieces = [b"x"] * 4
        trainer.sends.set()

        async def receive(pieces: AsyncIterator[bytes], directory: Path) -> str:
            put(directory, adapter_files())
            async for _ in pieces:
                await asyncio.sleep(0.05)
            return "1"

        await Pushes(names).push("policy", trainer.body, receive)  # type: ignore[arg-type]

    run(steps)


@pytest.mark.parametrize("is_announced", [True, False])
def test_the_room_of_a_body_is_reserved_before_it_comes(tmp_path: Path, *, is_announced: bool) -> None:
    names = Names(tmp_path / "store", max_bytes=60 * MB)
    stored = obtain(names.store, DownloadSpec(adapter_files()))
    names.store.release("", stored.directory)

    async def steps() -> None:
        pushes, trainer = Pushes(names), Trainer("1", size_bytes=60 * MB if is_announced else None)  # type: ignore[arg-type]
        trainer.pieces = [b""] if is_announced else [b"x" * 30 * MB]
        task = trainer.push(pushes)
        await trainer.began.wait()
        await asyncio.sleep(0.2)
        assert pending_bytes(names.store.layout)[0] >= (60 if is_announced else 30) * MB
        assert bool(names.store.layout.digests()) is not is_announced, "what nobody uses makes room"
        with pytest.raises(NoFreeSlot):
            await names.store.reserve(20 * MB).__aenter__()
        trainer.sends.set()
        await task

    run(steps)
    assert names.taken == ["1"]
    assert not names.store.layout.temporaries()


def test_a_tenants_pushes_evict_no_more_than_its_share(tmp_path: Path) -> None:
    names = Names(tmp_path / "store", max_bytes=40 * MB)
    stored = obtain(names.store, DownloadSpec(adapter_files()))
    names.store.release("", stored.directory)

    async def steps() -> None:
        pushes, large = Pushes(names), Trainer("large", "a", part=0.5, size_bytes=40 * MB)  # type: ignore[arg-type]
        with pytest.raises(OutOfMemory, match="the key's share"):
            await large.push(pushes)
        assert not large.began.is_set()
        some = [Trainer(str(number), "a", part=0.5, size_bytes=15 * MB) for number in range(2)]
        tasks = [trainer.push(pushes, f"a/{trainer.version}") for trainer in some]
        await some[0].began.wait()
        await asyncio.sleep(0.05)
        assert not some[1].began.is_set(), "both together are more than the share"
        for trainer in some:
            trainer.sends.set()
        await asyncio.gather(*tasks)

    run(steps)
    assert names.store.layout.digests() == [stored.digest]


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
    async def receive(_: object, directory: Path) -> str:
        put(directory, adapter_files())
        raise fault

    async def steps() -> None:
        pushes, trainer = Pushes(names), Trainer("next")  # type: ignore[arg-type]
        with pytest.raises(error):
            await pushes.push("policy", trainer.body, receive)
        trainer = Trainer(trainer.version)
        trainer.sends.set()
        await trainer.push(pushes)

    run(steps)
    assert names.taken == ["next"]
    assert not names.store.layout.temporaries()


def test_a_directory_that_is_made_late_goes_too(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, is_making, was_cancelled = Path.mkdir, threading.Event(), threading.Event()

    def late(path: Path, *given: Any, **more: Any) -> None:
        is_making.set()
        was_cancelled.wait(10)
        mkdir(path, *given, **more)

    async def steps() -> None:
        trainer = Trainer("next")
        pushing = trainer.push(Pushes(names))  # type: ignore[arg-type]
        await asyncio.to_thread(is_making.wait, 10)
        pushing.cancel()
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, was_cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await pushing

    names.store.processes.me()  # makes directories too
    monkeypatch.setattr(Path, "mkdir", late)
    run(steps)
    assert not names.store.layout.temporaries()


def test_a_push_on_a_full_disk_makes_room(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sends its body twice but the trainer, and without more room each push would be 507."""
    stored = obtain(names.store, DownloadSpec(adapter_files()))
    names.store.release("", stored.directory)

    def full(_: Path) -> SimpleNamespace:
        free_bytes = 500 if names.store.layout.digests() else 5_000
        return SimpleNamespace(f_frsize=1, f_bavail=free_bytes, f_blocks=10_000, f_files=0, f_favail=0)

    async def steps() -> None:
        pushes, trainer = Pushes(names), Trainer("1", size_bytes=600)  # type: ignore[arg-type]
        trainer.sends.set()
        await trainer.push(pushes)

    names.store._kept_free_bytes = 0
    monkeypatch.setattr(os, "statvfs", full)
    run(steps)
    assert (names.taken, names.store.layout.digests()) == (["1"], [])


def test_a_principal_pushes_so_often_within_a_minute(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lora_plugins.lifecycle.pushing.time.monotonic", lambda: now[0])
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
