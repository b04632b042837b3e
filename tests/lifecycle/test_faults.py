"""Faults of a store's file system below a running server: refused as a fault that passes, and nothing is lost.

A server of the real store, resolver, lifecycle, pushes and list of served names does an operation while calls of the
system fail: the k-th one, or all from the k-th on, for every k. The answer is the operation's effect, or an error of
ours about now. Then the fault ends, and the same process does the operation, within seconds and without a restart:
what was answered before is there, with its bytes; nothing is half, held or announced; and the next start finds it.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

from lora_plugins.errors import ErrorKind, InvalidSettings, LoRAPluginsError, SourceUnavailable, kind_of
from lora_plugins.events import Events
from lora_plugins.lifecycle.arrivals import Body
from lora_plugins.lifecycle.principal_limits import Share
from lora_plugins.lifecycle.pushing import Pushes
from lora_plugins.lifecycle.reconciler import Reconciler
from lora_plugins.lifecycle.served_file import ServedFile
from lora_plugins.resolvers.known_versions import KnownVersions
from lora_plugins.settings import Settings
from lora_plugins.store.eviction import pending_bytes
from lora_plugins.store.locks import fetch_lock, remove_unheld
from lora_plugins.store.store import Store, open_store
from tests.lifecycle.world import World
from tests.make import adapter_files, content, put
from tests.repetitions import times
from tests.resolvers.test_resolver import FakeSource, RecordingResolver
from tests.store.conftest import mounted
from tests.virtual_time import run_in_virtual_time, runs

LASTING, LATE_S = 10**9, 100.0
OLD, SQL, CHAT, NEXT = (adapter_files(lora_alpha=alpha) for alpha in (1, 2, 3, 4))
SIZE_BYTES = sum(map(len, SQL.values()))


class Server:
    """One process's server over a store; `source` has names beside what is pushed."""

    def __init__(self, root: Path, *, max_bytes: int | None = None) -> None:
        self.source = FakeSource("s3", {"sql": SQL, "chat": CHAT})
        self.resolver = RecordingResolver(root, self.source, max_bytes=max_bytes)
        self.world = World(resolver=self.resolver)
        self.lifecycle = self.world.lifecycle
        self.store = self.resolver.store
        self.pushes = Pushes(self.lifecycle)
        self.file = ServedFile.of_store(root, "/base", "replica")
        self.reconciler = Reconciler(self.lifecycle, Settings(restore="1"), self.file, Events())

    async def push(self, name: str, files: dict[str, bytes]) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield bytes(SIZE_BYTES)

        async def receive(body: AsyncIterator[bytes], directory: Path) -> tuple[str, frozenset[str]]:
            async for _ in body:
                put(directory, files)
            return f"{hash(frozenset(files.items())):x}", frozenset()

        await self.pushes.push(name, Body(pieces(), SIZE_BYTES, Share("", 1), lambda _: False), receive)
        await self.lifecycle.written()

    async def load(self, name: str) -> None:
        await self.lifecycle.load(name)
        await self.lifecycle.written()

    def served(self) -> dict[str, dict[str, bytes]]:
        """The names with the files that engines would read."""
        return {it.name: content(Path(it.version.path)) for it in self.lifecycle.registry.all()}


# --- operations


@dataclass(frozen=True)
class Operation:
    """`act` is done to a server that `prepare` has had; `served` are the names afterwards, beside `old`."""

    act: Callable[[Server], Awaitable[object]]
    served: dict[str, dict[str, bytes]]
    prepare: Callable[[Server], Awaitable[object]] | None = None
    is_blocked: bool = False
    max_bytes: int | None = None


async def load_sql(server: Server) -> None:
    await server.load("sql")


async def block(server: Server) -> None:
    await server.lifecycle.unload("sql", block=True)


async def unload(server: Server) -> None:
    if server.lifecycle.registry.get("sql") is not None:
        await server.lifecycle.unload("sql", block=False)
    await server.lifecycle.written()


async def pin(server: Server) -> None:
    await server.lifecycle.pin("old")
    await server.lifecycle.written()


async def verify(server: Server) -> None:
    """What is damaged is fetched and loaded again."""
    for _ in range(2):
        await server.lifecycle.copies.look()
        await asyncio.sleep(15)  # as long as a failed repair is not tried again


async def damage(server: Server) -> None:
    await server.load("sql")
    weights = Path(server.lifecycle.registry.require("sql").version.path) / "adapter_model.safetensors"
    weights.chmod(0o600)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


async def ask_by_digest(server: Server) -> None:
    digest = server.lifecycle.registry.require("old").digest
    assert await server.lifecycle.load_version(f"old@{digest}")
    await server.lifecycle.unload(f"old@{digest}", block=False)


async def evict_and_load(server: Server) -> None:
    await server.lifecycle.copies.relieve()
    await server.load("sql")


async def chat_unloaded(server: Server) -> None:
    await server.load("chat")
    await server.lifecycle.unload("chat", block=False)


OPERATIONS = {
    "load": Operation(load_sql, {"sql": SQL}),
    "load with eviction": Operation(evict_and_load, {"sql": SQL}, chat_unloaded, max_bytes=5 * SIZE_BYTES // 2),
    "push a new name": Operation(lambda server: server.push("policy", NEXT), {"policy": NEXT}),
    "push the next version": Operation(lambda server: server.push("old", NEXT), {"old": NEXT}),
    "block": Operation(block, {}, load_sql, is_blocked=True),
    "load what is blocked": Operation(load_sql, {"sql": SQL}, block),
    "unload": Operation(unload, {}, load_sql),
    "pin": Operation(pin, {}),
    "find damage": Operation(verify, {"sql": SQL}, damage),
    "serve a version by its digest": Operation(ask_by_digest, {}),
}


# --- faults


class Calls:
    """While this is entered, calls about files below `root` raise `number`: from the `first` on, as many as `most`."""

    def __init__(self, root: Path, number: int = 0, first: int = 0, most: int = 0) -> None:
        self._root, self._number, self._first, self._most = str(root), number, first, most
        self.count, self.failed = 0, []
        self._counting = threading.Lock()

    def __enter__(self) -> Self:
        self._patch = pytest.MonkeyPatch()
        for name in ("mkdir", "link", "rename", "replace", "unlink", "rmdir", "utime", "chmod"):
            self._wrap(os, name, lambda *_: True)
        for name in ("stat", "lstat", "scandir", "listdir", "statvfs"):
            self._wrap(os, name, lambda *_: False)
        self._wrap(os, "fsync", lambda *_: None)
        self._wrap(os, "open", lambda _, flags, *__: bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)))
        self._wrap(io, "open", lambda _, mode="r", *__: bool(set(mode) & set("wax+")))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _wrap(self, module: Any, name: str, writes: Callable[..., bool | None]) -> None:
        real = getattr(module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if self._is_below(*arguments[:1], dir_fd=named.get("dir_fd", named.get("src_dir_fd"))):
                self._look(name, writes(*arguments))
            return real(*arguments, **named)

        self._patch.setattr(module, name, call)

    def _is_below(self, path: Any = ".", dir_fd: int | None = None) -> bool:
        if isinstance(path, int) or dir_fd is not None:
            try:
                path = os.readlink(f"/proc/self/fd/{path if dir_fd is None else dir_fd}")
            except OSError:
                return False
        return os.fsdecode(path).startswith(self._root)

    def _look(self, name: str, writes: bool | None) -> None:
        """`writes` is None for a call that neither reads nor makes anything."""
        fails = {
            errno.EROFS: bool(writes),
            errno.ENOSPC: (bool(writes) and name not in ("unlink", "rmdir", "utime", "chmod")) or writes is None,
            errno.EIO: True,
            errno.EACCES: writes is not None,
            0: True,
        }
        if not fails[self._number]:
            return
        with self._counting:
            self.count += 1
            if not self._first <= self.count < self._first + self._most:
                return
            self.failed.append(name)
        raise OSError(self._number, os.strerror(self._number))


@pytest.fixture(autouse=True)
def remembered_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownVersions.__init__, "__defaults__", (lambda: time.monotonic(),))  # noqa: PLW0108 - of the run


NUMBERS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "EACCES": errno.EACCES}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "size=4m,nr_inodes=400")


def fill(folder: Path, size_bytes: int) -> None:
    with suppress(OSError):
        for number in itertools.count():
            with (folder / f"{number}").open("wb", buffering=0) as file:
                while size_bytes and file.write(bytes(size_bytes)):
                    pass


@contextmanager
def full(disk: Path, size_bytes: int) -> Iterator[None]:
    (others := disk / "others").mkdir()
    fill(others, size_bytes)
    yield
    shutil.rmtree(others)


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


@contextmanager
def masked(root: Path) -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@contextmanager
def jumped(seconds: float, root: Path) -> Iterator[None]:
    """What is there has times of a clock that was off by so much."""
    for path in root.rglob("*"):
        os.utime(path, (time.time() - seconds,) * 2)
    yield


@contextmanager
def removed(root: Path) -> Iterator[None]:
    for name in ("locks", "tmp", "leases"):
        shutil.rmtree(root / f".{name}")
    yield


DISKS = {"no bytes": partial(full, size_bytes=4096), "no inodes": partial(full, size_bytes=0), "read-only": read_only}
WORLDS = {
    "umask 077": masked,
    "a clock a day ahead": partial(jumped, -86_400),
    "a clock a day behind": partial(jumped, 86_400),
    "a cleaner": removed,
}


async def trial(root: Path, operation: Operation, fault: AbstractContextManager[object]) -> list[str]:
    """What is wrong after a fault and its end."""
    server = Server(root, max_bytes=operation.max_bytes)
    await server.reconciler.start()
    await server.push("old", OLD)
    if operation.prepare is not None:
        await operation.prepare(server)
        await server.lifecycle.written()
    wrong = []
    with fault:
        try:
            async with asyncio.timeout(LATE_S):
                await operation.act(server)
        except LoRAPluginsError as error:
            if kind_of(error) is not ErrorKind.FAULT:
                wrong.append(f"is answered with a {kind_of(error)}: {error}")
        except Exception as error:
            wrong.append("".join(traceback.format_exception(error)[-3:]))
        gc.collect()
    try:
        await passed(server, operation)
    except Exception as error:
        return [*wrong, f"does not pass: {type(error).__name__} {error}"]
    await asyncio.sleep(5)
    await server.lifecycle.written()
    return [*wrong, *look(server, operation), *await of_next_start(root, operation)]


async def passed(server: Server, operation: Operation) -> None:
    """Do the operation once more, with as much patience as a client has."""
    server.store.processes.on_beat()  # as every 5 s
    for _ in range(4):
        try:
            async with asyncio.timeout(LATE_S):
                await operation.act(server)
                return
        except LoRAPluginsError as error:
            if kind_of(error) is not ErrorKind.FAULT:
                raise
            await asyncio.sleep(3)
    await operation.act(server)


def expected(operation: Operation) -> dict[str, dict[str, bytes]]:
    return {"old": OLD} | operation.served


def look(server: Server, operation: Operation) -> list[str]:
    wrong, store = [], server.store
    if (served := server.served()) != expected(operation):
        wrong.append(f"serves {served.keys()}, or other bytes")
    if left := [it.path.name for it in store.layout.temporaries()]:
        wrong.append(f"temporary files: {left}")
    if pending := pending_bytes(store.layout)[0]:
        wrong.append(f"{pending} bytes are announced")
    for lock in store.layout.folder("locks").glob("*.fetch"):
        remove_unheld(lock)  # as the next start does, where nothing could be removed
    if locks := [it.name for it in store.layout.folder("locks").iterdir() if it.suffix != ".guard"]:
        wrong.append(f"locks: {locks}")
    if (names := server.lifecycle.registry.blocked.names()) != ({"sql"} if operation.is_blocked else set()):
        wrong.append(f"blocked {names}")
    needed = {it.digest for it in server.lifecycle.registry.all()}
    leased = {digest for digest in store.layout.digests() if store.leases.holders(digest)}
    if not operation.max_bytes and not needed <= leased:  # a name's lease ends where room is needed
        wrong.append(f"not leased: {needed - leased}")
    return wrong


async def of_next_start(root: Path, operation: Operation) -> list[str]:
    """What a server finds that starts now."""
    server = Server(root)
    await server.reconciler.start()
    wrong = [] if server.served() == expected(operation) else [f"the next start serves {server.served().keys()}"]
    damaged = [digest for digest in server.store.layout.digests() if not server.store.verify(digest)]
    if damaged:
        wrong.append(f"damaged: {damaged}")
    if server.store.blocks.names() != ({"sql"} if operation.is_blocked else set()):
        wrong.append(f"the next start blocks {server.store.blocks.names()}")
    return wrong


def run(root: Path, operation: Operation, fault: AbstractContextManager[object]) -> list[str]:
    return run_in_virtual_time(trial(root, operation, fault))


def some(trials: Iterable[Any], text: str, number: int) -> list[Any]:
    """A few of them, or in a long run all."""
    trials = list(trials)
    return random.Random(text).sample(trials, min(len(trials), times(len(trials), short=number)))


@pytest.mark.timeout(times(3600, short=900))
@pytest.mark.parametrize("name", OPERATIONS)
def test_calls_that_fail_at_any_moment(tmp_path: Path, name: str) -> None:
    operation, wrong, folders = OPERATIONS[name], {}, itertools.count()
    for fault in some(NUMBERS, name, 1):
        calls = Calls(tmp_path, NUMBERS[fault])
        assert run(tmp_path / "whole", operation, calls) == []
        shutil.rmtree(tmp_path / "whole", ignore_errors=True)  # a process's beat may write there at this moment
        trials = itertools.product(range(1, calls.count + 1), (1, LASTING))
        for first, most in some(trials, name, 2):
            calls = Calls(tmp_path, NUMBERS[fault], first, most)
            if found := run(tmp_path / f"{next(folders)}", operation, calls):
                wrong[fault, first, most, *calls.failed[:1]] = found
    assert wrong == {}


@pytest.mark.parametrize(("name", "fault"), some(itertools.product(OPERATIONS, DISKS), "disks", 12))
def test_a_disk_that_fails(disk: Path, name: str, fault: str) -> None:
    assert run(disk / "store", OPERATIONS[name], DISKS[fault](disk)) == []


@pytest.mark.parametrize(("name", "world"), some(itertools.product(OPERATIONS, WORLDS), "worlds", 8))
def test_a_world_that_changes(tmp_path: Path, name: str, world: str) -> None:
    assert run(tmp_path / "store", OPERATIONS[name], WORLDS[world](tmp_path / "store")) == []


@runs
async def test_a_lock_that_cannot_be_removed_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, unlink = Server(tmp_path), Path.unlink

    def refuse(path: Path, **options: bool) -> None:
        if path.suffix == ".fetch":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path, **options)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "unlink", refuse)
        await server.load("sql")
    (lock,) = server.store.layout.folder("locks").glob("*.fetch")
    async with asyncio.timeout(10), fetch_lock(lock, timeout_s=600):
        assert lock.exists()
    assert not lock.exists()


@runs
async def test_a_disk_read_only_during_a_fetch_keeps_nobody(disk: Path) -> None:
    """The holder of the lock has the file open, as where the kernel finds an error on the disk."""
    server = Server(disk / "store")
    server.source.while_fetching = partial(make_read_only_below_open_files, disk)
    try:
        with pytest.raises(SourceUnavailable, match="Read-only"):
            await server.load("sql")
        (lock,) = server.store.layout.folder("locks").glob("*.fetch")
    finally:
        subprocess.run(["umount", disk], check=True)
    server.source.while_fetching = lambda: None
    async with asyncio.timeout(10):
        await Server(disk / "store").load("sql")
    assert not lock.exists()
    server.store.processes.on_beat()
    assert server.store.layout.temporaries() == []


def make_read_only_below_open_files(disk: Path) -> None:
    """Mount the disk read-only over itself: the kernel takes no disk with open files as read-only."""
    for options in (["--bind", disk], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *options, disk], check=True)


@runs
async def test_what_a_cleaner_removes_is_back_at_the_next_beat(tmp_path: Path) -> None:
    server, other = Server(tmp_path), Store(tmp_path)
    await server.push("old", OLD)
    digest = server.lifecycle.registry.require("old").digest
    with removed(tmp_path):
        other.layout.make_again()  # before this server does
    server.store.processes.on_beat()
    assert not other.remove(digest), "it is the only copy of what was pushed"
    with removed(tmp_path):
        pass
    server.store.processes.on_beat()
    await server.push("policy", NEXT)
    await server.lifecycle.unload("policy", block=True)


@runs
async def test_a_list_that_cannot_be_read_now_is_there_later(tmp_path: Path) -> None:
    server = Server(tmp_path)
    await server.reconciler.start()
    await server.push("old", OLD)
    restarted = Server(tmp_path)
    with Calls(tmp_path / ".served", errno.EIO, 1, LASTING), pytest.raises(SourceUnavailable, match="Input/output"):
        await restarted.reconciler.start()
    await asyncio.sleep(5)
    assert await of_next_start(tmp_path, OPERATIONS["pin"]) == []


def test_a_start_takes_the_inodes_that_dead_processes_have_left(disk: Path) -> None:
    """As after a crash: each served name has left a lease, and each fetch a directory."""
    code = "import os, sys; from pathlib import Path; from lora_plugins.store.store import Store; "
    code += "it = Store(Path(sys.argv[1])); me = it.processes.me(); "
    code += "[it.layout.new_temporary(me).mkdir() for _ in 'abc']; os._exit(0)"
    subprocess.run([sys.executable, "-c", code, disk / "store"], check=True)
    with full(disk, 0):
        assert not Store(disk / "store").layout.temporaries()
        (disk / "others" / "more").mkdir()
        fill(disk / "others" / "more", 0)
        with pytest.raises(InvalidSettings, match="free space or inodes"):
            open_store(Settings(store_dir=disk / "store"))
