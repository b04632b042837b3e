"""The poller for new versions."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from lora_plugins.errors import SourceUnavailable
from lora_plugins.events import is_polling
from lora_plugins.lifecycle import reconciler
from lora_plugins.lifecycle.reconciler import Reconciler
from lora_plugins.lifecycle.served_file import ServedFile
from tests.lifecycle.test_reconciler import reconciling, world_with
from tests.lifecycle.world import Version, World
from tests.virtual_time import runs


def polling(world: World, interval_s: float) -> Reconciler:
    return reconciling(world, ServedFile(Path("/nowhere")), refresh_s=interval_s)


@runs
async def test_the_poller_swaps_new_versions_and_survives_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_with("odd", "sql", "chat")
    for name in list(world.resolver.has):
        await world.lifecycle.load(name)
    latest, by_itself = world.resolver.latest, []

    async def seen(name: str, uri: str | None, base_path: str) -> Version | None:
        by_itself.append(is_polling())
        return await latest(name, uri, base_path)

    monkeypatch.setattr(world.resolver, "latest", seen)
    task = asyncio.create_task(polling(world, 0.02).poll())
    world.resolver.has |= {"sql": Version("new"), "chat": SourceUnavailable("down"), "odd": ZeroDivisionError()}
    await asyncio.sleep(0.3)
    assert await world.ask("sql") == "/store/new"
    assert set(by_itself) == {True}, "no request of a client"
    assert await world.ask("chat") == "/store/chat"
    assert "Looking for a new version of adapter 'odd' failed" in caplog.text
    world.resolver.has["chat"] = Version("later")
    await asyncio.sleep(0.3)
    assert await world.ask("chat") == "/store/later"
    task.cancel()


@runs
async def test_replicas_do_not_poll_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 50:
            raise asyncio.CancelledError

    monkeypatch.setattr(reconciler.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await polling(World(), 60).poll()
    assert len(set(waits)) == 50
    assert all(48 <= seconds <= 72 for seconds in waits)


@runs
async def test_a_source_that_hangs_keeps_only_its_own_names_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = [f"hung-{number}" for number in range(10)]
    world = world_with("sql", *hung)
    for name in (*hung, "sql"):
        adapter = await world.load(name)
        adapter.version = dataclasses.replace(adapter.version, source="s3" if name in hung else "filesystem")
    latest, asked = world.resolver.latest, []

    async def hang(name: str, uri: str | None, base_path: str) -> Version | None:
        asked.append(name)
        if name in hung:
            await asyncio.sleep(3600)
        return await latest(name, uri, base_path)

    monkeypatch.setattr(world.resolver, "latest", hang)
    task = asyncio.create_task(polling(world, 10).poll())
    await asyncio.sleep(60)
    assert asked.count("sql") >= 4, "asked at each interval"
    assert len(set(asked) & set(hung)) == 4, "few at once, and each once"
    task.cancel()


@runs
async def test_a_polled_name_gone_from_its_source_stays() -> None:
    world = world_with("sql")
    await world.lifecycle.load("sql")
    del world.resolver.has["sql"]
    task = asyncio.create_task(polling(world, 10).poll())
    await asyncio.sleep(60)
    adapter = world.lifecycle.registry.require("sql")
    assert (adapter.is_only_copy, await world.ask("sql")) == (True, "/store/sql"), "only a restored name is unloaded"
    task.cancel()
