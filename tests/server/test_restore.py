"""What a server serves from its start, and what it writes down for the next one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from lora_plugins.errors import IncompatibleAdapter, SourceUnavailable
from lora_plugins.server import restore
from lora_plugins.server.restore import Restore
from lora_plugins.server.served_file import ServedFile, ServedName
from lora_plugins.settings import Settings
from tests.server.test_swapping import load_in_place
from tests.server.world import Request, Version, World, serving
from tests.virtual_time import runs

LONGEST_S = 240.0  # for what comes for certain


@pytest.fixture(autouse=True)
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "_WRITE_DELAY_S", 0.01)


def world_with(*names: str) -> World:
    world = World()
    world.resolver.has |= {name: Version(name) for name in names}
    return world


@runs
async def test_preloaded_names_are_served_and_written(tmp_path: Path) -> None:
    world, file = world_with("sql", "chat"), ServedFile(tmp_path / "served.json")
    await Restore(world.lifecycle, Settings(preload=("sql", "chat")), file).run()
    assert await world.ask("sql") == "/store/sql"
    await asyncio.sleep(0.1)
    assert file.read() == [ServedName("sql"), ServedName("chat")]


@runs
async def test_an_adapter_that_fails_does_not_stop_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = world_with("sql")
    world.resolver.has |= {"broken": IncompatibleAdapter("rank 99"), "down": SourceUnavailable("no answer")}
    names = ("broken", "../x", "nobody", "down", "base", "sql")
    with caplog.at_level(logging.INFO, "vllm.lora_plugins"):
        await Restore(world.lifecycle, Settings(preload=names), ServedFile(tmp_path / "served.json")).run()
    assert [served.name for served in world.lifecycle.registry.all()] == ["sql"]
    assert sum("is not served from the start" in line for line in caplog.messages) == 5
    assert "1 of 6 adapters are served from the start" in caplog.text


@runs
async def test_what_was_served_is_served_again_if_asked(tmp_path: Path) -> None:
    file = ServedFile(tmp_path / "served.json")
    first = World(slots=3)
    await Restore(first.lifecycle, Settings(), file).run()
    await serving(first, "aa" * 32, "bb" * 32)
    await first.lifecycle.roll_back("sql")
    first.resolver.has["s3://b/x"] = Version("cc")
    await first.lifecycle.load("by-uri", "s3://b/x")
    await first.lifecycle.pin("by-uri")
    first.table.lora_requests["by-hub-id"] = Request("by-hub-id", 99, "org/adapter")
    await asyncio.sleep(0.1)
    assert [one.name for one in file.read()] == ["sql", "by-uri"]

    again = World(slots=3)
    again.resolver.has |= {"sql": Version("bb" * 32), "s3://b/x": Version("cc")}
    again.resolver.versions["aa" * 32] = Version("aa" * 32)
    await Restore(again.lifecycle, Settings(), ServedFile(tmp_path / "other.json")).run()
    assert again.lifecycle.registry.all() == [], "not asked to"
    await Restore(again.lifecycle, Settings(restore=True), file).run()
    sql, by_uri = again.lifecycle.registry.get("sql"), again.lifecycle.registry.get("by-uri")
    assert sql is not None
    assert by_uri is not None
    assert (await again.ask("sql"), sql.held_digest) == (f"/store/{'aa' * 32}", "aa" * 32)
    assert (by_uri.uri, by_uri.is_pinned) == ("s3://b/x", True)


@pytest.mark.parametrize(
    ("has_store", "lies_there", "served"),
    [(True, "bb" * 32, "aa" * 32), (True, None, "aa" * 32), (False, "aa" * 32, "aa" * 32), (False, "bb" * 32, None)],
)
@runs
async def test_what_was_loaded_by_its_path_is_restored(
    tmp_path: Path, has_store: bool, lies_there: str | None, served: str | None
) -> None:
    file, old, name = ServedFile(tmp_path / "served.json"), "aa" * 32, "any name: at all"
    first = World()
    await Restore(first.lifecycle, Settings(), file).run()
    first.resolver.has["/by/hand"] = Version(old)
    assert await load_in_place(first, name, "/by/hand")
    first.lifecycle.on_change()
    await asyncio.sleep(0.1)
    assert file.read() == [ServedName(name, "/by/hand", old)]

    again = World()
    again.resolver.versions |= {old: Version(old)} if has_store else {}
    again.resolver.has |= {"/by/hand": Version(lies_there)} if lies_there else {}
    await Restore(again.lifecycle, Settings(restore=True), file).run()
    adapter = again.lifecycle.registry.get(name)
    assert (adapter and adapter.held_digest, adapter and adapter.given_path) == (served, served and "/by/hand")


@runs
async def test_a_name_given_at_start_is_not_restored(tmp_path: Path) -> None:
    """`--lora-modules` has the files that lie at its path now."""
    file, world = ServedFile(tmp_path / "served.json"), World()
    file.write([ServedName("sql", "/by/hand", "aa" * 32)])
    world.resolver.versions["aa" * 32] = Version("aa" * 32)
    world.resolver.has["/by/hand"] = Version("bb" * 32)
    await load_in_place(world, "sql", "/by/hand")
    await Restore(world.lifecycle, Settings(restore=True), file).run()
    assert await world.ask("sql") == f"/store/{'bb' * 32}"


@runs
async def test_a_rollback_holds_where_the_source_has_that_version(tmp_path: Path) -> None:
    """A trainer has published the old version again: the name stays at it all the same."""
    file, old = ServedFile(tmp_path / "served.json"), "aa" * 32
    file.write([ServedName("sql", held_digest=old)])
    world = World()
    world.resolver.has["sql"] = Version(old)
    await Restore(world.lifecycle, Settings(restore=True), file).run()
    sql = world.lifecycle.registry.get("sql")
    assert sql is not None
    assert sql.held_digest == old
    world.resolver.has["sql"] = Version("bb" * 32)
    await world.lifecycle.poll("sql")
    assert await world.ask("sql") == f"/store/{old}"


@runs
async def test_a_version_served_by_its_digest_is_restored(
    tmp_path: Path,
) -> None:
    file, old, new = ServedFile(tmp_path / "served.json"), "aa" * 32, "bb" * 32
    name = f"sql@{old[:12]}"
    first = World()
    await Restore(first.lifecycle, Settings(), file).run()
    await serving(first, old, new)
    assert await first.lifecycle.load_version(name)
    await first.lifecycle.unload("sql", block=False, timeout_s=1)
    while [one.name for one in file.read()] != [name]:
        await asyncio.sleep(0.005)

    again = World()
    again.resolver.versions |= {old: Version(old), new: Version(new)}
    await Restore(again.lifecycle, Settings(restore=True), file).run()
    served = again.lifecycle.registry.get(name)
    assert served is not None
    assert (await again.ask(name), served.held_digest) == (f"/store/{old}", old)
    assert again.resolver.needed == {(name, old)}
    assert again.resolver.asked == [], "no source has a name like this"


@runs
async def test_an_adapter_of_an_unavailable_source_stays_in_the_file(tmp_path: Path) -> None:
    file, world = ServedFile(tmp_path / "served.json"), world_with("chat")
    down = ServedName("sql", "s3://b/x", "aa" * 32, is_pinned=True)
    file.write([down, ServedName("gone"), ServedName("chat")])
    world.resolver.has["s3://b/x"] = SourceUnavailable("no answer")
    await Restore(world.lifecycle, Settings(restore=True), file).run()
    await asyncio.sleep(0.1)
    assert file.read() == [ServedName("chat"), down]
    world.resolver.has["sql"] = Version("bb")
    await world.lifecycle.load("sql")
    await asyncio.sleep(0.1)
    assert file.read() == [ServedName("chat"), ServedName("sql")], "what is served now is what counts"


@runs
async def test_an_unavailable_source_is_retried_until_it_answers(tmp_path: Path) -> None:
    file, world = ServedFile(tmp_path / "served.json"), World()
    file.write([ServedName("sql", is_pinned=True), ServedName("broken"), ServedName("taken"), ServedName("never")])
    for name in ("sql", "broken", "taken", "never"):
        world.resolver.has[name] = SourceUnavailable("no answer")
    start = Restore(world.lifecycle, Settings(restore=True), file)
    await start.run()
    trying = asyncio.create_task(start.retry_deferred())
    await asyncio.sleep(100)
    assert world.lifecycle.registry.all() == []
    world.resolver.has |= {"sql": Version("sql"), "broken": IncompatibleAdapter("rank 99"), "taken": Version("new")}
    taken, _ = await world.lifecycle.load("taken")
    await world.lifecycle.unload("never", timeout_s=1, block=True)
    asked = len(world.resolver.asked)
    await asyncio.wait_for(trying, 100)
    served = world.lifecycle.registry.get("sql")
    assert served is not None
    assert served.is_pinned
    assert world.lifecycle.registry.get("taken") is taken
    assert sorted(world.resolver.asked[asked:]) == ["broken", "sql"]
    await asyncio.sleep(0.1)
    assert file.read() == [ServedName("taken"), ServedName("sql", is_pinned=True)]


@runs
async def test_a_version_that_has_left_the_store_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, digest = ServedFile(tmp_path / "served.json"), "aa" * 32
    file.write([ServedName(f"sql@{digest[:12]}", held_digest=digest), ServedName("chat")])
    world = world_with("chat")
    await Restore(world.lifecycle, Settings(restore=True), file).run()
    assert [served.name for served in world.lifecycle.registry.all()] == ["chat"]
    assert "'sql@aaaaaaaaaaaa' is not served from the start: [L002]" in caplog.text


@runs
async def test_a_rolled_back_revision_is_asked_of_its_source(tmp_path: Path) -> None:
    """`sql@v3` is a name that a source has; only what names its digest is a version of another name."""
    file, old, new = ServedFile(tmp_path / "served.json"), "aa" * 32, "bb" * 32
    file.write([ServedName("sql@v3", held_digest=old), ServedName("sql@cccccccc", held_digest=old)])
    world = World()
    world.resolver.has |= {"sql@v3": Version(new), "sql@cccccccc": Version(new)}
    world.resolver.versions[old] = Version(old)
    await Restore(world.lifecycle, Settings(restore=True), file).run()
    assert sorted(world.resolver.asked) == ["sql@cccccccc", "sql@v3"]
    assert await world.ask("sql@v3") == f"/store/{old}"


@runs
async def test_a_disk_that_is_full_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    world = world_with("sql")
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        await Restore(world.lifecycle, Settings(preload=("sql",)), ServedFile(tmp_path / "file" / "x")).run()
        await asyncio.sleep(0.1)
    assert "cannot be written" in caplog.text
    assert await world.ask("sql") == "/store/sql"


class SlowFile(ServedFile):
    """A disk that keeps the first writer waiting until it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.writing = self.most_at_once = 0

    def write(self, served: Sequence[ServedName]) -> None:
        self.writing += 1
        self.most_at_once = max(self.most_at_once, self.writing)
        if not self.begun.is_set():
            self.begun.set()
            assert self.let_go.wait(LONGEST_S)
        super().write(served)
        self.writing -= 1


def test_a_change_during_a_write_is_written_afterwards(tmp_path: Path) -> None:
    file = SlowFile(tmp_path / "served.json")

    async def run() -> None:  # in real time, as a thread of its own waits for its disk
        world = world_with("sql", "chat")
        await Restore(world.lifecycle, Settings(preload=("sql",)), file).run()
        assert await asyncio.to_thread(file.begun.wait, LONGEST_S)
        await world.lifecycle.load("chat")
        await asyncio.sleep(0.1)  # ten times what a change waits for others; a second writer would have begun
        file.let_go.set()
        async with asyncio.timeout(LONGEST_S):
            while file.read() != [ServedName("sql"), ServedName("chat")]:
                await asyncio.sleep(0.005)

    asyncio.run(run())
    assert file.most_at_once == 1
