"""The list of adapters, in pages, made in steps between which the loop serves others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi.responses import Response

from lora_plugins.api import routes
from lora_plugins.api.listing import MAX_LIMIT, list_of
from lora_plugins.api.models import AdapterList
from lora_plugins.cli.server_client import AdminClient
from lora_plugins.events import Events
from lora_plugins.lifecycle.reconciler import Reconciler
from lora_plugins.lifecycle.registry import ServedAdapter
from lora_plugins.lifecycle.served_file import ServedFile
from lora_plugins.settings import Settings
from tests.cli.admin_server import KEY, AdminServer, admin_server
from tests.lifecycle.world import Request, Version, World
from tests.repetitions import times

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


def get(server: AdminServer, query: str) -> httpx.Response:
    return httpx.get(f"{server.url}/v1/loras{query}", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)


def ask(server: AdminServer, query: str = "") -> dict[str, Any]:
    answer = get(server, query)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), answer.text
    return dict(answer.json())


def test_names_are_listed_in_their_order(server: AdminServer) -> None:
    listed = ask(server)
    assert [one["lora_name"] for one in listed["loras"]] == sorted([*NAMES, "a/blocked", "z/blocked"])
    blocked = [one["lora_name"] for one in listed["loras"] if one["state"] == "blocked"]
    assert blocked == sorted([NAMES[0], "a/blocked", "z/blocked"])
    assert (listed["count"], listed["next"], listed["declared"]) == (11, None, None)


@pytest.mark.parametrize("limit", [1, 5, 10, 11, MAX_LIMIT])
def test_the_pages_together_are_the_list(server: AdminServer, limit: int) -> None:
    pages = [ask(server, f"?limit={limit}")]
    while pages[-1]["next"] is not None:
        pages.append(ask(server, f"?limit={limit}&after={quote(pages[-1]['next'], safe='')}"))
    assert [page["count"] for page in pages] == [11] * -(-11 // limit)
    assert all(len(page["loras"]) <= limit for page in pages)
    assert [row for page in pages for row in page["loras"]] == ask(server)["loras"]


@pytest.mark.parametrize("query", ["?limit=0", "?limit=1001", "?limit=x"])
def test_a_limit_that_cannot_be_is_refused(server: AdminServer, query: str) -> None:
    assert get(server, query).status_code in (400, 422)


def test_the_command_line_follows_the_pages(server: AdminServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str | None] = []

    async def of_two(lifecycle: Any, reconciler: Any, _: int, after: str | None) -> AdapterList:
        pages.append(after)
        return await list_of(lifecycle, reconciler, 2, after)

    monkeypatch.setattr(routes, "list_of", of_two)
    monkeypatch.setenv("LORA_PLUGINS_ADMIN_KEY", KEY)
    listed = AdminClient(server.url, 60).adapters()
    assert [one.lora_name for one in listed.loras] == sorted([*NAMES, "a/blocked", "z/blocked"])
    assert (listed.count, listed.next, len(pages)) == (11, None, 6)


def test_others_have_a_turn_every_200_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a page of 1,000 names, and of a large declared set; the store is asked in threads."""
    count, path = times(20_000, short=3_000), tmp_path / "adapters.yaml"
    path.write_text("adapters:\n" + "".join(f"  - name: declared-{n}\n" for n in range(count)))
    asked: set[threading.Thread] = set()

    async def run() -> tuple[int, Response]:
        world = World()
        monkeypatch.setattr(
            world.resolver.store,
            "has",
            lambda _: not asked.add(threading.current_thread()),  # type: ignore[func-returns-value]
        )
        for number in range(2_000):
            put(world, f"adapter-{number}", number + 1)
        served = ServedFile(tmp_path / "served.json")
        reconciler = Reconciler(world.lifecycle, Settings(adapters_file=path), served, Events())
        await reconciler.start()
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        answer = await routes.list_all(world.lifecycle, reconciler)
        turning.cancel()
        return turns, answer

    turns, answer = asyncio.run(run())
    assert turns >= 1_000 / 200 + count / 200 * 2, "rows are made, and written as JSON"
    listed = AdapterList.model_validate_json(bytes(answer.body))
    assert (len(listed.loras), listed.count) == (1_000, 2_000)
    assert listed.declared is not None
    assert [one.lora_name for one in listed.declared.loras] == [f"declared-{n}" for n in range(count)]
    assert bytes(answer.body).decode() == listed.model_dump_json()
    assert threading.main_thread() not in asked, "a file system may be slow"
