"""Pushes: bodies arrive at the same time, one changes its name at a time, the newest waits; nothing stays behind."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
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
from lora_plugins.store.layout import Layout
from lora_plugins.store.store import Store
from tests.make import adapter_files, put
from tests.store.common import DownloadSpec, check

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
        self.pushes = Pushes(self)  # type: ignore[arg-type]
        self.taken: list[str] = []
        self.broken: set[str] = set()
        self.begins, self.ends = asyncio.Event(), asyncio.Event()
        self.ends.set()

    async def store_idle(self) -> str:
        """Put an adapter into the store that nobody uses; returns its digest."""
        wanted = DownloadSpec(adapter_files())
        stored = await self.store.obtain(wanted, wanted.fetch, check)
        if (ended := self.store.release("", stored.directory)) is not None:
            await ended
        return stored.digest

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
    """Sends one body, at once or until `sends`."""

    def __init__(
        self, version: str, sender: str = "", *, part: float = 1, size_bytes: int | None = 5, waits: bool = False
    ) -> None:
        self.version = version
        self.began, self.sends = asyncio.Event(), asyncio.Event()
        if not waits:
            self.sends.set()
        self.body = Body(self._pieces(), size_bytes, Share(sender, part), owns_nothing)
        self.pieces = [b"x" * 5]

    async def _pieces(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            self.began.set()
            yield piece
        await self.sends.wait()

    async def receive(self, pieces: AsyncIterator[bytes], directory: Path) -> tuple[str, frozenset[str]]:
        put(directory, adapter_files())
        async for _ in pieces:
            pass
        return self.version, frozenset()

    def push(self, names: Names, name: str = "policy") -> asyncio.Task[Any]:
        return asyncio.create_task(names.pushes.push(name, self.body, self.receive))


@pytest.fixture
def make_names(tmp_path: Path) -> Iterator[Callable[..., Names]]:
    """In the end, once all threads have ended too, nothing is left of any push."""
    yield lambda **options: Names(tmp_path / "store", **options)
    assert not Layout(tmp_path / "store").temporaries()


@pytest.fixture
def names(make_names: Callable[..., Names]) -> Names:
    return make_names()


def within_a_minute(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test, and what it asks pytest for, in real time: disks and threads are real."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), 60))

    return run


@within_a_minute
async def test_the_newest_that_waits_comes_next_and_others_learn_so(names: Names) -> None:
    names.ends.clear()
    tasks = []
    for number in range(4):
        tasks.append(Trainer(str(number)).push(names))
        await names.begins.wait()
    for superseded in tasks[1:3]:
        with pytest.raises(PushSuperseded):
            await superseded
    names.ends.set()
    outcomes = await asyncio.gather(tasks[0], tasks[3])
    assert outcomes[1].waited_s > outcomes[0].waited_s
    assert names.taken == ["0", "3"]


@within_a_minute
async def test_a_stalled_body_keeps_no_later_push_waiting(names: Names) -> None:
    stalled, operators = Trainer("old", "a", waits=True), Trainer("new")
    task = stalled.push(names)
    await stalled.began.wait()
    await operators.push(names)
    stalled.sends.set()
    with pytest.raises(PushSuperseded):
        await task
    await Trainer("last").push(names)
    assert names.taken == ["new", "last"]


@within_a_minute
async def test_a_later_push_that_fails_supersedes_nothing(names: Names) -> None:
    names.broken.add("later")
    names.ends.clear()
    earlier, later = Trainer("earlier", waits=True), Trainer("later", waits=True)
    tasks = [earlier.push(names), later.push(names)]
    await earlier.began.wait()
    later.sends.set()
    await names.begins.wait()
    earlier.sends.set()
    await asyncio.sleep(0.05)
    names.ends.set()
    await tasks[0]
    with pytest.raises(InvalidAdapter, match="NaN"):
        await tasks[1]
    assert names.taken == ["earlier"]


@pytest.mark.parametrize("gone", ["while it waits", "as it begins"])
@within_a_minute
async def test_a_trainer_that_leaves_keeps_nobody_waiting(names: Names, gone: str) -> None:
    names.ends.clear()
    trainers = [Trainer(str(number)) for number in range(3)]
    first = trainers[0].push(names)
    await names.begins.wait()
    second = trainers[1].push(names)
    await asyncio.sleep(0.05)
    names.ends.set()
    if gone == "as it begins":
        await first
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    await trainers[2].push(names)
    assert names.taken[-1] == "2"


@within_a_minute
async def test_a_principal_has_few_places_and_others_find_one(names: Names) -> None:
    """Once, one tenant held 214 temporary directories."""
    stalled = [Trainer(str(number), "a", waits=True) for number in range(20)]
    tasks = [trainer.push(names, f"a/{trainer.version}") for trainer in stalled]
    await asyncio.gather(*(trainer.began.wait() for trainer in stalled[:4]))
    await Trainer("other", "b").push(names)
    assert sum(trainer.began.is_set() for trainer in stalled) == 4
    assert len(names.store.layout.temporaries()) == 8, "a directory and its room for each"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert names.taken == ["other"]


@within_a_minute
async def test_a_push_without_a_place_is_refused(make_names: Any) -> None:
    names = make_names(timeout_s=0.1)
    names.ends.clear()
    trainers = [Trainer(str(number), "a") for number in range(5)]
    tasks = [trainer.push(names, f"a/{trainer.version}") for trainer in trainers]
    with pytest.raises(NoFreeSlot, match="4 pushes of a that arrive"):
        await tasks[4]
    names.ends.set()
    await asyncio.gather(*tasks[:4])
    assert sorted(names.taken) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("fault", ["a MiB", "a silence", "the whole"])
@within_a_minute
async def test_a_slow_body_is_refused(make_names: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    names = make_names(timeout_s=0.1 if fault == "a silence" else 60, max_s=0.2 if fault == "the whole" else None)
    monkeypatch.setattr(arrivals, "_LEAST_S", 0.2 if fault == "a MiB" else 60)

    async def drips() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.15)
            yield b"x" * (1000 if fault == "a MiB" else MB)

    trainer = Trainer("slow")
    trainer.body = Body(drips(), 60 * MB if fault == "a MiB" else 2 * MB, Share("a", 1), owns_nothing)
    with pytest.raises(SlowBody, match="bytes have come") as refused:
        await trainer.push(names)
    assert refused.value.http_status == 408


@within_a_minute
async def test_a_slow_body_that_goes_on_is_served(make_names: Any) -> None:
    """2 GB at 3 MB/s were once refused after 500 s."""
    names = make_names(timeout_s=0.5)

    async def drips() -> AsyncIterator[bytes]:
        for _ in range(15):
            await asyncio.sleep(0.05)
            yield b"x" * 1000

    trainer = Trainer("1")
    trainer.body = Body(drips(), 15_000, Share("a", 1), owns_nothing)
    await trainer.push(names)
    assert names.taken == ["1"]


@within_a_minute
async def test_a_slow_disk_is_no_slow_body(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_LEAST_S", 0.1)
    trainer = Trainer("1")
    trainer.pieces = [b"x"] * 4

    async def receive(pieces: AsyncIterator[bytes], directory: Path) -> tuple[str, frozenset[str]]:
        put(directory, adapter_files())
        async for _ in pieces:
            await asyncio.sleep(0.05)
        return "1", frozenset()

    await names.pushes.push("policy", trainer.body, receive)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_announced", [True, False])
@within_a_minute
async def test_the_room_of_a_body_is_reserved_before_it_comes(make_names: Any, *, is_announced: bool) -> None:
    names = make_names(max_bytes=60 * MB)
    await names.store_idle()
    trainer = Trainer("1", size_bytes=60 * MB if is_announced else None, waits=True)
    trainer.pieces = [b""] if is_announced else [b"x" * 30 * MB]
    task = trainer.push(names)
    await trainer.began.wait()
    await asyncio.sleep(0.2)
    assert pending_bytes(names.store.layout)[0] >= (60 if is_announced else 30) * MB
    assert bool(names.store.layout.digests()) is not is_announced, "what nobody uses makes room"
    with pytest.raises(NoFreeSlot):
        await names.store.reserve(20 * MB).__aenter__()
    trainer.sends.set()
    await task
    assert names.taken == ["1"]


@within_a_minute
async def test_a_tenants_pushes_evict_no_more_than_its_share(make_names: Any) -> None:
    names = make_names(max_bytes=40 * MB)
    idle = await names.store_idle()
    large = Trainer("large", "a", part=0.5, size_bytes=40 * MB)
    with pytest.raises(OutOfMemory, match="the key's share"):
        await large.push(names)
    assert not large.began.is_set()
    some = [Trainer(str(number), "a", part=0.5, size_bytes=15 * MB, waits=True) for number in range(2)]
    tasks = [trainer.push(names, f"a/{trainer.version}") for trainer in some]
    await some[0].began.wait()
    await asyncio.sleep(0.05)
    assert not some[1].began.is_set(), "both together are more than the share"
    for trainer in some:
        trainer.sends.set()
    await asyncio.gather(*tasks)
    assert names.store.layout.digests() == [idle]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (InvalidAdapter("no adapter"), InvalidAdapter),
        (OSError(28, "No space left on device"), OutOfMemory),
        (asyncio.CancelledError(), asyncio.CancelledError),
    ],
)
@within_a_minute
async def test_a_push_that_ends_early_leaves_nothing(
    names: Names, fault: BaseException, error: type[LoRAPluginsError]
) -> None:
    async def receive(_: object, directory: Path) -> tuple[str, frozenset[str]]:
        put(directory, adapter_files())
        raise fault

    with pytest.raises(error):
        await names.pushes.push("policy", Trainer("failed").body, receive)
    await Trainer("next").push(names)
    assert names.taken == ["next"]


@within_a_minute
async def test_a_directory_that_is_made_late_goes_too(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, is_making, was_cancelled = Path.mkdir, threading.Event(), threading.Event()

    def late(path: Path, *given: Any, **more: Any) -> None:
        is_making.set()
        was_cancelled.wait(10)
        mkdir(path, *given, **more)

    names.store.processes.me()  # makes directories too
    monkeypatch.setattr(Path, "mkdir", late)
    pushing = Trainer("next").push(names)
    await asyncio.to_thread(is_making.wait, 10)
    pushing.cancel()
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.05, was_cancelled.set)
    with pytest.raises(asyncio.CancelledError):
        await pushing


@within_a_minute
async def test_a_push_on_a_full_disk_makes_room(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sends its body twice but the trainer, and without more room each push would be 507."""
    await names.store_idle()

    def full(_: Path) -> SimpleNamespace:
        free_bytes = 500 if names.store.layout.digests() else 5_000
        return SimpleNamespace(f_frsize=1, f_bavail=free_bytes, f_blocks=10_000, f_files=0, f_favail=0)

    names.store.evictor.kept_free_bytes = 0
    monkeypatch.setattr(os, "statvfs", full)
    await Trainer("1", size_bytes=600).push(names)
    assert (names.taken, names.store.layout.digests()) == (["1"], [])


def test_a_principal_pushes_so_often_within_a_minute(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lora_plugins.lifecycle.pushing.time.monotonic", lambda: now[0])
    pushes = names.pushes
    pushes.count("a", 2)
    now[0] += 30
    pushes.count("a", 2)
    with pytest.raises(NoFreeSlot, match="2 pushes of a within a minute") as refused:
        pushes.count("a", 2)
    assert refused.value.retry_after_s == 30
    pushes.count("b", 2)
    now[0] += 30
    pushes.count("a", 2)
