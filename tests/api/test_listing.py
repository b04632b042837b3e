"""The list of all adapters: the same whole and in pages, and made in steps between which the loop serves others."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from lora_plugins.api.listing import json_of, page_of
from lora_plugins.api.models import AdapterList
from lora_plugins.cli import server as command_line
from lora_plugins.cli.server import AdminClient
from lora_plugins.events import Events
from lora_plugins.server.reconciler import Reconciler
from lora_plugins.server.registry import ServedAdapter
from lora_plugins.server.served_file import ServedFile
from lora_plugins.settings import Settings
from tests.cli.admin_server import KEY, AdminServer, admin_server
from tests.server.world import Request, Version, World

NAMES = [f"{letter}/é &{number}" for letter in "cab" for number in range(3)]


@pytest.fixture(scope="module")
def server() -> Iterator[AdminServer]:
    """Nine names that are served, one of them blocked, and two that are only blocked."""
    with admin_server(metrics=False) as running:

        async def fill() -> None:
            for number, name in enumerate(NAMES, 1):
                put(running.world, name, number)
            for name in (NAMES[0], "a/blocked", "z/blocked"):
                running.world.resolver.store.blocks.hold(name)

        asyncio.run_coroutine_threadsafe(fill(), running.loop).result(60)
        yield running


def put(world: World, name: str, engine_id: int) -> None:
    version = Version(f"{engine_id:064x}")
    request = Request(name, engine_id, str(version.path))
    world.lifecycle.registry.put(ServedAdapter(name, request, version))  # type: ignore[arg-type]


def ask(server: AdminServer, query: str = "") -> dict[str, Any]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request("GET", f"/v1/loras{query}", headers={"Authorization": f"Bearer {KEY}"})
    with connection.getresponse() as answer:
        content = json.loads(answer.read())
        assert (answer.status, answer.getheader("content-type")) == (200, "application/json"), content
        return dict(content)


def test_without_a_limit_everything_is_listed(server: AdminServer) -> None:
    listed = ask(server)
    assert [one["lora_name"] for one in listed["loras"]] == [*NAMES, "a/blocked", "z/blocked"]
    assert [one["state"] for one in listed["loras"]] == ["blocked", *["serving"] * 8, "blocked", "blocked"]
    assert (listed["count"], listed["next"], listed["declared"]) == (11, None, None)


@pytest.mark.parametrize("limit", [1, 2, 5, 10, 11, 12, 10_000])
def test_the_pages_together_are_the_list(server: AdminServer, limit: int) -> None:
    pages = [ask(server, f"?limit={limit}")]
    while pages[-1]["next"] is not None:
        pages.append(ask(server, f"?limit={limit}&after={quote(pages[-1]['next'], safe='')}"))
    assert [page["count"] for page in pages] == [11] * -(-11 // limit)
    assert all(len(page["loras"]) <= limit for page in pages)
    rows = sorted((row for page in pages for row in page["loras"]), key=lambda row: row["lora_name"])
    assert rows == sorted(ask(server)["loras"], key=lambda row: row["lora_name"])


@pytest.mark.parametrize("query", ["?limit=0", "?limit=10001", "?limit=x"])
def test_a_limit_that_cannot_be_is_refused(server: AdminServer, query: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request("GET", f"/v1/loras{query}", headers={"Authorization": f"Bearer {KEY}"})
    with connection.getresponse() as answer:
        assert answer.status in (400, 422)


def test_the_command_line_follows_the_pages(server: AdminServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_PAGE", 2)
    monkeypatch.setenv("LORA_PLUGINS_ADMIN_KEY", KEY)
    listed = AdminClient(server.url, 60).adapters()
    assert sorted(one.lora_name for one in listed.loras) == sorted([*NAMES, "a/blocked", "z/blocked"])
    assert (listed.count, listed.next) == (11, None)


async def listing(world: World, reconciler: Reconciler | None = None) -> AsyncIterator[bytes]:
    page = await page_of(world.lifecycle.registry, None, None)
    async for part in json_of(page, world.lifecycle, await world.planner.states(), reconciler):
        yield part


def test_others_have_a_turn_every_hundred_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20,000 names, and of a declared set of 2,000; the store is asked in threads."""
    path = tmp_path / "adapters.yaml"
    path.write_text("adapters:\n" + "".join(f"  - name: declared-{n}\n" for n in range(2_000)))
    asked: set[threading.Thread] = set()

    async def run() -> tuple[int, AdapterList]:
        world = World()
        monkeypatch.setattr(
            world.resolver.store,
            "has",
            lambda _: not asked.add(threading.current_thread()),  # type: ignore[func-returns-value]
        )
        for number in range(20_000):
            put(world, f"adapter-{number}", number + 1)
        settings = Settings(adapters_file=path)
        reconciler = Reconciler(world.lifecycle, settings, ServedFile(tmp_path / "served.json"), Events())
        await reconciler.start()
        turns, is_over = 0, False

        async def turn() -> None:
            nonlocal turns
            while not is_over:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        parts = [part async for part in listing(world, reconciler)]
        is_over = True
        await turning
        return turns, AdapterList.model_validate_json(b"".join(parts))

    turns, listed = asyncio.run(run())
    assert turns >= 20_000 / 100 + 2_000 / 100
    assert (len(listed.loras), listed.count) == (20_000, 20_000)
    assert listed.declared is not None
    assert len(listed.declared.loras) == 2_000
    assert threading.main_thread() not in asked, "a file system may be slow"
