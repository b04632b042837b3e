"""Pins where host memory is small, and while the engine is paused."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.models import PROMPT
from testbed.server import Server
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S

SOON_S = 20.0
HOST_MAX_BYTES = 750_000  # "chat" takes 0.53 MB, "stable" 0.23, "team/poet" 0.16, "sql" 0.12, "wide" never fits


@dataclass(frozen=True)
class Pins:
    server: Server
    bed: Bed

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, timeout=LONGEST_S)


@pytest.fixture(scope="module")
def pins(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pins]:
    """Four slots."""
    home: Path = tmp_path_factory.mktemp("pins")
    shutil.copytree(bed.adapters, home / "adapters")
    with admin_server(bed, home, "--max-loras", "4", LORA_PLUGINS_HOST_MAX_BYTES=str(HOST_MAX_BYTES)) as server:
        yield Pins(server, bed)


async def complete(client: httpx.AsyncClient, name: str) -> httpx.Response:
    body = {"model": name, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    return await client.post("/v1/completions", json={**body, "return_token_ids": True})


async def answers(pins: Pins, client: httpx.AsyncClient, name: str) -> None:
    answer = await complete(client, name)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == pins.bed.answers[name]


async def done(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
    answer = await client.request(method, path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def only_served(client: httpx.AsyncClient, *names: str) -> None:
    """Nothing is pinned, and only these are served."""
    for view in (await done(client, "GET", "/v1/loras"))["loras"]:
        await done(client, "DELETE", f"/v1/loras/{view['lora_name']}")
    for name in names:
        await done(client, "POST", "/v1/loras", {"lora_name": name})


def assert_locks_out(refused: httpx.Response, pinned: str, *others: str) -> None:
    assert refused.status_code == 503, refused.text
    text = refused.json()["error"]["message"]
    assert "[L001]" in text
    for name in (pinned, *others):
        assert f"'{name}'" in text or f" {name}" in text, text


def test_a_pin_that_locks_a_served_adapter_out_is_refused(pins: Pins) -> None:
    async def run() -> None:
        async with pins.client() as client:
            await only_served(client, "chat", "sql", "stable")

            async def ask_for_chat() -> int:
                count = 0
                while not finished:
                    await answers(pins, client, "chat")
                    count += 1
                return count

            finished = False
            await answers(pins, client, "chat")
            asking = [asyncio.create_task(ask_for_chat()) for _ in range(4)]
            try:
                await done(client, "POST", "/v1/loras/sql/pin")  # 0.63 MB are left, and "chat" needs 0.53
                assert_locks_out(await client.post("/v1/loras/stable/pin"), "stable", "chat")
                assert not (await done(client, "GET", "/v1/loras/stable"))["pinned"]
                for name in ("chat", "sql", "stable", "chat"):
                    await answers(pins, client, name)
            finally:
                finished = True
                counts = await asyncio.gather(*asking)
            assert min(counts) > 0
            await done(client, "POST", "/v1/loras/sql/unpin")
            assert_locks_out(await client.post("/v1/loras/stable/pin"), "stable", "chat")  # 0.52 MB
            await done(client, "POST", "/v1/loras/sql/pin")
            await answers(pins, client, "sql")
            await only_served(client)

    asyncio.run(asyncio.wait_for(run(), LONGEST_S))


def test_with_nothing_else_served_pins_are_taken(pins: Pins) -> None:
    async def run() -> None:
        async with pins.client() as client:
            await only_served(client, "sql", "stable")
            for name in ("sql", "stable"):
                await done(client, "POST", f"/v1/loras/{name}/pin")
            refused = await complete(client, "chat")  # comes later, and cannot fit
            assert (refused.status_code, "L001" in refused.text) == (503, True), refused.text
            for name in ("sql", "stable", "team/poet"):
                await answers(pins, client, name)
            await done(client, "POST", "/v1/loras/stable/unpin")
            await answers(pins, client, "chat")
            await only_served(client)

    asyncio.run(asyncio.wait_for(run(), LONGEST_S))


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pin_in_a_pause_is_answered_after_it(pins: Pins, mode: str) -> None:
    """No request comes that would have the engine go on."""

    async def run() -> None:
        async with pins.client() as client:
            await only_served(client)
            for _ in range(3):
                paused = await client.post("/pause", params={"mode": mode, "clear_cache": "false"})
                assert paused.status_code == 200, paused.text
                try:
                    await done(client, "POST", "/v1/loras", {"lora_name": "team/poet"})  # which no slot is written for
                    pinning = asyncio.create_task(client.post("/v1/loras/team/poet/pin"))
                    for _ in range(20):  # so that the pin has come to the engine
                        await done(client, "GET", "/v1/loras/team/poet")
                finally:
                    assert (await client.post("/resume")).status_code == 200
                try:
                    async with asyncio.timeout(SOON_S):
                        answer = await pinning
                finally:
                    await answers(pins, client, "team/poet")
                assert answer.status_code == 200, answer.text
                assert (await done(client, "GET", "/v1/loras/team/poet"))["pinned"]
                await only_served(client)

    asyncio.run(asyncio.wait_for(run(), LONGEST_S))
