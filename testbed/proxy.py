"""A reverse proxy on loopback that breaks chosen requests in chosen ways, and remembers what it was asked.

    with fault_proxy(s3.url) as proxy:
        proxy.plan(faults.reset(after=100_000), path=r"\\.safetensors$", times=2)
        proxy.plan(faults.slow_down(), method="GET", path="list-type=2")
        ...
        assert proxy.count("GET", r"config\\.json") == 1

Faults are looked for in the order of their `plan`; the first that fits a request and is not used up is applied.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from testbed.faults import Fault
from testbed.listener import Listener, reset

_HOP_BY_HOP = frozenset(
    ("connection", "expect", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")
)
# After this, what was written before a reset has reached the client.
_SETTLE_S = 0.05


@dataclass
class Request:
    """One request as it was seen; `sent` is the number of body bytes handed to the client so far.

    `began` and `ended` are times of `time.monotonic`; None where it goes on.
    """

    method: str
    path: str  # decoded, without the query
    query: str
    headers: Mapping[str, str]
    range: str | None
    fault: str | None = None
    status: int | None = None
    sent: int = 0
    complete: bool = False  # the whole answer was handed over as the upstream gave it
    began: float = 0.0
    ended: float | None = None


@dataclass
class _Rule:
    fault: Fault
    method: str | None
    path: re.Pattern[str]
    skip: int
    left: float

    def take(self, method: str, target: str, asked: str | None) -> bool:
        if self.left <= 0 or (self.method and self.method != method) or not self.path.search(target):
            return False
        if self.fault.flip_in_object and not _holds(asked, self.fault.flip_at):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.left -= 1
        return True


def _holds(asked: str | None, at: int | None) -> bool:
    """Whether a GET with this Range header, or none, asks for the byte at `at`."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "bytes=0-")
    return found is not None and at is not None and int(found[1]) <= at and (not found[2] or at <= int(found[2]))


class FaultProxy(Listener):
    """The proxy: `url` for clients, `plan` and `clear` for faults, `refuse` for an outage, `requests` for asserts."""

    def __init__(self, upstream: str) -> None:
        super().__init__(self._handle)
        self.upstream = upstream.rstrip("/")
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._requests: list[Request] = []

    def plan(
        self, fault: Fault, *, method: str | None = None, path: str = "", times: int | None = 1, skip: int = 0
    ) -> None:
        """Apply `fault` to the next `times` requests (None: always) that fit, after letting `skip` of them pass.

        `path` is a regular expression that is searched in the decoded path, with `?` and the query behind it.
        """
        with self._lock:
            left = float("inf") if times is None else times
            self._rules.append(_Rule(fault, method, re.compile(path), skip, left))

    def clear(self) -> None:
        """Forget all faults; what was recorded stays."""
        with self._lock:
            self._rules.clear()

    def forget(self) -> None:
        """Forget what was recorded; faults stay."""
        with self._lock:
            self._requests.clear()

    def requests(self, method: str | None = None, path: str = "") -> list[Request]:
        """Copies of the requests so far, oldest first, that fit as in `plan`."""
        pattern = re.compile(path)
        with self._lock:
            return [
                replace(r)
                for r in self._requests
                if (method is None or r.method == method) and pattern.search(f"{r.path}?{r.query}")
            ]

    def count(self, method: str | None = None, path: str = "") -> int:
        return len(self.requests(method, path))

    def counts(self) -> Counter[tuple[str, str]]:
        """Number of requests by method and path."""
        return Counter((r.method, r.path) for r in self.requests())

    def bytes_sent(self, path: str = "") -> int:
        """Body bytes handed to clients for GETs that fit."""
        return sum(r.sent for r in self.requests("GET", path))

    def refetched(self) -> list[tuple[str, str | None]]:
        """Path and Range of every GET that was asked again after it had been answered completely."""
        done: set[tuple[str, str | None]] = set()
        again = []
        for r in self.requests("GET"):
            key = (f"{r.path}?{r.query}", r.range)
            if key in done:
                again.append(key)
            if r.complete:
                done.add(key)
        return again

    async def setup(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def teardown(self) -> None:
        await self._session.close()

    def _admit(self, request: web.BaseRequest) -> tuple[Request, Fault | None]:
        path, _, query = request.raw_path.partition("?")
        headers = CIMultiDict(request.headers)
        seen = Request(request.method, unquote(path), query, headers, headers.get("Range"), began=time.monotonic())
        with self._lock:
            self._requests.append(seen)
            target = f"{seen.path}?{query}" if query else seen.path
            fault = next((rule.fault for rule in self._rules if rule.take(seen.method, target, seen.range)), None)
        seen.fault = fault.name if fault else None
        return seen, fault

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        seen, fault = self._admit(request)
        try:
            return await self._answer(request, seen, fault)
        finally:
            seen.ended = time.monotonic()

    async def _answer(self, request: web.BaseRequest, seen: Request, fault: Fault | None) -> web.StreamResponse:
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            # aiohttp does this for applications only; botocore sends no body before it.
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await request.content.read()
        fault = fault or Fault("none")
        if fault.stall_s and fault.stall_after is None:
            await asyncio.sleep(fault.stall_s)
        if fault.before is not None:
            await asyncio.to_thread(fault.before)
        if fault.status is not None:
            seen.status = fault.status
            return web.Response(status=fault.status, body=fault.body, headers=fault.headers)
        headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP)
        url = URL(self.upstream + request.raw_path, encoded=True)
        try:
            upstream = await self._session.request(
                request.method, url, headers=headers, data=body or None, allow_redirects=False
            )
        except aiohttp.ClientError as error:
            seen.status = 502
            return web.Response(status=502, text=f"{type(error).__name__}: {error}")
        async with upstream:
            seen.status = upstream.status
            if fault.after is not None:
                await asyncio.to_thread(fault.after)
            return await self._pass_on(request, upstream, fault, seen)

    async def _pass_on(
        self, request: web.BaseRequest, upstream: aiohttp.ClientResponse, fault: Fault, seen: Request
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
        for name, value in upstream.headers.items():
            if name.lower() not in _HOP_BY_HOP:
                response.headers.add(name, value)
        response.headers.update(fault.headers)
        for name in (name for name, value in fault.headers.items() if not value):
            del response.headers[name]
        announced = upstream.headers.get("Content-Length")
        length = None if announced is None else int(announced) + fault.length_delta
        if length is not None:
            response.content_length = length
        await response.prepare(request)
        if request.method == "HEAD":
            seen.complete = fault.length_delta == 0
            return response
        limit = length if fault.length_delta < 0 else None
        cuts = [n for n in (fault.cut_after, limit) if n is not None]
        try:
            async for piece in self._body(upstream, fault, min(cuts) if cuts else None):
                await response.write(piece)
                seen.sent += len(piece)
        except aiohttp.ClientPayloadError:
            # The upstream broke off by itself; so does this side.
            await self._cut(request, Fault("upstream", cut_with_reset=True))
            return response
        if fault.cut_after is not None or fault.length_delta > 0:
            await self._cut(request, fault)
        seen.complete = not cuts and fault.flip_at is None and fault.length_delta == 0 and not fault.headers
        return response

    @staticmethod
    async def _body(upstream: aiohttp.ClientResponse, fault: Fault, limit: int | None) -> AsyncIterator[bytes]:
        """The upstream's body with the fault in it, at most `limit` bytes."""
        at, began = 0, time.monotonic()
        flip_at = fault.flip_at
        if flip_at is not None and fault.flip_in_object:
            start = re.match(r"bytes (\d+)-", upstream.headers.get("Content-Range", ""))
            flip_at -= int(start.group(1)) if start else 0
        stalled = fault.stall_after is None
        most = 1 << 18 if fault.bytes_per_s is None else max(1, int(fault.bytes_per_s / 20))
        while limit is None or at < limit:
            want = most if limit is None else min(most, limit - at)
            if not stalled:
                if at == fault.stall_after:
                    stalled = True
                    await asyncio.sleep(fault.stall_s)
                else:
                    want = min(want, fault.stall_after - at)
            piece = await upstream.content.read(want)
            if not piece:
                return
            if flip_at is not None and at <= flip_at < at + len(piece):
                broken = bytearray(piece)
                broken[flip_at - at] ^= 0xFF
                piece = bytes(broken)
            yield piece
            at += len(piece)
            if fault.bytes_per_s is not None:
                await asyncio.sleep(max(0.0, began + at / fault.bytes_per_s - time.monotonic()))

    @staticmethod
    async def _cut(request: web.BaseRequest, fault: Fault) -> None:
        transport = request.transport
        if transport is None:
            return
        for _ in itertools.takewhile(lambda _: transport.get_write_buffer_size(), range(100)):
            await asyncio.sleep(0.01)
        if fault.cut_with_reset:
            await asyncio.sleep(_SETTLE_S)
            reset(transport)
        else:
            transport.close()


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """Run a proxy in front of `upstream` until the block ends."""
    proxy = FaultProxy(upstream)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
