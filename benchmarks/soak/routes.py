"""The routes that clients ask, and how to read an answer of each as tokens or text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx

from benchmarks.soak.bank import PROMPTS
from benchmarks.soak.oracle import Answer
from lora_plugins.lifecycle.response import HEADER
from testbed.events import events

EVERY_OPTION = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Route:
    """A path, the form in which it asks a prompt, and whether it streams."""

    name: str
    path: str
    form: str
    is_stream: bool

    def body(self, model: str, prompt: int, max_tokens: int) -> dict[str, Any]:
        text = PROMPTS[prompt]
        body: dict[str, Any] = {"model": model, **EVERY_OPTION, **({"stream": True} if self.is_stream else {})}
        if self.path.endswith("responses"):
            return {**body, "input": text, "max_output_tokens": max_tokens, "store": False}
        body |= {"max_tokens": max_tokens, "return_token_ids": True}
        return body | ({"prompt": text} if self.form == "text" else {"messages": [{"role": "user", "content": text}]})


ROUTES = tuple(
    Route(f"{name}{' stream' if is_stream else ''}", path, form, is_stream)
    for name, path, form in (
        ("completions", "/v1/completions", "text"),
        ("chat", "/v1/chat/completions", "chat"),
        ("responses", "/v1/responses", "chat"),
    )
    for is_stream in (False, True)
)


async def ask(client: httpx.AsyncClient, route: Route, body: Mapping[str, Any], leave_after: int | None) -> Answer:
    """One request. A stream is left after `leave_after` of its pieces, where that is given."""
    try:
        if not route.is_stream:
            response = await client.post(route.path, json=body)
            return replace(_whole(route, response), digest=response.headers.get(HEADER))
        async with client.stream("POST", route.path, json=body) as response:
            if response.status_code != 200:
                error = _text_of_error(await response.aread())
                return Answer(response.status_code, error=error, digest=response.headers.get(HEADER))
            return replace(await _streamed(route, response, leave_after), digest=response.headers.get(HEADER))
    except httpx.TransportError as error:
        return Answer(0, is_whole=False, error=f"{type(error).__name__}: {error}")


async def tokenize(client: httpx.AsyncClient, model: str, prompt: int) -> Answer:
    """`/tokenize` with a `model`: the answer's tokens are those of the prompt."""
    try:
        answer = await client.post("/tokenize", json={"model": model, "prompt": PROMPTS[prompt]})
    except httpx.TransportError as error:
        return Answer(0, token_ids=(), is_whole=False, error=f"{type(error).__name__}: {error}")
    digest = answer.headers.get(HEADER)
    if answer.status_code != 200:
        return Answer(answer.status_code, token_ids=(), error=_text_of_error(answer.content), digest=digest)
    return Answer(200, token_ids=tuple(answer.json()["tokens"]), digest=digest)


def _whole(route: Route, response: httpx.Response) -> Answer:
    if response.status_code != 200:
        return Answer(response.status_code, error=_text_of_error(response.content))
    page = response.json()
    if route.path.endswith("responses"):
        return _of_response(page)
    (choice,) = page["choices"]
    text = choice["text"] if route.form == "text" else choice["message"]["content"] or ""
    ids = tuple(choice.get("token_ids") or ())
    return Answer(200, text, ids, reason=choice["finish_reason"] or "none")


def _of_response(page: Mapping[str, Any]) -> Answer:
    text = "".join(part["text"] for item in page["output"] if item["type"] == "message" for part in item["content"])
    why = (page.get("incomplete_details") or {}).get("reason")
    is_length = page["status"] == "incomplete" and why == "max_output_tokens"
    return Answer(200, text, reason="length" if is_length else f"{page['status']} {why}")


async def _streamed(route: Route, response: httpx.Response, leave_after: int | None) -> Answer:
    texts: list[str] = []
    ids: list[int] = []
    reason, count = "none", 0
    is_responses = route.path.endswith("responses")
    async for event in events(response):
        if "error" in event and event["error"] is not None:
            error = str(event["error"])
            return Answer(200, "".join(texts), None if is_responses else tuple(ids), False, "error", error)
        if is_responses:
            if event["type"] == "response.output_text.delta":
                texts.append(event["delta"])
                count += 1
            elif event["type"] in ("response.completed", "response.incomplete", "response.failed"):
                reason = _of_response(event["response"]).reason
        else:
            for choice in event["choices"]:
                text = choice["text"] if route.form == "text" else choice["delta"].get("content")
                texts.append(text or "")
                ids.extend(choice.get("token_ids") or ())
                reason = choice["finish_reason"] or reason
                count += 1
        if leave_after is not None and count > leave_after:
            return Answer(0, "".join(texts), None if is_responses else tuple(ids), False, "left")
    is_whole = reason != "none"
    return Answer(200, "".join(texts), None if is_responses else tuple(ids), is_whole, reason)


def _text_of_error(content: bytes) -> str:
    try:
        page = json.loads(content)
        return str(page["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:300].decode(errors="replace")


async def left_early(asking: asyncio.Task[Answer], after_s: float) -> Answer:
    """What came of a request whose client leaves after so long."""
    done, _ = await asyncio.wait([asking], timeout=after_s)
    if not done:
        asking.cancel()
        await asyncio.wait([asking])
    if asking.cancelled():
        return Answer(0, token_ids=(), is_whole=False, reason="left")
    return asking.result()
