"""What a server serves from its start, and what it writes down for the next one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_plugins.endpoint_plugin import AdminPlugin
from lora_plugins.errors import IncompatibleAdapter, InvalidSettings, SourceUnavailable
from lora_plugins.plugin import register_admin
from lora_plugins.server import refresh as revalidation
from lora_plugins.server import restore as start_module
from lora_plugins.server.refresh import look_out
from lora_plugins.server.restore import Start
from lora_plugins.server.served_file import Remembered, ServedSet
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches import resolver as resolver_module
from tests.server.test_lifecycle import Request, Version, World, serving
from tests.virtual_time import runs

LONGEST_S = 240.0  # for what comes for certain


@pytest.fixture(autouse=True)
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_module, "_WRITE_DELAY_S", 0.01)


def world_with(*names: str) -> World:
    world = World()
    world.sources.has |= {name: Version(name) for name in names}
    return world


@runs
async def test_preloaded_names_are_served_and_written(tmp_path: Path) -> None:
    world, file = world_with("sql", "chat"), ServedSet(tmp_path / "served.json")
    await Start(world.changes, Settings(preload=("sql", "chat")), file).run()
    assert await world.ask("sql") == "/store/sql"
    await asyncio.sleep(0.1)
    assert file.read() == [Remembered("sql"), Remembered("chat")]


@runs
async def test_one_that_cannot_be_served_does_not_keep_the_others_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_with("sql")
    world.sources.has |= {"broken": IncompatibleAdapter("rank 99"), "down": SourceUnavailable("no answer")}
    names = ("broken", "../x", "nobody", "down", "base", "sql")
    with caplog.at_level(logging.INFO, "vllm.lora_plugins"):
        await Start(world.changes, Settings(preload=names), ServedSet(tmp_path / "served.json")).run()
    assert [served.name for served in world.changes.catalogue.all()] == ["sql"]
    assert sum("is not served from the start" in line for line in caplog.messages) == 5
    assert "1 of 6 adapters are served from the start" in caplog.text


@runs
async def test_what_was_served_is_served_again_if_asked(tmp_path: Path) -> None:
    file = ServedSet(tmp_path / "served.json")
    first = World(slots=3)
    await Start(first.changes, Settings(), file).run()
    await serving(first, "aa" * 32, "bb" * 32)
    await first.changes.rollback("sql")
    first.sources.has["s3://b/x"] = Version("cc")
    await first.changes.load("by-uri", "s3://b/x")
    await first.changes.pin("by-uri")
    first.table.lora_requests["by-path"] = Request("by-path", 99, "/by/hand")
    await asyncio.sleep(0.1)
    assert [one.name for one in file.read()] == ["sql", "by-uri"]

    again = World(slots=3)
    again.sources.has |= {"sql": Version("bb" * 32), "s3://b/x": Version("cc")}
    again.sources.store["aa" * 32] = Version("aa" * 32)
    await Start(again.changes, Settings(), ServedSet(tmp_path / "other.json")).run()
    assert again.changes.catalogue.all() == [], "not asked to"
    await Start(again.changes, Settings(restore=True), file).run()
    sql, by_uri = again.changes.catalogue.get("sql"), again.changes.catalogue.get("by-uri")
    assert sql is not None
    assert by_uri is not None
    assert (await again.ask("sql"), sql.held_digest) == (f"/store/{'aa' * 32}", "aa" * 32)
    assert (by_uri.uri, by_uri.is_pinned) == ("s3://b/x", True)


@runs
async def test_a_version_served_under_a_name_of_its_own_is_served_again_though_nobody_has_asked_for_the_plain_name(
    tmp_path: Path,
) -> None:
    file, old, new = ServedSet(tmp_path / "served.json"), "aa" * 32, "bb" * 32
    name = f"sql@{old[:12]}"
    first = World()
    await Start(first.changes, Settings(), file).run()
    await serving(first, old, new)
    assert await first.changes.load_version(name)
    await first.changes.unload("sql", block=False, timeout_s=1)
    while [one.name for one in file.read()] != [name]:
        await asyncio.sleep(0.005)

    again = World()
    again.sources.store |= {old: Version(old), new: Version(new)}
    await Start(again.changes, Settings(restore=True), file).run()
    served = again.changes.catalogue.get(name)
    assert served is not None
    assert (await again.ask(name), served.held_digest) == (f"/store/{old}", old)
    assert again.sources.needed == {(name, old)}
    assert again.sources.asked == [], "no source has a name like this"


@runs
async def test_what_a_source_could_not_say_at_the_start_is_remembered_for_the_next_one(tmp_path: Path) -> None:
    file, world = ServedSet(tmp_path / "served.json"), world_with("chat")
    down = Remembered("sql", "s3://b/x", "aa" * 32, is_pinned=True)
    file.write([down, Remembered("gone"), Remembered("chat")])
    world.sources.has["s3://b/x"] = SourceUnavailable("no answer")
    await Start(world.changes, Settings(restore=True), file).run()
    await asyncio.sleep(0.1)
    assert file.read() == [Remembered("chat"), down]
    world.sources.has["sql"] = Version("bb")
    await world.changes.load("sql")
    await asyncio.sleep(0.1)
    assert file.read() == [Remembered("chat"), Remembered("sql")], "what is served now is what counts"


@runs
async def test_what_a_source_could_not_say_at_the_start_is_served_when_it_can(tmp_path: Path) -> None:
    file, world = ServedSet(tmp_path / "served.json"), World()
    file.write([Remembered("sql", is_pinned=True), Remembered("broken"), Remembered("taken"), Remembered("never")])
    for name in ("sql", "broken", "taken", "never"):
        world.sources.has[name] = SourceUnavailable("no answer")
    start = Start(world.changes, Settings(restore=True), file)
    await start.run()
    trying = asyncio.create_task(start.bring_put_off())
    await asyncio.sleep(100)
    assert world.changes.catalogue.all() == []
    world.sources.has |= {"sql": Version("sql"), "broken": IncompatibleAdapter("rank 99"), "taken": Version("new")}
    taken, _ = await world.changes.load("taken")
    await world.changes.unload("never", timeout_s=1, block=True)
    asked = len(world.sources.asked)
    await asyncio.wait_for(trying, 100)
    served = world.changes.catalogue.get("sql")
    assert served is not None
    assert served.is_pinned
    assert world.changes.catalogue.get("taken") is taken
    assert sorted(world.sources.asked[asked:]) == ["broken", "sql"]
    await asyncio.sleep(0.1)
    assert file.read() == [Remembered("taken"), Remembered("sql", is_pinned=True)]


@runs
async def test_a_version_that_has_left_the_store_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, digest = ServedSet(tmp_path / "served.json"), "aa" * 32
    file.write([Remembered(f"sql@{digest[:12]}", held_digest=digest), Remembered("chat")])
    world = world_with("chat")
    await Start(world.changes, Settings(restore=True), file).run()
    assert [served.name for served in world.changes.catalogue.all()] == ["chat"]
    assert "'sql@aaaaaaaaaaaa' is not served from the start: [L002]" in caplog.text


@runs
async def test_a_revision_that_was_rolled_back_is_asked_of_its_source(tmp_path: Path) -> None:
    """`sql@v3` is a name that a source has; only what names its digest is a version of another name."""
    file, old, new = ServedSet(tmp_path / "served.json"), "aa" * 32, "bb" * 32
    file.write([Remembered("sql@v3", held_digest=old), Remembered("sql@cccccccc", held_digest=old)])
    world = World()
    world.sources.has |= {"sql@v3": Version(new), "sql@cccccccc": Version(new)}
    world.sources.store[old] = Version(old)
    await Start(world.changes, Settings(restore=True), file).run()
    assert sorted(world.sources.asked) == ["sql@cccccccc", "sql@v3"]
    assert await world.ask("sql@v3") == f"/store/{old}"


@runs
async def test_a_disk_that_is_full_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    world = world_with("sql")
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        await Start(world.changes, Settings(preload=("sql",)), ServedSet(tmp_path / "file" / "x")).run()
        await asyncio.sleep(0.1)
    assert "cannot be written" in caplog.text
    assert await world.ask("sql") == "/store/sql"


class SlowFile(ServedSet):
    """A disk that keeps the first writer waiting until it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.writing = self.most_at_once = 0

    def write(self, served: Sequence[Remembered]) -> None:
        self.writing += 1
        self.most_at_once = max(self.most_at_once, self.writing)
        if not self.begun.is_set():
            self.begun.set()
            assert self.let_go.wait(LONGEST_S)
        super().write(served)
        self.writing -= 1


def test_what_changes_while_it_is_written_is_written_afterwards_and_not_at_once(tmp_path: Path) -> None:
    file = SlowFile(tmp_path / "served.json")

    async def run() -> None:  # in real time, as a thread of its own waits for its disk
        world = world_with("sql", "chat")
        await Start(world.changes, Settings(preload=("sql",)), file).run()
        assert await asyncio.to_thread(file.begun.wait, LONGEST_S)
        await world.changes.load("chat")
        await asyncio.sleep(0.1)  # ten times what a change waits for others; a second writer would have begun
        file.let_go.set()
        async with asyncio.timeout(LONGEST_S):
            while file.read() != [Remembered("sql"), Remembered("chat")]:
                await asyncio.sleep(0.005)

    asyncio.run(run())
    assert file.most_at_once == 1


@runs
async def test_the_look_out_swaps_what_changed_and_goes_on_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_with("sql", "chat", "odd")
    for name in ("odd", "sql", "chat"):
        await world.changes.load(name)
    latest = world.sources.latest

    async def sometimes_odd(name: str, uri: str | None, base_path: str) -> Version | None:
        if name == "odd":
            raise ZeroDivisionError
        return await latest(name, uri, base_path)

    monkeypatch.setattr(world.sources, "latest", sometimes_odd)
    task = asyncio.create_task(look_out(world.changes, 0.02))
    world.sources.has |= {"sql": Version("new"), "chat": SourceUnavailable("down")}
    await asyncio.sleep(0.3)
    assert await world.ask("sql") == "/store/new"
    assert await world.ask("chat") == "/store/chat"
    assert "Looking for a new version of adapter 'odd' failed" in caplog.text
    world.sources.has["chat"] = Version("later")
    await asyncio.sleep(0.3)
    assert await world.ask("chat") == "/store/later"
    task.cancel()


@runs
async def test_replicas_do_not_look_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 50:
            raise asyncio.CancelledError

    monkeypatch.setattr(revalidation.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await look_out(World().changes, 60)
    assert len(set(waits)) == 50
    assert all(48 <= seconds <= 72 for seconds in waits)


def test_the_render_server_has_nothing_to_administer() -> None:
    plugin, state = AdminPlugin(), SimpleNamespace()
    asyncio.run(plugin.init_state(None, state, SimpleNamespace()))
    assert plugin._tasks == []
    assert vars(state) == {}


def test_several_api_servers_end_the_start() -> None:
    with pytest.raises(InvalidSettings, match="--api-server-count 2"):
        asyncio.run(AdminPlugin().init_state(object(), SimpleNamespace(), SimpleNamespace(api_server_count=2)))


def test_without_the_manager_there_is_no_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_admin,lora_filesystem_resolver")
    with pytest.raises(InvalidSettings, match="without lora_lru_manager"):
        register_admin()


def test_not_named_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver_module, "_resolver", None)
    monkeypatch.setenv("LORA_PLUGINS_TYPO", "1")
    for plugins in ("", "lora_lru_manager"):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        register_admin()
    assert resolver_module._resolver is None
    monkeypatch.setenv("VLLM_PLUGINS", "lora_lru_manager,lora_admin")
    with pytest.raises(InvalidSettings, match="LORA_PLUGINS_TYPO"):
        register_admin()
