"""Replicas that share a store: each writes a list of its own, and one with a new name takes up those of all."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import astuple
from pathlib import Path

import pytest

from lora_plugins.events import Events
from lora_plugins.lifecycle import served_writer
from lora_plugins.lifecycle.reconciler import Reconciler
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.lifecycle.served_file import ServedFile, lately_served
from lora_plugins.settings import Settings
from tests.lifecycle.world import World
from tests.virtual_time import runs

DAY_S = 86_400


def of(root: Path, replica: str) -> ServedFile:
    return ServedFile.of_store(root, "org/base", replica)


def wrote(root: Path, replica: str, *names: str | DesiredAdapter, ended_s: float = 0) -> None:
    """A replica serves these, or ended so long ago."""
    file = of(root, replica)
    file.write(map(astuple, [it if isinstance(it, DesiredAdapter) else DesiredAdapter(it) for it in names]))
    os.utime(file.path, (time.time() - ended_s,) * 2)


def restored(root: Path, replica: str) -> list[str]:
    return [adapter.name for adapter in of(root, replica).read()]


def test_replicas_keep_their_own_lists(tmp_path: Path) -> None:
    wrote(tmp_path, "lora-0", "sql")
    wrote(tmp_path, "lora-1", "chat")
    assert (restored(tmp_path, "lora-0"), restored(tmp_path, "lora-1")) == (["sql"], ["chat"])


def test_new_names_have_the_names_of_all(tmp_path: Path) -> None:
    for number, name in enumerate(("sql", "chat", "code")):
        wrote(tmp_path, f"pod-{name}", name, ended_s=60 + number)
    wrote(tmp_path, "pod-alive", "alive")
    wrote(tmp_path, "pod-of-yesterday", "stale", ended_s=DAY_S)
    for number in range(4):
        assert sorted(restored(tmp_path, f"pod-new-{number}")) == ["alive", "chat", "code", "sql"]
    assert restored(tmp_path, "pod-alive") == ["alive"], "which goes on with its own"


def test_the_replica_touched_last_decides_about_a_name(tmp_path: Path) -> None:
    """A pod that was killed seconds ago still seems to live; the pods before it are known to have ended."""
    for replica, digest, ended_s in (("pod-1", "11" * 32, 60), ("pod-2", "22" * 32, 5), ("pod-3", "33" * 32, 90)):
        wrote(tmp_path, replica, DesiredAdapter("sql", held_digest=digest), ended_s=ended_s)
    assert of(tmp_path, "pod-4").read() == [DesiredAdapter("sql", held_digest="22" * 32)]


def test_a_name_that_one_replica_has_unloaded_stays_with_others(tmp_path: Path) -> None:
    """As if the replica had written its whole list again: also where the name's entry stands before its change."""
    wrote(tmp_path, "pod-1", "sql", "chat", ended_s=60)
    file, pinned = of(tmp_path, "pod-2"), DesiredAdapter("sql", is_pinned=True)
    file.write(map(astuple, [pinned, DesiredAdapter("code")]))
    assert pinned in of(tmp_path, "pod-3").read()
    file.write(map(astuple, [DesiredAdapter("code")]))
    assert of(tmp_path, "pod-3").read() == [DesiredAdapter("sql"), DesiredAdapter("chat"), DesiredAdapter("code")]
    assert lately_served(tmp_path) == set()


@pytest.mark.parametrize("names", [0, 500])
@runs
async def test_a_list_hides_no_other_at_the_start(tmp_path: Path, names: int) -> None:
    wrote(tmp_path, "pod-1", *(f"chat-{number}" for number in range(names)), ended_s=60)
    wrote(tmp_path, "pod-2", "sql", ended_s=30)
    world = World({"sql": "sql"})
    await Reconciler(world.lifecycle, Settings(restore="1"), of(tmp_path, "pod-3"), Events()).start()
    assert world.lifecycle.registry.serves("sql")


def test_a_list_that_goes_meanwhile_hides_no_other(tmp_path: Path) -> None:
    wrote(tmp_path, "pod-1", "sql", ended_s=60)
    wrote(tmp_path, "pod-2", "chat", ended_s=30)
    pieces = of(tmp_path, "pod-3").pieces()
    assert next(pieces) == [DesiredAdapter("sql")]
    of(tmp_path, "pod-2").path.unlink()
    assert list(pieces) == []


def test_a_replica_comes_back_to_its_list(tmp_path: Path) -> None:
    wrote(tmp_path, "lora-1", "chat", ended_s=60)
    assert restored(tmp_path, "lora-3") == ["chat"]
    back = of(tmp_path, "lora-1")
    back.clean()
    wrote(tmp_path, "lora-3", "chat", "code")
    assert back.read() == [DesiredAdapter("chat")]


@pytest.mark.parametrize("lives", [True, False])
def test_what_ended_counts_less_than_what_lives(tmp_path: Path, lives: bool) -> None:
    """Where a replica lives, what ended long ago does not count, and no ended list where living ones are preferred."""
    wrote(tmp_path, "weekend", "stale", ended_s=2 * DAY_S)
    if lives:
        wrote(tmp_path, "alive", "alive")
    assert restored(tmp_path, "new") == (["alive"] if lives else ["stale"])
    wrote(tmp_path, "pod-ended", "ended", ended_s=60)
    file = of(tmp_path, "new")
    file.prefers_living = True
    assert [adapter.name for adapter in file.read()] == (["alive"] if lives else ["ended"])


def test_lists_of_the_dead_are_removed_after_a_week(tmp_path: Path) -> None:
    wrote(tmp_path, "old", "old", ended_s=8 * DAY_S)
    wrote(tmp_path, "recent", "recent", ended_s=6 * DAY_S)
    of(tmp_path, "new").clean()
    assert [path.name for path in of(tmp_path, "new").path.parent.iterdir()] == [of(tmp_path, "recent").path.name]


def test_the_list_of_an_earlier_release_counts_without_others(tmp_path: Path) -> None:
    wrote(tmp_path, "x", "sql")
    path = of(tmp_path, "x").path
    earlier = path.rename(path.with_name(f"{path.name.partition('.')[0]}.json"))
    assert restored(tmp_path, "new") == ["sql"]
    wrote(tmp_path, "new", "chat")
    os.utime(earlier, (1, 1))
    assert restored(tmp_path, "newest") == ["chat"]


@runs
async def test_a_server_keeps_its_list_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_writer, "_WRITE_DELAY_S", 0.01)
    world, file = World({"sql": "sql"}), of(tmp_path, "lora-0")
    one = Reconciler(world.lifecycle, Settings(preload=("sql",)), file, Events())
    keeping = asyncio.create_task(file.keep())
    await one.start()
    await asyncio.sleep(1)
    os.utime(file.path, (1, 1))
    await asyncio.sleep(10)
    assert file.path.stat().st_mtime > 1
    keeping.cancel()
