"""Clients: each asks one request after the other, as its own random numbers say, and has every answer judged."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx

from benchmarks.soak.bank import MAX_TOKENS, PROMPTS
from benchmarks.soak.journal import Journal
from benchmarks.soak.oracle import Answer, Asked
from benchmarks.soak.routes import ROUTES, Route, ask, left_early, tokenize
from benchmarks.soak.world import World
from testbed.client import PLAIN_HTTP

# No request may take longer: a look-up on the Hub has 30 s, a fetch 20 s and its retries, and the queue for a slot.
LONGEST_REQUEST_S = 120.0
# Nor one that no fault can have held up; most of it is for a loaded machine.
LONGEST_WITHOUT_FAULT_S = 60.0


def connect(url: str, timeout_s: float = LONGEST_REQUEST_S) -> httpx.AsyncClient:
    """A client of the server at `url`."""
    limits = httpx.Limits(max_keepalive_connections=2, keepalive_expiry=5)
    return httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits, verify=PLAIN_HTTP)


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
