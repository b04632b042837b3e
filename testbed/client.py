"""Ask a server as a user would: with the `openai` package."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
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
    text: str = ""


def connect(server: Server) -> openai.OpenAI:
    """A client that does not retry: a test wants to see the first answer."""
    return openai.OpenAI(**way_to(server))


def complete(client: openai.OpenAI, model: str, prompt: str, max_tokens: int) -> Answer:
    """Stream one greedy completion of just so many tokens."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    return _streamed(
        lambda: client.completions.create(
            model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body=extra
        ),
        lambda choice: choice.text,
    )


def chat(
    client: openai.OpenAI, model: str, question: str, max_tokens: int, show: Callable[[str], None] = lambda text: None
) -> Answer:
    """Stream one greedy answer to a question; `show` is called with each piece of its text."""
    return _streamed(
        lambda: client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True},
        ),
        lambda choice: choice.delta.content,
        show,
    )


def _streamed(
    ask: Callable[[], Iterable[Any]],
    text_of: Callable[[Any], str | None],
    show: Callable[[str], None] = lambda text: None,
) -> Answer:
    started = time.perf_counter()
    first_token_s = 0.0
    ids: list[int] = []
    texts: list[str] = []
    try:
        for chunk in ask():
            for choice in chunk.choices:
                if new := getattr(choice, "token_ids", None) or []:
                    first_token_s = first_token_s or time.perf_counter() - started
                    ids.extend(new)
                texts.append(text_of(choice) or "")
                show(texts[-1])
    except openai.APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        return Answer(error.status_code, error=str(body.get("message", error.message)))
    return Answer(200, tuple(ids), first_token_s, text="".join(texts))


async def complete_all(
    server: Server, models: Sequence[str], prompt: str, max_tokens: int, *, at_once: int | None = None
) -> list[list[int] | int]:
    """The greedy token ids, or the status of a refusal, for each model; `at_once` requests run at any time, or all."""
    places = asyncio.Semaphore(at_once or len(models))
    async with openai.AsyncOpenAI(**way_to(server)) as client:

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


def way_to(server: Server) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 240}
