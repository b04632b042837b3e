"""A reverse proxy between a program and `vllm serve` that keeps what was asked and answered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_HOP = {"host", "content-length", "transfer-encoding", "content-encoding", "connection"}


@dataclass
class Call:
    """One request of a model, and its answer as text."""

    path: str
    body: dict[str, Any]
    status: int
    digest: str | None
    answer: str

    @property
    def model(self) -> str:
        return str(self.body.get("model"))


@dataclass
class Recorder:
    """`url`: where programs ask. `calls`: requests of these routes, in the order of their ends."""

    upstream: str
    url: str = ""
    calls: list[Call] = field(default_factory=list)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        sent = await request.read()
        body = json.loads(sent) if sent.startswith(b"{") else {}
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        given = bytearray()
        async with self._session.request(
            request.method, self.upstream + request.path_qs, data=sent, headers=headers
        ) as answer:
            passed = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                given += piece
                await response.write(piece)
        await response.write_eof()
        if request.path in ROUTES:
            digest, text = answer.headers.get("x-lora-digest"), given.decode(errors="replace")
            self.calls.append(Call(request.path, body, answer.status, digest, text))
        return response

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Recorder]:
        """Listen on loopback while the block runs."""
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(application, shutdown_timeout=1)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as self._session:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()
