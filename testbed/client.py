"""Ask a server as a user would: with the `openai` package."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from testbed.server import Server

# For httpx's `verify`: reading the machine's certificates takes 26 ms for each client, and nothing here is encrypted.
PLAIN_HTTP = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True)
class Answer:
    """Greedy token ids, the time to the first of them, and the HTTP status; `error` holds the text of a refusal."""

    status: int
    token_ids: tuple[int, ...] = ()
    first_token_s: float = 0.0
    error: str = ""


def connect(server: Server) -> openai.OpenAI:
    """A client that does not retry: a test wants to see the first answer."""
    return openai.OpenAI(**_way_to(server))


def complete(client: openai.OpenAI, model: str, prompt: str, max_tokens: int) -> Answer:
    """Stream one greedy completion."""
    started = time.perf_counter()
    first_token_s = 0.0
    ids: list[int] = []
    try:
        stream = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        for chunk in stream:
            first_token_s = first_token_s or time.perf_counter() - started
            for choice in chunk.choices:
                ids.extend(getattr(choice, "token_ids", None) or [])
    except openai.APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        return Answer(error.status_code, error=str(body.get("message", error.message)))
    return Answer(200, tuple(ids), first_token_s)


async def complete_all(
    server: Server, models: Sequence[str], prompt: str, max_tokens: int, *, at_once: int | None = None
) -> list[list[int] | int]:
    """The greedy token ids, or the status of a refusal, for each model; `at_once` requests run at any time, or all."""
    places = asyncio.Semaphore(at_once or len(models))
    async with openai.AsyncOpenAI(**_way_to(server)) as client:

        async def one(model: str) -> list[int] | int:
            async with places:
                try:
                    answer = await client.completions.create(
                        model=model,
                        prompt=prompt,
                        max_tokens=max_tokens,
                        temperature=0,
                        extra_body={"ignore_eos": True, "return_token_ids": True},
                    )
                except openai.APIStatusError as error:
                    return error.status_code
                return list(answer.choices[0].token_ids)

        return await asyncio.gather(*(one(model) for model in models))


def _way_to(server: Server) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 240}
