"""The admin API on a port: real routes, rule of access and lifecycle, before a made-up worker and made-up sources."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import uvicorn
from fastapi import FastAPI
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from lora_plugins.api.access.administrators import Administrators
from lora_plugins.api.access.principals import KnowPrincipal
from lora_plugins.api.routes import router
from tests.server.world import Version, World

KEY = "admin-key"


class AdminServer:
    """One server; `world` is what it serves from, to be changed through `has` only."""

    def __init__(self, *, key: str | None) -> None:
        self.world: World
        self.has: dict[str, object] = {}
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._ready = threading.Event()
        app = FastAPI(lifespan=self._lifespan)
        app.state.args = SimpleNamespace(log_error_stack=False)
        app.include_router(router)
        app.add_middleware(KnowPrincipal, administrators=Administrators(key=key))
        init_exception_handler(app)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.world = World()
        self.world.resolver.has = self.has  # type: ignore[assignment]
        app.state.lora_plugins_lifecycle = self.world.lifecycle
        self._ready.set()
        yield

    def run(self) -> None:
        asyncio.run(self.server.serve([self._socket]))

    def wait(self) -> None:
        assert self._ready.wait(60)

    def publish(self, name: str, digest: str) -> None:
        """Let the sources have this version of a name, whose digest is `digest` to the end."""
        self.has[name] = Version((digest * 64)[:64], version=digest, uri=f"s3://adapters/{name}")


@contextmanager
def admin_server(*, key: str | None = KEY) -> Iterator[AdminServer]:
    """Run one until the block ends."""
    made = AdminServer(key=key)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    made.wait()
    try:
        yield made
    finally:
        made.server.should_exit = True
        thread.join(60)
