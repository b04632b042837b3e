"""One slot, one place in host memory: clients that give up and ask again at once, and requests that become several."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.server import Server
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, lora_server
from tests.e2e.standing_still import LONGEST_S, in_state, is_held, seen
from tests.e2e.test_in_flight import body, tokens_of
from tests.repetitions import times

SOON_S = 30.0  # an answer that needs a load and half a second of computing; not one that comes when others have left
TRIALS, ROUNDS = times(30, short=3), times(5, short=2)
BUSY = ("chat", "stable", "team/poet")


@dataclass(frozen=True)
class OnePlace:
    """A server with `--max-loras 1` and all else as by default."""

    server: Server
    bed: Bed

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.server.url, timeout=LONGEST_S, limits=limits)


@pytest.fixture(scope="module")
def one_place(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnePlace]:
    home = tmp_path_factory.mktemp("one-place")
    shutil.copytree(bed.adapters, home / "adapters")
    with lora_server(
        bed, home, "--max-loras", "1", "--max-model-len", "1000",
        plugins=(RESOLVER, MANAGER, KERNELS, ADMIN), LORA_PLUGINS_REFRESH_S="0",
    ) as server:  # fmt: skip
        yield OnePlace(server, bed)
        assert "EngineCore encountered a fatal error" not in server.log()


async def complete(client: httpx.AsyncClient, name: str, tokens: int = MAX_TOKENS, **more: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=body(name, tokens, **more))


# --- what one request becomes ---


@asynccontextmanager
async def sixteen_others(one: OnePlace, client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Clients of three other adapters, each with one request after the other."""

    async def ask(number: int) -> None:
        name = BUSY[number % len(BUSY)]
        while not done:
            assert await tokens_of(client, name, 6) == one.bed.answers[name][:6]

    done = False
    asking = [asyncio.create_task(ask(number)) for number in range(16)]
    try:
        yield
    finally:
        done = True
        await asyncio.gather(*asking)


async def took(asked: Any) -> tuple[float, httpx.Response]:
    started = time.perf_counter()
    answer = await asked
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - started, answer


@pytest.mark.parametrize(
    "becomes_several",
    [
        {"n": 2, "use_beam_search": True, "return_token_ids": False},
        {"n": 3, "temperature": 1.0, "seed": 7, "return_token_ids": False},
    ],
    ids=["two beams", "n=3"],
)
def test_what_becomes_several_requests_waits_as_one(one_place: OnePlace, becomes_several: dict[str, Any]) -> None:
    """Six tokens: about as long as one plain request for the same adapter takes, whose place others wait for too."""

    async def run() -> None:
        async with one_place.client() as client:
            _, alone = await took(complete(client, "sql", 6, **becomes_several))
            expected = [choice["text"] for choice in alone.json()["choices"]]
            assert len(expected) == becomes_several["n"]
            plain_s, several_s = [], []
            async with sixteen_others(one_place, client):
                for _ in range(ROUNDS):
                    await asyncio.sleep(0.5)  # its adapter waits 0.2 s for more beams; then others have the place
                    plain_s.append((await took(complete(client, "sql", 6)))[0])
                    await asyncio.sleep(0.5)
                    seconds, answer = await took(complete(client, "sql", 6, **becomes_several))
                    several_s.append(seconds)
                    assert [choice["text"] for choice in answer.json()["choices"]] == expected
            assert sorted(several_s)[ROUNDS // 2] < 2.5 * max(plain_s) + 2.0, (several_s, plain_s)

    asyncio.run(asyncio.wait_for(run(), LONGEST_S))


# --- aborted, and asked for again at once; last, as what hangs here hangs for all that follow ---


async def give_up(asked: asyncio.Task[Any]) -> None:
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def retry_while_room_is_made(client: httpx.AsyncClient, name: str, trial: int) -> httpx.Response:
    """While `sql` runs, the only request for `name` is given up, and another comes within a millisecond."""
    running = asyncio.create_task(tokens_of(client, "sql", 60))

    async def runs_or_ran() -> bool:
        return running.done() or await in_state(client, "sql", "serving", 1)

    async def held_or_answered() -> bool:
        return asked.done() or await is_held(client, name)

    await seen(runs_or_ran)
    asked = asyncio.create_task(complete(client, name))
    await seen(held_or_answered)
    await give_up(asked)
    await asyncio.sleep((0, 0.0003, 0.001)[trial % 3])
    answer = await complete(client, name)
    await running
    return answer


def test_a_client_that_retries_at_once_is_answered(one_place: OnePlace) -> None:
    async def run() -> None:
        async with one_place.client() as client:
            await tokens_of(client, "chat")
            for trial in range(TRIALS):
                async with asyncio.timeout(SOON_S):
                    answer = await retry_while_room_is_made(client, "chat", trial)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == one_place.bed.answers["chat"], trial

    asyncio.run(run())
