"""Faults of S3 and the Hub: slow, refusing, lying, truncated, reset, damaged, and gone, in any order and at once.

The proxies say which requests a fault has hit, and so whom it may refuse. A fault is over for a source's other names
when the source has answered a look-up since; the soak itself asks until then, and that has a limit too. Who was
refused is asked again when nothing can explain a refusal any more.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

import httpx

from soak.clients import Target, connect
from soak.journal import Journal
from soak.oracle import AFTER_S, UNASKED, Cause, of_source
from soak.world import World
from testbed import faults
from testbed.faults import Fault
from testbed.hub import Hub
from testbed.proxy import FaultProxy, Request

_MOST_S = 8.0
# A server that is up asks a source again a second after the last time; the rest is for a loaded machine.
LONGEST_RECOVERY_S = 60.0
_ASK_EVERY_S = 0.5
_PAGE = b"<html><head><title>Sign in</title></head><body>A captive portal</body></html>"


def named(source: str, request: Request) -> str | None:
    """The name that a request to a source is about; None where it is about none, or about many."""
    target = unquote(f"{request.path}?{request.query}")
    if source == "s3":
        found = re.search(r"\b(?:loras|uris)/([^&?]+)", target)
    else:
        found = re.search(r"^/(?:api/models/|other/|(?=acme/))+((?:acme/)?[^/?]+)", target)
    return None if found is None else found[1].split("/adapter_")[0].rstrip("/")


class Hits:
    """The requests that faults of one source have hit, as causes."""

    def __init__(self, source: str, proxy: FaultProxy, world: World) -> None:
        self._source, self._proxy, self._world = source, proxy, world
        self._causes: dict[tuple[float, str, str], Cause] = {}
        world.oracle.causes.look.append(self.note)

    def note(self) -> None:
        """Whatever has been hit until now, and what has ended meanwhile."""
        for request in self._proxy.requests():
            if request.fault is None:
                continue
            key = request.began, request.path, request.query
            cause = self._causes.get(key)
            if cause is None:
                whom = named(self._source, request) or of_source(self._source)
                cause = Cause(f"{self._source}: {request.fault}", whom, request.began)
                self._causes[key] = self._world.oracle.causes.add(cause)
            if request.ended is not None:
                cause.ended = min(cause.ended, request.ended + AFTER_S)

    def forget(self) -> None:
        """Drop the proxy's record, unless a request that was hit goes on."""
        self.note()
        if all(request.ended is not None for request in self._proxy.requests()):
            self._proxy.forget()
            self._causes.clear()


class Kind(NamedTuple):
    """A fault, where it is put in (parts of paths, and a method), and how often it is drawn."""

    name: str
    make: Callable[[random.Random], Fault | None]
    path: str = ""
    method: str | None = None


@dataclass(frozen=True)
class _Source:
    name: str
    proxy: FaultProxy
    hits: Hits
    kinds: Sequence[Kind]
    idle: asyncio.Lock


class SourceFaults:
    """Injects them while a soak runs: those of one source one after the other, those of two at once."""

    def __init__(
        self, seed: int, proxies: dict[str, FaultProxy], hub: Hub, world: World, target: Target, journal: Journal
    ) -> None:
        self._seed = seed
        self._hub = hub
        self._oracle = world.oracle
        self._world = world
        self._target = target
        self._journal = journal
        self._numbers = itertools.count()
        self._sources = [
            _Source(name, proxy, Hits(name, proxy, world), (*_ANY, *_LIES[name]), asyncio.Lock())
            for name, proxy in proxies.items()
        ]

    async def run(self, done: asyncio.Event, pause_s: float) -> None:
        """Until `done`; a source's fault begins `pause_s` after its last one has ended, on average."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._run(source, done, pause_s))

    async def _run(self, source: _Source, done: asyncio.Event, pause_s: float) -> None:
        rng = random.Random(f"{self._seed}-faults-{source.name}")
        while not done.is_set():
            await asyncio.sleep(rng.expovariate(1 / pause_s))
            kind, lasts_s = rng.choice(source.kinds), _MOST_S * rng.random()
            times, fault = rng.choice((1, 3, None, None)), kind.make(rng)
            async with source.idle:
                if not done.is_set():
                    self._journal.write("fault", kind.name, source.name, lasts_s, times=times)
                    async with self._on(source, kind, fault, times):
                        await asyncio.sleep(lasts_s)
            source.hits.forget()
            self._hub.forget()

    @asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        """No source answers while the block runs; it ends when all have answered again."""
        self._journal.write("fault", "outage", "all")
        async with AsyncExitStack() as stack:
            for source in self._sources:
                await stack.enter_async_context(self._on(source, _GONE, None, None))
            yield

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """No other fault is on while the block runs."""
        async with AsyncExitStack() as stack:
            for source in self._sources:
                await stack.enter_async_context(source.idle)
            yield

    @asynccontextmanager
    async def _on(self, source: _Source, kind: Kind, fault: Fault | None, times: int | None) -> AsyncIterator[None]:
        """The fault, and what it takes until it is over."""
        causes, began = self._oracle.causes, time.monotonic()
        whom, what = of_source(source.name), f"{source.name}: {kind.name}"
        # Who is not asked is refused as well; and a source that is gone leaves no record of who asked.
        everybody = causes.add(Cause(what, whom, began, texts=() if fault is None else UNASKED))
        # URIs have a breaker of their own, that only their look-ups close.
        by_uri = causes.add(Cause(what, of_source(f"{source.name} uris"), began, texts=UNASKED))
        try:
            if fault is None:
                await asyncio.to_thread(source.proxy.refuse)
            else:
                source.proxy.plan(fault, times=times, path=kind.path, method=kind.method)
            yield
        finally:
            source.proxy.clear()
            if fault is None:
                await asyncio.to_thread(source.proxy.refuse, False)
        # Not where the soak is ended: there may be no server that could ask.
        await self._recover(source, time.monotonic())
        everybody.ended = time.monotonic() + AFTER_S
        by_uri.ended = time.monotonic() + LONGEST_RECOVERY_S

    async def _recover(self, source: _Source, since: float) -> None:
        """Ask for a name that nobody has until the source has been asked again, and has answered."""
        while True:
            name = f"acme/probe-{next(self._numbers)}"
            if self._target.url:
                began = time.monotonic()
                await self._ask(name)
                if any(
                    named(source.name, request) == name and request.fault is None and request.ended is not None
                    for request in source.proxy.requests()
                ):
                    return
                if began - max(since, self._target.since) > LONGEST_RECOVERY_S:
                    text = f"{source.name} was not asked for {LONGEST_RECOVERY_S:.0f} s after its fault had ended"
                    self._journal.violation("a fault passes", text)
                    return
            await asyncio.sleep(_ASK_EVERY_S)

    async def _ask(self, name: str) -> None:
        try:
            async with connect(self._target.url) as client:
                await client.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1})
        except httpx.HTTPError:
            return  # the server was killed


_ANY = (
    Kind("slow", lambda rng: faults.throttle(20_000 + 200_000 * rng.random())),
    Kind("stall", lambda rng: faults.stall(3 * rng.random(), after=rng.choice((None, 100, 5_000)))),
    Kind("503", lambda rng: faults.slow_down(rng.choice((None, 1)))),
    Kind("500", lambda rng: faults.server_error()),
    Kind("truncated", lambda rng: faults.short(rng.choice((0, 100, 5_000)))),
    Kind("shortened", lambda rng: faults.wrong_length(-rng.choice((1, 100)))),
    Kind("reset", lambda rng: faults.reset(rng.choice((0, 100, 5_000)))),
    # A listing with a changed byte may say anything; weights have a digest that they are compared with.
    Kind("damaged", lambda rng: faults.flip(rng.randrange(5_000)), r"safetensors"),
)
_GONE = Kind("gone", lambda rng: None)


def _other_checksum(rng: random.Random) -> Fault:
    """A digest that is not that of the bytes: S3's is an MD5, the Hub's a SHA-256."""
    sha256 = f"{rng.getrandbits(256):064x}"
    return faults.relabelled({"ETag": f'"{sha256[:32]}"', "X-Linked-ETag": f'"{sha256}"'})


# What is no answer of the source, although it looks like one.
_LIES = {
    "s3": (
        _GONE,
        Kind("page", lambda rng: faults.status(200, _PAGE, {"Content-Type": "text/html"}), r"list-type=2"),
        Kind("nothing", lambda rng: faults.status(200), r"list-type=2"),
        Kind("bare 404", lambda rng: faults.status(404, rng.choice((b"", _PAGE))), method="GET"),
        Kind("other checksum", _other_checksum, r"safetensors"),
    ),
    "hub": (
        _GONE,
        Kind("page", lambda rng: faults.status(200, _PAGE, {"Content-Type": "text/html"}), r"^/api/models"),
        Kind("bare 404", lambda rng: faults.status(404, _PAGE), r"^/api/models"),
        Kind("other checksum", _other_checksum, r"safetensors"),
    ),
}
