"""A pooling server with the manager and one slot: vectors are PEFT's, and what fails or is aborted leaves nothing."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from testbed.bed import Bed
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.server import Server
from tests.deployments.quiet import assert_quiet
from tests.e2e.broken import BROKEN
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S
from tests.e2e.test_embeddings import vector_of

pytestmark = pytest.mark.nightly
CELL = "embeddings and pooling"

NAMES = [spec.name for spec in DEMO_ADAPTERS]


@dataclass(frozen=True)
class Pooling:
    """The server, and PEFT's vectors by name; None is the base model's."""

    server: Server
    base: str
    vectors: dict[str | None, list[float]]

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, timeout=LONGEST_S)


@pytest.fixture(scope="module")
def pooling(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pooling]:
    home = tmp_path_factory.mktemp("pooling")
    shutil.copytree(bed.adapters, home / "adapters")
    shutil.copytree(bed.adapters / "sql", home / "broken")
    next(case for case in BROKEN if case.name == "no-such-module").make(home / "broken")
    (home / "broken").rename(home / "adapters" / "broken")
    vectors = {name: vector_of(bed, bed.adapters / name if name else None) for name in (None, *NAMES)}
    with admin_server(
        bed, home, "--runner", "pooling", "--convert", "embed", "--max-loras", "1", "--max-cpu-loras", "2",
        "--max-model-len", "256", "--enable-chunked-prefill", "--max-num-batched-tokens", "64",
    ) as server:  # fmt: skip
        yield Pooling(server, str(bed.base), vectors)


@pytest.fixture(autouse=True)
def everything_ends(pooling: Pooling) -> Iterator[None]:
    yield
    assert_quiet(pooling.server)


async def embed(client: httpx.AsyncClient, name: str, text: str = PROMPT) -> httpx.Response:
    return await client.post("/v1/embeddings", json={"model": name, "input": text})


def vector(answer: httpx.Response) -> list[float]:
    assert answer.status_code == 200, answer.text
    (data,) = answer.json()["data"]
    return list(data.get("embedding") or data["data"])


@pytest.mark.deployment(CELL, "tested", "five adapters through one slot, broken ones and aborts among them")
def test_vectors_of_more_adapters_than_slots_are_peft(pooling: Pooling) -> None:
    asked = [*NAMES, None, "broken"] * 4

    async def run() -> list[httpx.Response]:
        async with pooling.client() as client:
            return list(await asyncio.gather(*(embed(client, name or pooling.base) for name in asked)))

    for name, answer in zip(asked, asyncio.run(run()), strict=True):
        if name == "broken":
            assert (answer.status_code, "[L003]" in answer.text) == (400, True), answer.text
        else:
            assert vector(answer) == pytest.approx(pooling.vectors[name], abs=1e-4), name


@pytest.mark.deployment(CELL, "tested", "five adapters through one slot, broken ones and aborts among them")
def test_aborted_requests_for_vectors_leave_nothing(pooling: Pooling) -> None:
    async def give_up(client: httpx.AsyncClient, number: int) -> None:
        asked = asyncio.create_task(embed(client, NAMES[number % len(NAMES)], f"{number} {PROMPT}" * 4))
        await asyncio.sleep(0.01 * number)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async def run() -> list[Any]:
        async with pooling.client() as client:
            await asyncio.gather(*(give_up(client, number) for number in range(60)))
            return [vector(await embed(client, name)) for name in NAMES]

    assert asyncio.run(run()) == [pytest.approx(pooling.vectors[name], abs=1e-4) for name in NAMES]


@pytest.mark.deployment(CELL, "tested", "held over a pause; blocked ones are refused")
def test_held_requests_for_vectors_wait_or_are_refused(pooling: Pooling) -> None:
    async def run() -> tuple[httpx.Response, httpx.Response]:
        async with pooling.client() as client:
            for name in ("sql", "chat"):
                vector(await embed(client, name))
            assert (await client.post("/pause", params={"mode": "keep"})).status_code == 200
            try:
                waits, refused = (asyncio.create_task(embed(client, name)) for name in ("sql", "chat"))
                await asyncio.sleep(0.5)
                assert not waits.done()
                assert (await client.delete("/v1/loras/chat?block=true")).status_code == 200
            finally:
                assert (await client.post("/resume")).status_code == 200
            return await waits, await refused

    waits, refused = asyncio.run(run())
    assert vector(waits) == pytest.approx(pooling.vectors["sql"], abs=1e-4)
    assert (refused.status_code, "[L002]" in refused.text) == (404, True), refused.text
