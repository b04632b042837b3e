"""The admin API on a port: real routes, rule of access and lifecycle, before a made-up worker and made-up sources."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import uvicorn
import vllm
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import Metric
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from lora_plugins.api.access.administrators import Administrators
from lora_plugins.api.access.policy import Policy
from lora_plugins.api.access.principals import KnowPrincipal
from lora_plugins.api.routes import router
from lora_plugins.lifecycle.pushing import Pushes
from lora_plugins.observability.engine_metrics import families
from lora_plugins.observability.event_metrics import CountEvents
from tests.lifecycle.world import Version, World

KEY = "admin-key"


class _OfPlanner:
    """The metrics of a planner that has nothing to say yet."""

    def collect(self) -> Iterator[Metric]:
        return families("tiny", {}, 10)


class AdminServer:
    """One server; `world` is what it serves from, to be changed through `has` only."""

    def __init__(self, *, administrators: Administrators, metrics: bool) -> None:
        self.world: World
        self.loop: asyncio.AbstractEventLoop
        self.has: dict[str, object] = {}
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._ready = threading.Event()
        app = self.app = FastAPI(lifespan=self._lifespan)
        app.state.args = SimpleNamespace(log_error_stack=False)
        app.include_router(router)

        @app.get("/version")
        async def version() -> dict[str, str]:
            return {"version": vllm.__version__}

        if metrics:
            registry = CollectorRegistry()
            CountEvents(registry, 10)
            registry.register(_OfPlanner())  # type: ignore[arg-type]
            app.mount("/metrics", make_asgi_app(registry))
        app.add_middleware(KnowPrincipal, administrators=administrators)
        init_exception_handler(app)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.world, self.loop = World(), asyncio.get_running_loop()
        self.world.resolver.has = self.has  # type: ignore[assignment]
        app.state.lora_plugins_lifecycle = self.world.lifecycle
        app.state.lora_plugins_pushes = Pushes(self.world.lifecycle)
        self._ready.set()
        yield

    def run(self) -> None:
        asyncio.run(self.server.serve([self._socket]))

    def wait(self) -> None:
        assert self._ready.wait(60)
        while not self.server.started:  # the socket listens only some time after its application is ready
            time.sleep(0.01)

    def publish(self, name: str, digest: str) -> None:
        """Let the sources have this version of a name, whose digest is `digest` to the end."""
        self.has[name] = Version((digest * 64)[:64], version=digest, uri=f"s3://adapters/{name}")


@contextmanager
def admin_server(*, key: str | None = KEY, policy: Policy | None = None, metrics: bool = True) -> Iterator[AdminServer]:
    """Run one until the block ends."""
    made = AdminServer(administrators=Administrators(policy, key), metrics=metrics)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    made.wait()
    try:
        yield made
    finally:
        made.server.should_exit = True
        thread.join(60)
