"""Clients: each asks one request after the other, as its own random numbers say, and has every answer judged.

First the routes that they ask, and how an answer of each is read as tokens or text.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx

from lora_plugins.lifecycle.response import HEADER
from soak.bank import MAX_TOKENS, PROMPTS
from soak.journal import Journal
from soak.oracle import Answer, Asked
from soak.world import World
from testbed.client import PLAIN_HTTP
from testbed.events import events

# No request may take longer: a look-up on the Hub has 30 s, a fetch 20 s and its retries, and the queue for a slot.
LONGEST_REQUEST_S = 120.0
# Nor one that no fault can have held up; most of it is for a loaded machine.
LONGEST_WITHOUT_FAULT_S = 60.0


def connect(url: str, timeout_s: float = LONGEST_REQUEST_S) -> httpx.AsyncClient:
    """A client of the server at `url`."""
    limits = httpx.Limits(max_keepalive_connections=2, keepalive_expiry=5)
    return httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits, verify=PLAIN_HTTP)


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


@dataclass
class Target:
    """The server that is asked, and since when; another one after a restart, and none (no URL) while there is none."""

    url: str
    base: str
    since: float = 0.0


@dataclass(frozen=True)
class Step:
    """What a client does next; decided by its random numbers alone.

    Attributes:
        leave_after_s: when it leaves; each time that it gives up, where it retries.
        leave_after: the piece of a stream after which it leaves.
        gives_up: how often it leaves and retries at once before it waits for the answer.
    """

    pause_s: float
    name: str
    adapter: int | None
    route: Route | None  # None: /tokenize
    prompt: int
    max_tokens: int
    leave_after_s: float | None = None
    leave_after: int | None = None
    gives_up: int = 0
    is_retry: bool = False

    def tries(self) -> Iterator[Step]:
        """What it asks, one after the other without a pause."""
        if not self.gives_up:
            yield self
            return
        for at in range(self.gives_up):
            yield replace(self, is_retry=at > 0)
        yield replace(self, leave_after_s=None, is_retry=True)


class Steps:
    """The sequence of one client: the same for the same seed and number, whatever the server answers."""

    def __init__(self, seed: int, number: int, world: World, base: str) -> None:
        self._rng = random.Random(f"{seed}-client-{number}")
        self._base = base
        # Every client has favourites of its own, and all share some: adapters stay in slots, and come back to them.
        order = random.Random(f"{seed}-popularity").sample(world.names, len(world.names))
        self._popular = order[number % 5 :] + order[: number % 5]

    def next(self) -> Step:
        rng = self._rng
        draw, one = rng.random(), self._popular[int(len(self._popular) * rng.random() ** 3)]
        name, adapter = (one.name, one.adapter)
        if draw < 0.03:
            name, adapter = f"nobody-{rng.randrange(10_000)}", None
        elif draw < 0.07:
            name, adapter = self._base, -1
        route = None if rng.random() < 0.04 else rng.choice(ROUTES)
        leaves, waits = rng.random(), rng.random()
        return Step(
            pause_s=rng.expovariate(5.0),
            name=name,
            adapter=adapter,
            route=route,
            prompt=rng.randrange(len(PROMPTS)),
            max_tokens=rng.choice((1, 4, 8, 16, MAX_TOKENS)),
            leave_after_s=0.6 * waits**2 if leaves < 0.08 else None,
            leave_after=int(8 * waits) if 0.08 <= leaves < 0.14 else None,
        )


class ImpatientSteps(Steps):
    """Those of a client that leaves soon, and asks for the same again within a millisecond.

    Its adapters are among those that others ask for least: room is made for them, and nobody else's request has them
    loaded.
    """

    def next(self) -> Step:
        rng, one = self._rng, self._popular[-1 - self._rng.randrange(20)]
        return Step(
            pause_s=rng.expovariate(5.0),
            name=one.name,
            adapter=one.adapter,
            route=rng.choice(ROUTES),
            prompt=rng.randrange(len(PROMPTS)),
            max_tokens=rng.choice((1, 4, 8)),
            leave_after_s=0.1 * rng.random() ** 2,
            gives_up=rng.choice((1, 1, 2, 4)),
        )


async def run_client(
    steps: Steps, number: int, world: World, target: Target, journal: Journal, done: asyncio.Event
) -> None:
    """Ask until `done`."""
    while not done.is_set():
        url = target.url
        if not url:
            await asyncio.sleep(0.1)
            continue
        async with connect(url) as client:
            while not done.is_set() and target.url == url:
                step = steps.next()
                await asyncio.sleep(step.pause_s)
                for one in step.tries():
                    await _take(one, number, client, world, journal)


async def ask_again(world: World, target: Target, journal: Journal, done: asyncio.Event) -> None:
    """Ask for whom a fault had refused as soon as nothing explains a refusal any more, until `done`."""
    while not done.is_set():
        await asyncio.sleep(1)
        for name in world.oracle.no_longer_refused() if target.url else ():
            one = world.by_name.get(name)
            step = Step(0.0, name, one.adapter if one else None, ROUTES[0], 0, 1, is_retry=True)
            async with connect(target.url) as client:
                await _take(step, -1, client, world, journal)


async def _take(step: Step, number: int, client: httpx.AsyncClient, world: World, journal: Journal) -> None:
    began = time.monotonic()
    form = step.route.form if step.route else "text"
    if step.route is None:
        answer = await tokenize(client, step.name, step.prompt)
        ended = time.monotonic()
    else:
        body = step.route.body(step.name, step.prompt, step.max_tokens)
        asking = asyncio.create_task(ask(client, step.route, body, step.leave_after))
        answer = await (asking if step.leave_after_s is None else left_early(asking, step.leave_after_s))
        ended = time.monotonic()
    asked = Asked(step.name, step.adapter, form, step.prompt, step.max_tokens, began, ended)
    what = step.route.name if step.route else "tokenize"
    wrong = _judged(asked, answer, world) if step.route else _judged_prompt(asked, answer, world)
    outcome = answer.reason if answer.reason == "left" else answer.status
    details = {"client": number, "model": step.name, "prompt": step.prompt, "max_tokens": step.max_tokens}
    journal.write(
        "retry" if step.is_retry else "request", what, outcome, ended - began, **details, error=answer.error[:200]
    )
    if wrong is not None:
        claims = world.oracle.of(step.name).history() if step.name in world.by_name else {}
        is_silent = step.is_retry and answer.status == 0
        invariant = "a retry is answered" if is_silent else "every answer is right"
        journal.violation(invariant, wrong, **details, began_s=began - journal.started, claims=claims)
    if ended - began > (LONGEST_REQUEST_S if world.oracle.may_be_late(asked) else LONGEST_WITHOUT_FAULT_S):
        journal.violation("nothing waits for ever", f"{what} took {ended - began:.0f} s", **details)


def _judged(asked: Asked, answer: Answer, world: World) -> str | None:
    if answer.status == 0 and answer.reason != "left" and not world.oracle.is_down(asked.began, asked.ended):
        return f"no answer: {answer.error}"
    return world.oracle.judge(asked, answer)


def _judged_prompt(asked: Asked, answer: Answer, world: World) -> str | None:
    if answer.status != 200:
        return _judged(asked, answer, world)
    expected = world.bank.prompt_ids[asked.form, asked.prompt]
    if answer.token_ids != expected:
        return f"{answer.token_ids} are the prompt's tokens, found {expected}"
    if asked.adapter is None:
        return "an answer for a name that nobody has"
    return world.oracle.judge_digest(asked, answer)
