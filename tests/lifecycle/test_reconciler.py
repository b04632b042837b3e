"""What a server serves from its start, while the file that declares it changes and breaks, and what it writes down."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lora_plugins.errors import IncompatibleAdapter, InvalidSettings, LoRAPluginsError, OutOfMemory, SourceUnavailable
from lora_plugins.events import DeclaredFileInvalid, DeclaredSetReconciled, Events, NotServed, is_polling
from lora_plugins.lifecycle import reconciler, served_writer
from lora_plugins.lifecycle.reconciler import LOOK_INTERVAL_S, RETRY_S, Reconciler
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.lifecycle.served_file import Fields, ServedFile
from lora_plugins.settings import Settings
from tests.lifecycle.test_swapping import load_in_place
from tests.lifecycle.world import Request, Version, World
from tests.repetitions import times
from tests.virtual_time import VirtualTimeLoop, runs

LONGEST_S = 240.0  # for what comes for certain
OLD, NEW = "aa" * 32, "bb" * 32
BEFORE, NEWER, LOST = Version(OLD), Version(NEW), Version("cc" * 32)
PLACE = World().resolver.place_of(None)


@pytest.fixture(autouse=True)
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_writer, "_WRITE_DELAY_S", 0.01)


@pytest.fixture
def file(tmp_path: Path) -> ServedFile:
    """The list of what is served."""
    return ServedFile(tmp_path / "served.json")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of declared adapters."""
    return tmp_path / "adapters.yaml"


def reconciling(world: World, file: ServedFile, **settings: Any) -> Reconciler:
    return Reconciler(world.lifecycle, Settings(**settings), file, Events(world.tell))


async def started(world: World, file: ServedFile, **settings: Any) -> Reconciler:
    reconciler = reconciling(world, file, **settings)
    await reconciler.start()
    return reconciler


def listed(file: ServedFile, *adapters: DesiredAdapter) -> None:
    """Write the list of the last server."""
    ServedFile(file.path).write(map(astuple, adapters))


def world_with(*names: str) -> World:
    return World({name: name for name in names})


@runs
async def test_the_served_list_gives_garbage_collection_no_work(tmp_path: Path) -> None:
    class Watched(ServedFile):
        is_watched, tracked = False, -1

        def write(self, served: Iterable[Fields]) -> None:
            if self.is_watched:
                gc.collect()
                self.tracked = sum(isinstance(one, DesiredAdapter) for one in gc.get_objects())
            super().write(served)

    names = [f"sql-{number}" for number in range(300)]
    world, file = world_with(*names), Watched(tmp_path / "served.json")
    await started(world, file)
    for name in names[1:]:
        await world.lifecycle.load(name)
    await asyncio.sleep(1)
    file.is_watched = True
    await world.lifecycle.load(names[0])
    await asyncio.sleep(1)
    assert {it.name for it in file.read()} == {*names}
    assert 0 <= file.tracked < 10


@runs
async def test_the_server_itself_asks_for_names_of_the_start(file: ServedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    world, by_itself = world_with("sql"), []
    latest = world.resolver.latest

    async def seen(*asked: Any) -> Any:
        by_itself.append(is_polling())
        return await latest(*asked)

    monkeypatch.setattr(world.resolver, "latest", seen)
    await started(world, file, preload=("sql",))
    await world.resolver.resolve("chat", "/base")
    assert by_itself == [True, False]


@runs
async def test_an_adapter_that_fails_does_not_stop_the_others(file: ServedFile, caplog: Any) -> None:
    world = world_with("sql")
    world.resolver.has |= {"broken": IncompatibleAdapter("rank 99"), "down": SourceUnavailable("no answer")}
    world.resolver.has["odd"] = ZeroDivisionError()
    names = ("broken", "../x", "nobody", "down", "base", "odd", "sql")
    with caplog.at_level(logging.INFO, "vllm.lora_plugins"):
        await started(world, file, preload=names)
    assert list(served(world)) == ["sql"]
    assert sum("is not served from the start" in line for line in caplog.messages) == 6
    assert "1 of 7 adapters are served from the start" in caplog.text
    assert "[L000] adapter 'odd': found an unexpected ZeroDivisionError" in caplog.text


@runs
async def test_what_was_served_is_served_again_if_asked(file: ServedFile, tmp_path: Path) -> None:
    first = World(slots=3)
    await started(first, file)
    await first.serve(OLD, NEW)
    await first.lifecycle.roll_back("sql")
    first.resolver.has["s3://b/x"] = Version("cc")
    await first.lifecycle.load("by-uri", "s3://b/x")
    await first.lifecycle.pin("by-uri")
    first.table.lora_requests["by-hub-id"] = Request("by-hub-id", 99, "org/adapter")
    await asyncio.sleep(0.1)
    assert [one.name for one in file.read()] == ["sql", "by-uri"]

    again = World({"sql": NEW, "s3://b/x": "cc"}, slots=3)
    again.resolver.versions |= {OLD: Version(OLD), "cc": Version("cc")}
    await started(again, ServedFile(tmp_path / "other.json"))
    assert again.lifecycle.registry.all() == [], "not asked to"
    await started(again, file, restore="1")
    sql, by_uri = map(again.lifecycle.registry.require, ("sql", "by-uri"))
    assert (await again.ask("sql"), sql.held_digest) == (f"/store/{OLD}", OLD)
    assert (by_uri.uri, by_uri.is_pinned) == ("s3://b/x", True)


@pytest.mark.parametrize(
    ("has_store", "lies_there", "served"), [(True, NEW, OLD), (True, None, OLD), (False, OLD, OLD), (False, NEW, None)]
)
@runs
async def test_what_was_loaded_by_its_path_is_restored(
    file: ServedFile, has_store: bool, lies_there: str | None, served: str | None
) -> None:
    name = "any name: at all"
    first = World()
    await started(first, file)
    first.resolver.has["/by/hand"] = Version(OLD)
    assert await load_in_place(first, name, "/by/hand")
    first.lifecycle.server.on_change()
    await asyncio.sleep(0.1)
    assert file.read() == [DesiredAdapter(name, "/by/hand", OLD)]

    again = World({"/by/hand": lies_there} if lies_there else {})
    again.resolver.versions |= {OLD: Version(OLD)} if has_store else {}
    await started(again, file, restore="1")
    adapter = again.lifecycle.registry.get(name)
    assert (adapter and adapter.held_digest, adapter and adapter.given_path) == (served, served and "/by/hand")


async def restored(
    file: ServedFile, at_source: Version | LoRAPluginsError | None, *, place: str = PLACE, hung: Iterable[str] = ()
) -> tuple[World, Reconciler]:
    """A started server, after one that served `sql` and `lost`, in a store that has lost the second."""
    lists = {"sql": BEFORE.digest, "lost": LOST.digest}
    listed(file, *(DesiredAdapter(name, last_digest=it, last_place=place) for name, it in lists.items()))
    world = World({} if at_source is None else {"sql": at_source, "lost": at_source})
    world.resolver.versions[BEFORE.digest] = BEFORE
    world.resolver.hung |= set(hung)
    async with asyncio.timeout(1):
        return world, await started(world, file, restore="1")


@runs
async def test_an_outage_takes_no_restored_adapter_away(file: ServedFile) -> None:
    world, start = await restored(file, SourceUnavailable("no answer"))
    assert world.resolver.asked == [], "the server is ready before a source is asked"
    assert served(world) == {"sql": BEFORE.digest}
    following = asyncio.create_task(start.follow())
    await asyncio.sleep(1)
    sql = world.lifecycle.registry.require("sql")
    assert sql.last_error is not None, "the outage shows"
    assert served(world) == {"sql": BEFORE.digest}
    world.resolver.has |= {"sql": NEWER, "lost": NEWER}
    await asyncio.wait_for(following, 2 * RETRY_S + 10)
    assert served(world) == {"sql": NEWER.digest, "lost": NEWER.digest}
    assert world.lifecycle.registry.require("sql").last_error is None


@runs
async def test_a_source_that_hangs_holds_back_no_start(file: ServedFile) -> None:
    world, start = await restored(file, NEWER, hung=("sql", "lost"))
    following = asyncio.create_task(start.follow())
    await asyncio.sleep(100)
    assert await asyncio.wait_for(world.ask("sql"), 10) == f"/store/{BEFORE.digest}"
    world.resolver.hung.clear()
    await asyncio.wait_for(following, 2 * RETRY_S)
    assert served(world) == {"sql": NEWER.digest, "lost": NEWER.digest}


@runs
async def test_what_came_from_elsewhere_is_not_restored(file: ServedFile) -> None:
    """The operator has named another bucket: what the old one had is not what the name says now."""
    world, start = await restored(file, NEWER, place="s3 (s3://before)")
    assert served(world) == {}
    await asyncio.wait_for(start.follow(), 2 * RETRY_S)
    assert served(world) == {"sql": NEWER.digest, "lost": NEWER.digest}


@runs
async def test_a_restored_name_gone_from_its_source_is_unloaded(file: ServedFile) -> None:
    world, start = await restored(file, None)
    assert served(world) == {"sql": BEFORE.digest}
    await asyncio.sleep(1)
    (written, lost) = file.read()
    assert (written.name, written.last_digest, written.last_place) == ("sql", BEFORE.digest, PLACE)
    assert lost.name == "lost"
    await asyncio.wait_for(start.follow(), 2 * RETRY_S)
    await asyncio.sleep(1)
    assert (served(world), file.read()) == ({}, [])


@runs
async def test_what_a_request_has_fetched_is_not_asked_again(file: ServedFile) -> None:
    """Its source had the adapter after the start: a removal then unloads no served name, as at any other time."""
    world, start = await restored(file, BEFORE)
    assert served(world) == {"sql": BEFORE.digest}, "the store has lost the other's version"
    world.resolver.has["lost"] = LOST
    world.resolver.hung.add("lost")
    asking = asyncio.create_task(world.lifecycle.resolve("lost"))
    await asyncio.sleep(0.1)
    following = asyncio.create_task(start.follow())
    await asyncio.sleep(1)
    world.resolver.hung.clear()
    assert (await asking).lora_path == f"/store/{LOST.digest}"
    await asyncio.sleep(1)
    del world.resolver.has["lost"]
    await asyncio.wait_for(following, 2 * RETRY_S)
    await asyncio.sleep(1)
    assert served(world) == {"sql": BEFORE.digest, "lost": LOST.digest}


@runs
async def test_what_is_pushed_as_its_source_says_gone_stays(file: ServedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unload waited for the lock behind the push, and took the answered push away."""
    world, start = await restored(file, None)

    async def pushed(*_: object) -> Version:
        await asyncio.sleep(0.1)
        world.resolver.needed.add(("sql", "pushed"))
        return Version("pushed")

    monkeypatch.setattr(world.resolver, "pushed", pushed)
    world.resolver.hung.add("sql")
    following = asyncio.create_task(start.follow())
    await asyncio.sleep(0.1)
    push = asyncio.create_task(world.lifecycle.take("sql", SimpleNamespace(name="sql")))
    await asyncio.sleep(0.1)
    world.resolver.hung.clear()
    await asyncio.gather(push, following)
    await asyncio.sleep(1)
    assert served(world) == {"sql": "pushed"}


@runs
async def test_a_name_given_at_start_keeps_its_pin_alone(file: ServedFile) -> None:
    """`--lora-modules` has the files that lie at its path now."""
    world = World()
    listed(file, DesiredAdapter("sql", "/by/hand", OLD, is_pinned=True))
    world.resolver.versions[OLD] = Version(OLD)
    world.resolver.has["/by/hand"] = Version(NEW)
    await load_in_place(world, "sql", "/by/hand")
    await started(world, file, restore="1")
    assert await world.ask("sql") == f"/store/{NEW}"
    assert world.lifecycle.registry.require("sql").is_pinned


@runs
async def test_a_refresh_to_the_same_version_ends_a_rollback(file: ServedFile) -> None:
    """The source itself went back: the version stays, and is fixed no longer, after a restart too."""
    world = World()
    await started(world, file)
    await world.serve(OLD, NEW)
    await world.lifecycle.roll_back("sql")
    await asyncio.sleep(0.1)
    world.resolver.has["sql"] = Version(OLD, source="s3")
    assert not (await world.lifecycle.refresh("sql")).is_swap
    await asyncio.sleep(0.1)
    assert [(it.held_digest, it.last_digest) for it in file.read()] == [(None, OLD)]


@runs
async def test_a_version_found_elsewhere_is_written_down_so(file: ServedFile) -> None:
    world = World()
    await started(world, file)
    await world.serve(OLD)
    await asyncio.sleep(0.1)
    (before,) = file.read()
    world.resolver.has["sql"] = Version(OLD, source="pushed")
    await world.lifecycle.poll("sql")
    await asyncio.sleep(0.1)
    (after,) = file.read()
    assert (before.last_place, after.last_place) == (PLACE, "")


@runs
async def test_without_restore_only_a_rollback_at_its_source_lasts(file: ServedFile) -> None:
    first = World(slots=3)
    await started(first, file)
    await first.serve(OLD, NEW)
    assert await first.lifecycle.load_version(f"sql@{OLD[:12]}")
    await first.lifecycle.roll_back("sql")
    first.resolver.has |= {"chat": Version("cc"), "pushed": Version("dd" * 32, source="pushed")}
    await first.lifecycle.load("chat")
    await first.lifecycle.take("pushed", SimpleNamespace(name="pushed"))
    while {one.name for one in file.read()} != {"sql", f"sql@{OLD[:12]}", "chat", "pushed"}:
        await asyncio.sleep(0.005)

    again = World({"sql": NEW}, slots=3)
    again.resolver.versions |= first.resolver.versions
    await started(again, file)
    assert served(again) == {"sql": OLD}
    await again.lifecycle.poll("sql")
    assert served(again) == {"sql": OLD}

    elsewhere = World()
    elsewhere.resolver.versions |= first.resolver.versions
    listed(file, *(replace(one, last_place="s3 (s3://another)") for one in file.read()))
    await started(elsewhere, file)
    assert served(elsewhere) == {}, "the name may mean another adapter there"


@runs
async def test_a_list_of_rollbacks_without_an_answer_is_a_warning(
    file: ServedFile, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_with("sql")
    file.path.mkdir()
    await started(world, file, preload=("sql",))
    assert [one.name for one in world.lifecycle.registry.all()] == ["sql"]
    assert "Rollbacks of the last server, if any, are forgotten" in caplog.text
    with pytest.raises(SourceUnavailable):
        await started(World(), file, restore="1")


@runs
async def test_a_version_served_by_its_digest_is_restored(file: ServedFile, caplog: Any) -> None:
    name = f"sql@{OLD[:12]}"
    first = World()
    await started(first, file)
    await first.serve(OLD, NEW)
    assert await first.lifecycle.load_version(name)
    await first.lifecycle.unload("sql", block=False, timeout_s=1)
    while [one.name for one in file.read()] != [name]:
        await asyncio.sleep(0.005)

    lost = World()
    await started(lost, file, restore="1")
    assert served(lost) == {}
    assert "'sql@aaaaaaaaaaaa' is not served from the start: [L002]" in caplog.text

    again = World()
    again.resolver.versions |= {OLD: Version(OLD), NEW: Version(NEW)}
    await started(again, file, restore="1")
    assert (await again.ask(name), again.lifecycle.registry.require(name).held_digest) == (f"/store/{OLD}", OLD)
    assert again.resolver.needed == {(name, OLD)}
    assert again.resolver.asked == [], "no source has a name like this"


@runs
async def test_what_an_outage_outlives_is_waited_for_no_more(file: ServedFile) -> None:
    world, start = await restored(file, SourceUnavailable("no answer"))
    following = asyncio.create_task(start.follow())
    await asyncio.sleep(101)  # the source has not answered
    await world.lifecycle.unload("sql", timeout_s=1, block=False)
    world.resolver.has["lost"] = Version("new")
    await asyncio.wait_for(following, 200)
    assert served(world) == {"lost": "new"}


@pytest.mark.parametrize("fault", [SourceUnavailable, OutOfMemory, LoRAPluginsError])
@runs
async def test_what_a_fault_keeps_away_stays_in_the_file(file: ServedFile, fault: type[LoRAPluginsError]) -> None:
    world = world_with("chat")
    down = DesiredAdapter("sql", "s3://b/x", OLD, is_pinned=True)
    listed(file, down, DesiredAdapter("gone"), DesiredAdapter("chat"))
    world.resolver.has["s3://b/x"] = fault("no answer")
    await started(world, file, restore="1")
    await asyncio.sleep(0.1)
    assert file.read() == [DesiredAdapter("chat"), down]
    world.resolver.has["sql"] = Version("bb")
    await world.lifecycle.load("sql")
    await asyncio.sleep(0.1)
    assert file.read() == [DesiredAdapter("chat"), DesiredAdapter("sql")], "what is served now is what counts"


@runs
async def test_an_unavailable_source_is_retried_until_it_answers(file: ServedFile) -> None:
    names = ("sql", "broken", "taken", "never")
    world = World({name: SourceUnavailable("no answer") for name in names})
    listed(file, *(DesiredAdapter(name, is_pinned=name == "sql") for name in names))
    start = await started(world, file, restore="1")
    trying = asyncio.create_task(start.follow())
    await asyncio.sleep(101)  # between two tries
    assert world.lifecycle.registry.all() == []
    world.resolver.has |= {"sql": Version("sql"), "broken": IncompatibleAdapter("rank 99"), "taken": Version("new")}
    taken = await world.load("taken")
    await world.lifecycle.unload("never", timeout_s=1, block=True)
    asked = len(world.resolver.asked)
    await asyncio.wait_for(trying, 100)
    assert world.lifecycle.registry.require("sql").is_pinned
    assert world.lifecycle.registry.get("taken") is taken
    assert sorted(world.resolver.asked[asked:]) == ["broken", "sql"]
    await asyncio.sleep(0.1)
    assert file.read() == [DesiredAdapter("taken"), DesiredAdapter("sql", is_pinned=True)]


@runs
async def test_a_rolled_back_revision_is_asked_of_its_source(file: ServedFile) -> None:
    """`sql@v3` is a name that a source has; only what names its digest is a version of another name."""
    listed(file, *(DesiredAdapter(name, held_digest=OLD) for name in ("sql@v3", "sql@cccccccc")))
    world = World({"sql@v3": NEW, "sql@cccccccc": NEW})
    world.resolver.versions[OLD] = Version(OLD)
    await started(world, file, restore="1")
    assert await world.ask("sql@v3") == f"/store/{OLD}", "from the store, though its source has another by now"

    again = World({"sql@v3": OLD, "sql@cccccccc": NEW})  # whose store has lost it
    await started(again, file, restore="1")
    assert sorted(again.resolver.asked) == ["sql@cccccccc", "sql@v3"]
    assert served(again) == {"sql@v3": OLD}
    again.resolver.has["sql@v3"] = Version(NEW)
    await again.lifecycle.poll("sql@v3")
    assert served(again) == {"sql@v3": OLD}, "a trainer had published the old version again: the name stays at it"


@runs
async def test_one_deadline_ends_the_wait_for_all_preloads(file: ServedFile, caplog: pytest.LogCaptureFixture) -> None:
    world, names = world_with("sql"), tuple(f"away-{number}" for number in range(20))
    world.resolver.hung |= set(names)
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        async with asyncio.timeout(1000):
            start = await started(world, file, preload=("sql", *names), fetch_timeout_s=50)
    assert asyncio.get_running_loop().time() == pytest.approx(50, abs=1)
    assert "20 adapters are not loaded after 50 s" in caplog.text
    assert list(served(world)) == ["sql"]
    following = asyncio.create_task(start.follow())
    await asyncio.sleep(1)
    world.resolver.has |= {name: Version(name) for name in names}
    world.resolver.hung.clear()
    await asyncio.sleep(30)
    assert len(served(world)) == 21, "the server has gone on with them"
    following.cancel()


@runs
async def test_a_change_on_a_full_disk_is_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No later change need come: a kill a second after the disk has room again loses nothing."""
    folder = tmp_path / "file"
    folder.touch()
    world, file = world_with("sql"), ServedFile(folder / "served.json")
    with caplog.at_level(logging.INFO, "vllm.lora_plugins"):
        await started(world, file, preload=("sql",))
        await asyncio.sleep(10)
        folder.unlink()
        folder.mkdir()
        await asyncio.sleep(1)
    assert file.read() == [DesiredAdapter("sql")]
    assert [text for text in caplog.messages if "written to" in text] == [
        f"What is served cannot be written to {file.path}: [Errno 17] File exists: '{folder}'",
        f"What is served is written to {file.path} again",
    ]


def test_fetches_in_every_thread_delay_no_write(file: ServedFile) -> None:
    ends = threading.Event()

    async def run() -> None:  # in real time, with real threads
        world = world_with("sql")
        await started(world, file, preload=("sql",))
        fetching = [asyncio.create_task(asyncio.to_thread(ends.wait, LONGEST_S)) for _ in range(64)]
        try:
            await world.lifecycle.pin("sql")
            async with asyncio.timeout(LONGEST_S / 2):
                while file.read() != [DesiredAdapter("sql", is_pinned=True)]:
                    await asyncio.sleep(0.005)
        finally:
            ends.set()
            await asyncio.gather(*fetching)

    asyncio.run(run())


@runs
async def test_a_slow_disk_delays_the_next_write_by_no_more(file: ServedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause after a write follows the processor's time of the write, not the time on the clock."""
    world = world_with("sql", "chat")
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    write = file.write

    def slowly(served: Iterable[Fields]) -> None:
        loop.now += 0.3
        write(served)

    monkeypatch.setattr(file, "write", slowly)
    await started(world, file, preload=("sql",))
    await asyncio.sleep(10)
    await world.lifecycle.pin("sql")
    await asyncio.sleep(0.1)
    await world.lifecycle.load("chat")
    await asyncio.sleep(1)
    assert len(file.read()) == 2


@runs
async def test_a_kill_forgets_no_change_that_came_alone(file: ServedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is written at once; only those of a crowd wait for each other."""
    monkeypatch.setattr(served_writer, "_WRITE_DELAY_S", 0.5)
    world = world_with("sql", "chat")
    await started(world, file, preload=("sql",))
    await asyncio.sleep(1)
    await world.lifecycle.pin("sql")
    await asyncio.sleep(0.01)
    assert file.read() == [DesiredAdapter("sql", is_pinned=True)]
    await world.lifecycle.load("chat")
    await asyncio.sleep(0.01)
    assert len(file.read()) == 1
    await asyncio.sleep(0.5)
    assert len(file.read()) == 2


class SlowFile(ServedFile):
    """A disk that keeps the first writer waiting until it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.writing = self.most_at_once = 0

    def write(self, served: Iterable[Fields]) -> None:
        self.writing += 1
        self.most_at_once = max(self.most_at_once, self.writing)
        if not self.begun.is_set():
            self.begun.set()
            assert self.let_go.wait(LONGEST_S)
        super().write(served)
        self.writing -= 1


@runs
async def test_an_answered_change_of_a_long_list_is_written(file: ServedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause after a write that takes much of a processor holds back only changes that no call waits for."""
    world, thread_s = world_with("first", "second", "third"), itertools.count(step=0.1)
    monkeypatch.setattr(time, "thread_time", lambda: next(thread_s))
    await started(world, file)
    for number, name in enumerate(("first", "second", "third"), start=1):
        await world.lifecycle.load(name)
        await world.lifecycle.written()
        assert len(file.read()) == number


def test_a_change_during_a_write_is_written_afterwards(tmp_path: Path) -> None:
    file = SlowFile(tmp_path / "served.json")

    async def run() -> None:  # in real time, as a thread of its own waits for its disk
        world = world_with("sql", "chat")
        await started(world, file, preload=("sql",))
        assert await asyncio.to_thread(file.begun.wait, LONGEST_S)
        await world.lifecycle.load("chat")
        await asyncio.sleep(0.1)  # ten times what a change waits for others; a second writer would have begun
        file.let_go.set()
        async with asyncio.timeout(LONGEST_S):
            while file.read() != [DesiredAdapter("sql"), DesiredAdapter("chat")]:
                await asyncio.sleep(0.005)

    asyncio.run(run())
    assert file.most_at_once == 1


LOOKED_S = LOOK_INTERVAL_S * 2 + 1


def declare(path: Path, *entries: str) -> None:
    """Exchange the file, as a mounted ConfigMap does."""
    beside = path.with_suffix(".new")
    beside.write_text("adapters:\n" + "".join(f"  - {entry}\n" for entry in entries))
    beside.replace(path)


async def exchanged(path: Path, *entries: str) -> None:
    declare(path, *entries)
    await asyncio.sleep(LOOKED_S)


def declaring(world: World, path: Path, file: ServedFile | None = None) -> Reconciler:
    settings = Settings(adapters_file=path, allowed_uris=("s3://b",))
    return Reconciler(world.lifecycle, settings, file or ServedFile(path.with_suffix(".served")), Events(world.tell))


def errors(reconciler: Reconciler) -> dict[str, LoRAPluginsError | None]:
    assert reconciler.declared is not None
    return {name: target.error for name, target in reconciler.declared.items()}


@contextlib.asynccontextmanager
async def following(world: World, path: Path, file: ServedFile | None = None) -> AsyncIterator[Reconciler]:
    declared = declaring(world, path, file)
    await declared.start()
    task = asyncio.create_task(declared.follow())
    await asyncio.sleep(1)
    try:
        yield declared
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def served(world: World) -> dict[str, str]:
    return {one.name: one.request.lora_path.rpartition("/")[2] for one in world.lifecycle.registry.all()}


@runs
async def test_only_what_says_preload_is_waited_for(path: Path) -> None:
    world = World({"sql": "aa", "s3://b/chat": "bb"}, slots=3)
    declare(path, "{name: chat, uri: 's3://b/chat', pin: true}", "{name: sql, preload: true}")
    declared = declaring(world, path)
    await declared.start()
    assert served(world) == {"sql": "aa"}
    async with following(world, path):
        assert served(world) == {"sql": "aa", "chat": "bb"}
    assert world.lifecycle.registry.require("chat").is_pinned
    assert world.told[-1] == DeclaredSetReconciled(declared=2, served=2, failed=0)


@runs
async def test_changes_of_the_file_are_followed(path: Path) -> None:
    world = World({"sql": "aa", "chat": "cc", "s3://b/sql": "bb"}, slots=3)
    declare(path, "{name: sql, pin: true}", "{name: chat}")
    async with following(world, path):
        assert served(world) == {"sql": "aa", "chat": "cc"}
        await exchanged(path, "{name: sql, uri: 's3://b/sql'}")
        assert served(world) == {"sql": "bb"}, "swapped to another place; chat is unloaded"
        assert not world.lifecycle.registry.require("sql").is_pinned
        await exchanged(path, "{name: sql}")
        assert served(world) == {"sql": "aa"}, "back to what has its name"
        assert world.lifecycle.registry.require("sql").uri is None
        await exchanged(path)
        assert served(world) == {}
    await world.settled()
    assert world.resolver.leased == set()


@runs
async def test_a_source_that_hangs_delays_nobody_else(path: Path) -> None:
    world = World(slots=3)
    hung = [f"s3://b/{number}" for number in range(5)]
    world.resolver.hung |= set(hung)
    world.resolver.has |= {"sql": Version("aa"), "chat": Version("cc"), hung[0]: Version("dd"), hung[1]: Version("ee")}
    waiting = [f"{{name: n{number}, uri: '{uri}'}}" for number, uri in enumerate(hung)]
    declare(path, *waiting, "{name: sql}")
    async with following(world, path):
        assert served(world) == {"sql": "aa"}
        await exchanged(path, *waiting, "{name: chat}")
        assert served(world) == {"chat": "cc"}
        assert world.told[-1] == DeclaredSetReconciled(declared=6, served=1, failed=0)
        declare(path, waiting[0], "{name: n1}", "{name: chat}")
        world.resolver.has["n1"] = Version("ff")
        await asyncio.sleep(LOOKED_S)
        assert served(world) == {"chat": "cc", "n1": "ff"}, "another place is declared: the old one is not waited for"
        world.resolver.hung.clear()
        await asyncio.sleep(LOOKED_S)
        assert served(world) == {"chat": "cc", "n1": "ff", "n0": "dd"}
    await world.settled()


@runs
async def test_a_digest_is_served_and_held(path: Path) -> None:
    world = World({"sql": OLD}, slots=3)
    declare(path, f"{{name: sql, digest: '{OLD}'}}")
    async with following(world, path):
        world.resolver.has["sql"] = Version(NEW)
        await world.lifecycle.poll("sql")
        assert served(world) == {"sql": OLD}, "the poller leaves it"
        await exchanged(path, f"{{name: sql, digest: '{NEW}'}}")
        assert served(world) == {"sql": NEW}
        await exchanged(path, f"{{name: sql, digest: '{OLD}'}}")
        assert served(world) == {"sql": OLD}, "from the store, which still has it"


@runs
async def test_a_digest_from_elsewhere_is_asked_of_the_declared_place(path: Path) -> None:
    world = World(slots=3)
    world.resolver.versions[OLD] = Version(OLD, uri="s3://b/other")
    world.resolver.has["s3://b/sql"] = Version(NEW, uri="s3://b/sql")
    declare(path, f"{{name: sql, uri: 's3://b/sql', digest: '{OLD}', preload: true}}")
    async with following(world, path) as declared:
        assert served(world) == {}
        assert "the version bbbbbbbbbbbb at its source" in str(errors(declared)["sql"])
        assert world.resolver.leased == set()
        world.resolver.versions[OLD] = Version(OLD, uri="s3://b/sql")
        await asyncio.sleep(RETRY_S + LOOKED_S)
        assert served(world) == {"sql": OLD}, "a version that came from there, and is still in the store"


@runs
async def test_what_a_request_loads_may_still_fail(file: ServedFile, path: Path) -> None:
    """The file's adapter counted as served while a request's load of it was under way, and was not tried again."""
    world = world_with("sql")
    world.worker.delay_s, world.worker.broken = 1.0, SourceUnavailable("a worker cannot read it now")
    await world.lifecycle.resolve("sql")
    declare(path, "{name: sql, preload: true}")
    start = await started(world, file, adapters_file=path)
    assert isinstance(errors(start)["sql"], SourceUnavailable)


@runs
async def test_one_that_fails_is_told_once_and_tried_again(path: Path) -> None:
    world = World({"sql": SourceUnavailable("no answer"), "chat": "cc", "wide": "ww"})
    world.worker.broken, world.worker.broken_paths = IncompatibleAdapter("rank 99"), {"/store/ww"}
    declare(path, "{name: sql, preload: true}", "{name: chat}", "{name: wide}")
    async with following(world, path) as declared:
        await asyncio.sleep(4 * RETRY_S)
        assert served(world) == {"chat": "cc"}
        told = [(event.name, event.stage) for event in world.told if isinstance(event, NotServed)]
        assert told == [("sql", "declared"), ("wide", "declared")]
        world.resolver.has["sql"] = Version("aa")
        await asyncio.sleep(RETRY_S + LOOKED_S)
        assert served(world) == {"chat": "cc", "sql": "aa"}
        assert errors(declared)["sql"] is None
    assert world.told[-1] == DeclaredSetReconciled(declared=3, served=2, failed=1)


@runs
async def test_figures_are_told_when_they_change_and_only_then(path: Path) -> None:
    world = World({"sql": "aa"})
    declare(path, "{name: sql}", "{name: nobody}")
    async with following(world, path):
        await asyncio.sleep(6 * RETRY_S)
        await exchanged(path, "{name: sql}")
        declare(path)
        await asyncio.sleep(6 * RETRY_S)
    told = [event for event in world.told if isinstance(event, DeclaredSetReconciled)]
    assert told[0] == DeclaredSetReconciled(declared=2, served=0, failed=0)
    assert [(each.declared, each.served, each.failed) for each in told[1:]] == [(2, 1, 1), (1, 1, 0), (0, 0, 0)]


@pytest.mark.parametrize("broken", ["text", "missing", "unreadable"])
@runs
async def test_a_broken_file_leaves_what_runs(path: Path, broken: str) -> None:
    world = World({"sql": "aa"})
    declare(path, "{name: sql}")
    async with following(world, path) as declared:
        if broken == "text":
            path.write_text("adapters: [")
        else:
            path.unlink()
        if broken == "unreadable":
            path.mkdir()
        await asyncio.sleep(5 * LOOKED_S)
        assert served(world) == {"sql": "aa"}
        assert declared.file_error is not None
        assert sum(isinstance(event, DeclaredFileInvalid) for event in world.told) == 1
        if path.is_dir():
            os.rmdir(path)
        await exchanged(path, "{name: sql}")
        assert declared.file_error is None
        assert served(world) == {"sql": "aa"}
        assert world.resolver.asked == ["sql"], "nothing was loaded again"


@runs
async def test_what_an_administrator_does_stays_until_the_file_changes(path: Path) -> None:
    world = World({"sql": "aa", "chat": "cc"})
    declare(path, "{name: sql}", "{name: chat}")
    async with following(world, path):
        await world.lifecycle.unload("sql", block=True)
        await asyncio.sleep(4 * RETRY_S)
        assert served(world) == {"chat": "cc"}
        await exchanged(path, "{name: sql, preload: true}")  # preload alone changes nothing of a server that runs
        assert served(world) == {}


@runs
async def test_a_declared_name_is_not_restored(path: Path, file: ServedFile) -> None:
    world = World({"sql": "aa", "chat": "cc"}, slots=3)
    declare(path, "{name: sql}")
    listed(file, DesiredAdapter("sql", "s3://b/elsewhere"))
    await started(world, file, adapters_file=path, restore="1", preload=("sql",))
    assert served(world) == {}, "the file has it loaded in the background"
    async with following(world, path, file):
        assert served(world) == {"sql": "aa"}
        await world.lifecycle.load("chat")
        await asyncio.sleep(5)
        assert [one.name for one in file.read() if not one.was_declared] == ["chat"]


@pytest.mark.parametrize("is_later", [True, False])
@runs
async def test_a_rollback_lasts_until_a_later_list(path: Path, tmp_path: Path, is_later: bool) -> None:
    """Of another replica: a new one, or the same server at another port, begins with the lists of all."""
    world = World({"sql": NEW, "chat": NEW}, slots=3)
    world.resolver.versions[OLD] = Version(OLD)
    declare(path, "{name: chat}")
    one, other, ours = (ServedFile.of_store(tmp_path, "base", replica) for replica in ("one", "other", "ours"))
    one.path.parent.mkdir()
    place = next(iter(world.resolver.places))
    back = [DesiredAdapter(name, None, OLD, last_digest=OLD, last_place=place) for name in ("sql", "chat")]
    listed(one, back[0], replace(back[1], was_declared=True))
    newest = DesiredAdapter("sql", last_digest=NEW)
    listed(other, newest, replace(newest, name="chat", was_declared=True))
    os.utime((one if is_later else other).path, (time.time() - 60,) * 2)
    async with following(world, path, ours):
        await asyncio.sleep(LOOKED_S)
        assert served(world) == ({"chat": NEW} if is_later else {"sql": OLD, "chat": OLD})


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (("{name: sql}",), {"sql": OLD}),
        (("{name: sql}", "{name: chat}"), {"sql": OLD, "chat": "cc"}),
        ((f"{{name: sql, digest: {NEW}}}",), {"sql": NEW}),
        (("{name: sql, uri: 's3://b/sql'}",), {"sql": NEW}),
        (("{name: chat}",), {"chat": "cc"}),
    ],
)
@runs
async def test_a_rollback_of_a_declared_name_lasts_as_declared(
    path: Path, file: ServedFile, entries: tuple[str, ...], expected: dict[str, str]
) -> None:
    first = World({"sql": OLD, "s3://b/sql": NEW, "chat": "cc"}, slots=3)
    declare(path, "{name: sql}")
    async with following(first, path, file):
        first.resolver.has["sql"] = Version(NEW)
        await first.lifecycle.refresh("sql")
        await first.lifecycle.roll_back("sql")
        await asyncio.sleep(1)

    again = World(first.resolver.has, slots=3)
    again.resolver.versions |= first.resolver.versions
    declare(path, *entries)
    async with following(again, path, file):
        assert served(again) == expected
        if expected.get("sql") == OLD:
            await again.lifecycle.poll("sql")
            await exchanged(path, *entries, "{name: nobody}")  # another entry changes nothing
            assert served(again) == expected
            await exchanged(path, "{name: sql, uri: 's3://b/sql'}")
            assert served(again) == {"sql": NEW}


@runs
async def test_start_fails_on_a_wrong_file(path: Path) -> None:
    path.write_text("adapters: [{nam: sql}]")
    with pytest.raises(InvalidSettings, match="did you mean 'name'"):
        await declaring(World(), path).start()


def test_many_names_leave_others_their_turns(file: ServedFile) -> None:
    """Many that are begun to be served, and are written down: a turn of the loop for each 200."""
    count = times(20_000, short=4_000)
    listed(file, *(DesiredAdapter(f"open-{number}", "s3://b/hangs") for number in range(count)))

    async def run() -> tuple[int, int]:
        world, turns = World(), 0
        world.resolver.hung.add("s3://b/hangs")

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        one = reconciling(world, file, restore="1")
        tasks = [asyncio.create_task(one.start()), asyncio.create_task(turn())]
        while len(one._serving) < count:
            await asyncio.sleep(0)
        begun, turns = turns, 0
        assert len(asyncio.all_tasks()) < 20, "100,000 tasks make each garbage collection half a second long"
        assert len(await one._what_is_served()) == count
        collected = turns
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "who cancels the start cancels the rest"
        return begun, collected

    assert min(asyncio.run(run())) >= count / 200


def test_restored_names_to_ask_for_have_no_task(file: ServedFile) -> None:
    world, names = World(), [f"open-{number}" for number in range(200)]
    listed(file, *(DesiredAdapter(name, last_digest=BEFORE.digest, last_place=PLACE) for name in names))
    world.resolver.versions[BEFORE.digest] = BEFORE
    world.resolver.hung |= set(names)

    async def run() -> int:
        one = await started(world, file, restore="1")
        following = asyncio.create_task(one.follow())
        await asyncio.sleep(0.2)
        assert len(world.resolver.asked) == 4, "few at once, however many names"
        count = len(asyncio.all_tasks())
        following.cancel()
        await asyncio.wait([following])
        return count

    assert asyncio.run(run()) < 20


def test_a_large_file_that_changes_is_parsed_in_another_process(
    file: ServedFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(path, "{name: sql}")

    async def run() -> list[str]:
        one = await started(World(), file, adapters_file=path)
        monkeypatch.setattr(reconciler, "LOOK_INTERVAL_S", 0.01)
        monkeypatch.setattr(yaml, "safe_load", lambda _: pytest.fail("parsed in the server"))
        declare(path, *(f"{{name: sql-{number}}}" for number in range(1_000)))
        following = asyncio.create_task(one.follow())
        async with asyncio.timeout(LONGEST_S):
            while len(names := list(one.declared or {})) == 1:
                await asyncio.sleep(0.01)
        following.cancel()
        return names

    assert asyncio.run(run()) == [f"sql-{number}" for number in range(1_000)]


@runs
async def test_a_file_is_parsed_once_for_each_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether what it says can be right or not; not again at each look."""
    world, parsed, load = world_with("sql"), list[str](), yaml.safe_load
    monkeypatch.setattr(yaml, "safe_load", lambda content: (parsed.append(content.decode()), load(content))[1])
    changes = ("adapters: 7", "adapters: []", "adapters: 7", "adapters: [{name: sql}]", None, "adapters: 7")
    path.write_text("adapters: []")
    async with following(world, path) as declared:
        for text in changes:
            path.unlink() if text is None else path.write_text(text)
            await asyncio.sleep(5 * LOOK_INTERVAL_S)
            assert (declared.file_error is None) == (text not in ("adapters: 7", None))
    assert parsed == ["adapters: []", *(text for text in changes if text is not None)]
    told = sum(isinstance(event, DeclaredFileInvalid) for event in world.told)
    assert told == 4, "each time the file turned wrong"


@pytest.mark.parametrize("outage_s", [1.0, 4.5, 17.0, 33.3])
@runs
async def test_all_are_served_five_seconds_after_an_outage(path: Path, outage_s: float) -> None:
    """With what remembers a fault for each name: a failure in the last moment of the outage counts too."""
    names, loop = ("sql", "chat", "poet"), asyncio.get_running_loop()
    world, ends_at = world_with(*names), loop.time() + outage_s
    declare(path, *(f"{{name: {name}, preload: true}}" for name in names))
    asked = type(world.resolver).resolve
    failed: dict[str, float] = {}

    async def resolve(name: str, base_path: str) -> Version | None:
        if loop.time() < ends_at:
            await asyncio.sleep(0.4)
            failed[name] = loop.time()
        if loop.time() - failed.get(name, -99) < SourceUnavailable.retry_after_s:
            raise SourceUnavailable("no answer")
        return await asked(world.resolver, name, base_path)

    world.resolver.resolve = resolve
    async with following(world, path):
        await asyncio.sleep(max(0.0, ends_at - loop.time()) + 5)
        assert set(served(world)) == set(names)
