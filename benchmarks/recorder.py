"""A reverse proxy between a program, unchanged, and `vllm serve`, that keeps what was asked and answered."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

_HOP = {"host", "content-length", "transfer-encoding", "content-encoding", "connection"}


@dataclass
class Call:
    """One request and its answer as text; `status` is None where the program left before the answer's end."""

    path: str
    body: dict[str, Any]
    began_s: float = 0.0
    ended_s: float = 0.0
    status: int | None = None
    digest: str | None = None
    answer: str = ""

    @property
    def model(self) -> str:
        return str(self.body.get("model"))

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@dataclass
class Recorder:
    """`url`: where programs ask. `calls`: all requests, in the order of their beginnings."""

    upstream: str
    url: str = ""
    calls: list[Call] = field(default_factory=list)

    async def before_answer(self, call: Call, given: bytes) -> bytes:
        """What a program gets in place of `given`, the whole answer of a call without a stream."""
        return given

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        sent = await request.read()
        call = Call(request.path, json.loads(sent) if sent.startswith(b"{") else {}, time.monotonic())
        self.calls.append(call)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        try:
            async with self._session.request(
                request.method, self.upstream + request.path_qs, data=sent, headers=headers
            ) as answer:
                passed = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
                call.digest = answer.headers.get("x-lora-digest")
                if answer.content_type == "text/event-stream":
                    response, given = web.StreamResponse(status=answer.status, headers=passed), b""
                    await response.prepare(request)
                    async for piece in answer.content.iter_any():
                        given += piece
                        await response.write(piece)
                else:
                    given = await answer.read()
            call.status, call.answer = answer.status, given.decode(errors="replace")
        finally:
            call.ended_s = time.monotonic()
        if answer.content_type != "text/event-stream":
            body = await self.before_answer(call, given)
            return web.Response(status=answer.status, headers=passed, body=body)
        await response.write_eof()
        return response

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Listen on loopback while the block runs."""
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        # So that a program that leaves ends its request at the server too.
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1)
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        ) as self._session:
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield self
            finally:
                await runner.cleanup()
