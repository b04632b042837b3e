"""A reverse proxy between a trainer and `vllm serve` that keeps what was asked and answered; trainers stay unchanged.

It copies the directory of each adapter that is loaded, as trainers delete theirs.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
# In vLLM's answer, which slots a trainer may count on.
SERVER_INFO = "/server_info"


@dataclass
class Call:
    """One request and its answer; `status` is None where the trainer left before."""

    path: str
    body: dict[str, Any]
    began_s: float
    ended_s: float = 0.0
    status: int | None = None
    digest: str | None = None
    answer: Any = None

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@dataclass
class Recorder:
    """Attributes:
    url: where trainers ask.
    kept: the folder with a copy of each loaded adapter, by its name.
    status: what the trainer ended with.
    slots: what `/server_info` says of `--max-loras`, where a trainer refuses a server for having fewer than it asks.
    """

    upstream: str
    kept: Path
    slots: int | None = None
    url: str = ""
    status: int | None = None
    calls: list[Call] = field(default_factory=list)

    async def _pass_on(self, request: web.Request) -> web.Response:
        sent = await request.read()
        body = json.loads(sent) if sent.startswith(b"{") else {}
        call = Call(request.path, body, time.monotonic())
        self.calls.append(call)
        try:
            headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
            async with self._session.request(
                request.method, self.upstream + request.path_qs, data=sent, headers=headers
            ) as answer:
                given, call.status = await answer.read(), answer.status
            call.digest = answer.headers.get("x-lora-digest")
        finally:
            call.ended_s = time.monotonic()
        if call.path in (COMPLETIONS, UNLOAD, LOAD):
            call.answer = json.loads(given) if given.startswith(b"{") else given.decode()
        if call.path == LOAD and call.status == 200:
            await asyncio.to_thread(shutil.copytree, body["lora_path"], self.kept / body["lora_name"])
        if call.path == SERVER_INFO and self.slots:
            info = json.loads(given)
            info["vllm_config"]["lora_config"]["max_loras"] = self.slots
            given = json.dumps(info).encode()
        return web.Response(body=given, status=answer.status, content_type=answer.content_type)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Recorder]:
        """Listen on loopback while the block runs."""
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        # So that a trainer that leaves ends its request at the server too.
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1)
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        ) as self._session:
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield self
            finally:
                await runner.cleanup()
