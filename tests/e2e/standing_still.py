"""An engine that is made to stand still while a request runs, so that what comes meanwhile comes in one order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx

TOKENS = 240  # of a long request
LONGEST_S = 240.0  # for what comes for certain, on a machine that is slow or stands still for a while
Answer = TypeVar("Answer")


async def seen(what: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(LONGEST_S):
        while not await what():
            await asyncio.sleep(0.01)


async def in_state(client: httpx.AsyncClient, name: str, state: str, in_flight: int) -> bool:
    view = await client.get(f"/v1/loras/{name}")
    return view.status_code == 200 and (view.json()["state"], view.json()["requests_in_flight"]) == (state, in_flight)


async def is_held(client: httpx.AsyncClient, name: str, least: int = 1) -> bool:
    """Whether `least` requests for this adapter wait in the engine's scheduler: for a load, a slot, or a resume."""
    view = await client.get(f"/v1/loras/{name}")
    return view.status_code == 200 and view.json()["requests_held"] >= least


@asynccontextmanager
async def in_the_midst_of(
    client: httpx.AsyncClient, name: str, begin: Callable[[], Awaitable[asyncio.Task[Answer]]]
) -> AsyncIterator[asyncio.Task[Answer]]:
    """Inside, the request for this adapter that `begin` began is in flight, and the engine stands still until the end.

    It answers all but requests for tokens meanwhile: those are held. Needs VLLM_SERVER_DEV_MODE=1.
    """
    while True:
        running = await begin()
        try:
            paused = await client.post("/pause", params={"mode": "keep", "clear_cache": "false"})
            assert paused.status_code == 200, paused.text
            if await in_state(client, name, "serving", 1):
                yield running
                return
        finally:
            assert (await client.post("/resume")).status_code == 200
        await running  # it was faster than the pause
