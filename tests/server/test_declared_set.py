"""What a file declares is served, and what it declares no more is unloaded, while it changes and breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lora_plugins.errors import IncompatibleAdapter, InvalidSettings, SourceUnavailable
from lora_plugins.events import DeclaredFileInvalid, DeclaredSetReconciled, Events, NotServed
from lora_plugins.resolvers.uris import AllowedUris
from lora_plugins.server.declared_set import LOOK_INTERVAL_S, RETRY_S, DeclaredSet
from lora_plugins.server.restore import Restore
from lora_plugins.server.served_file import ServedFile
from lora_plugins.settings import Settings
from tests.server.world import Version, World
from tests.virtual_time import runs

LOOKED_S = LOOK_INTERVAL_S * 2 + 1
OLD, NEW = "aa" * 32, "bb" * 32


def declare(path: Path, *entries: str) -> None:
    """Exchange the file, as a mounted ConfigMap does."""
    beside = path.with_suffix(".new")
    beside.write_text("adapters:\n" + "".join(f"  - {entry}\n" for entry in entries))
    beside.replace(path)


@contextlib.asynccontextmanager
async def following(world: World, path: Path) -> AsyncIterator[DeclaredSet]:
    declared = DeclaredSet(world.lifecycle, path, AllowedUris.parse(("s3://b",)), Events(world.tell))
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
async def test_only_what_says_preload_is_waited_for(tmp_path: Path) -> None:
    world, path = World(slots=3), tmp_path / "adapters.yaml"
    world.resolver.has |= {"sql": Version("aa"), "s3://b/chat": Version("bb")}
    declare(path, "{name: chat, uri: 's3://b/chat', pin: true}", "{name: sql, preload: true}")
    declared = DeclaredSet(world.lifecycle, path, AllowedUris.parse(("s3://b",)), Events(world.tell))
    await declared.start()
    assert served(world) == {"sql": "aa"}
    async with following(world, path):
        assert served(world) == {"sql": "aa", "chat": "bb"}
    assert world.lifecycle.registry.require("chat").is_pinned
    assert world.told[-1] == DeclaredSetReconciled(declared=2, served=2, failed=0)


@runs
async def test_changes_of_the_file_are_followed(tmp_path: Path) -> None:
    world, path = World(slots=3), tmp_path / "adapters.yaml"
    world.resolver.has |= {"sql": Version("aa"), "chat": Version("cc"), "s3://b/sql": Version("bb")}
    declare(path, "{name: sql, pin: true}", "{name: chat}")
    async with following(world, path):
        assert served(world) == {"sql": "aa", "chat": "cc"}
        declare(path, "{name: sql, uri: 's3://b/sql'}")
        await asyncio.sleep(LOOKED_S)
        assert served(world) == {"sql": "bb"}, "swapped to another place; chat is unloaded"
        assert not world.lifecycle.registry.require("sql").is_pinned
        declare(path, "{name: sql}")
        await asyncio.sleep(LOOKED_S)
        assert served(world) == {"sql": "aa"}, "back to what has its name"
        assert world.lifecycle.registry.require("sql").uri is None
        declare(path)
        await asyncio.sleep(LOOKED_S)
        assert served(world) == {}
    await world.settled()
    assert world.resolver.leased == set()


@runs
async def test_a_digest_is_served_and_held(tmp_path: Path) -> None:
    world, path = World(slots=3), tmp_path / "adapters.yaml"
    world.resolver.has["sql"] = Version(OLD)
    declare(path, f"{{name: sql, digest: '{OLD}'}}")
    async with following(world, path):
        world.resolver.has["sql"] = Version(NEW)
        await world.lifecycle.poll("sql")
        assert served(world) == {"sql": OLD}, "the poller leaves it"
        declare(path, f"{{name: sql, digest: '{NEW}'}}")
        await asyncio.sleep(LOOKED_S)
        assert served(world) == {"sql": NEW}
        declare(path, f"{{name: sql, digest: '{OLD}'}}")
        await asyncio.sleep(LOOKED_S)
        assert served(world) == {"sql": OLD}, "from the store, which still has it"


@runs
async def test_a_digest_from_elsewhere_is_asked_of_the_declared_place(tmp_path: Path) -> None:
    world, path = World(slots=3), tmp_path / "adapters.yaml"
    world.resolver.versions[OLD] = Version(OLD, uri="s3://b/other")
    world.resolver.has["s3://b/sql"] = Version(NEW, uri="s3://b/sql")
    declare(path, f"{{name: sql, uri: 's3://b/sql', digest: '{OLD}', preload: true}}")
    async with following(world, path) as declared:
        assert served(world) == {}
        assert "the version bbbbbbbbbbbb at its source" in str(declared.states["sql"].error)
        assert world.resolver.leased == set()
        world.resolver.versions[OLD] = Version(OLD, uri="s3://b/sql")
        await asyncio.sleep(RETRY_S + LOOKED_S)
        assert served(world) == {"sql": OLD}, "a version that came from there, and is still in the store"


@runs
async def test_another_version_than_declared_is_not_served(tmp_path: Path) -> None:
    world, path = World(), tmp_path / "adapters.yaml"
    world.resolver.has["sql"] = Version(NEW)
    declare(path, f"{{name: sql, digest: '{OLD}', preload: true}}")
    async with following(world, path) as declared:
        assert served(world) == {}
        assert OLD[:12] in str(declared.states["sql"].error)
        assert world.resolver.leased == set()
        world.resolver.has["sql"] = Version(OLD)
        await asyncio.sleep(RETRY_S + LOOKED_S)
        assert served(world) == {"sql": OLD}


@runs
async def test_one_that_fails_is_told_once_and_tried_again(tmp_path: Path) -> None:
    world, path = World(), tmp_path / "adapters.yaml"
    world.resolver.has |= {
        "sql": SourceUnavailable("no answer"),
        "chat": Version("cc"),
        "wide": IncompatibleAdapter("x"),
    }
    declare(path, "{name: sql, preload: true}", "{name: chat}", "{name: wide}")
    async with following(world, path) as declared:
        await asyncio.sleep(4 * RETRY_S)
        assert served(world) == {"chat": "cc"}
        assert [event.name for event in world.told if isinstance(event, NotServed)] == ["sql", "wide"]
        world.resolver.has["sql"] = Version("aa")
        await asyncio.sleep(RETRY_S + LOOKED_S)
        assert served(world) == {"chat": "cc", "sql": "aa"}
        assert declared.states["sql"].error is None
    assert world.told[-1] == DeclaredSetReconciled(declared=3, served=2, failed=1)


@runs
async def test_figures_are_told_when_they_change_and_only_then(tmp_path: Path) -> None:
    world, path = World(), tmp_path / "adapters.yaml"
    world.resolver.has["sql"] = Version("aa")
    declare(path, "{name: sql}", "{name: nobody}")
    async with following(world, path):
        await asyncio.sleep(6 * RETRY_S)
        declare(path, "{name: sql}")
        await asyncio.sleep(LOOKED_S)
        declare(path)
        await asyncio.sleep(6 * RETRY_S)
    told = [event for event in world.told if isinstance(event, DeclaredSetReconciled)]
    assert told[0] == DeclaredSetReconciled(declared=2, served=0, failed=0)
    assert [(each.declared, each.served, each.failed) for each in told[1:]] == [(2, 1, 1), (1, 1, 0), (0, 0, 0)]


@pytest.mark.parametrize("broken", ["text", "missing", "unreadable"])
@runs
async def test_a_broken_file_leaves_what_runs(tmp_path: Path, broken: str) -> None:
    world, path = World(), tmp_path / "adapters.yaml"
    world.resolver.has["sql"] = Version("aa")
    declare(path, "{name: sql}")
    async with following(world, path) as declared:
        if broken == "text":
            path.write_text("adapters: [")
        elif broken == "missing":
            path.unlink()
        else:
            path.unlink()
            path.mkdir()
        await asyncio.sleep(5 * LOOKED_S)
        assert served(world) == {"sql": "aa"}
        assert declared.file_error is not None
        assert sum(isinstance(event, DeclaredFileInvalid) for event in world.told) == 1
        if path.is_dir():
            os.rmdir(path)
        declare(path, "{name: sql}")
        await asyncio.sleep(LOOKED_S)
        assert declared.file_error is None
        assert served(world) == {"sql": "aa"}
        assert world.resolver.asked == ["sql"], "nothing was loaded again"


@runs
async def test_what_an_administrator_does_stays_until_the_file_changes(tmp_path: Path) -> None:
    world, path = World(), tmp_path / "adapters.yaml"
    world.resolver.has |= {"sql": Version("aa"), "chat": Version("cc")}
    declare(path, "{name: sql}", "{name: chat}")
    async with following(world, path):
        await world.lifecycle.unload("sql", block=True)
        await asyncio.sleep(4 * RETRY_S)
        assert served(world) == {"chat": "cc"}
        declare(path, "{name: sql, preload: true}")  # preload alone changes nothing of a server that runs
        await asyncio.sleep(LOOKED_S)
        assert served(world) == {}


@runs
async def test_a_declared_name_is_not_restored(tmp_path: Path) -> None:
    world, path, file = World(slots=3), tmp_path / "adapters.yaml", ServedFile(tmp_path / "served.json")
    world.resolver.has |= {"sql": Version("aa"), "chat": Version("cc")}
    declare(path, "{name: sql}")
    async with following(world, path) as declared:
        await Restore(world.lifecycle, Settings(), file, declared).run()
        await world.lifecycle.load("chat")
        await asyncio.sleep(5)
        assert [one.name for one in file.read()] == ["chat"]


@runs
async def test_start_fails_on_a_wrong_file(tmp_path: Path) -> None:
    world, path = World(), tmp_path / "adapters.yaml"
    path.write_text("adapters: [{nam: sql}]")
    with pytest.raises(InvalidSettings, match="did you mean 'name'"):
        await DeclaredSet(world.lifecycle, path, AllowedUris.parse(()), Events()).start()
