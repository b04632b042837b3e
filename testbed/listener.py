"""An aiohttp handler on a loopback port, in its own thread and event loop, that can refuse connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

HOST = "127.0.0.1"
_BACKLOG = 1024


class Listener:
    """Serve `handler` while the `with` block runs; `refuse` takes the port down and brings it up again.

    With `tls` the URL is of `localhost`, as certificates name it.
    """

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], tls: ssl.SSLContext | None = None
    ) -> None:
        self._handler, self._tls = handler, tls
        # Bound but never listening: the port stays ours during an outage, and connecting to it is refused.
        self._reservation = _bound(0)
        self.port = int(self._reservation.getsockname()[1])
        self.url = f"http://{HOST}:{self.port}" if tls is None else f"https://localhost:{self.port}"
        self._thread = threading.Thread(target=self._run, name=f"listener-{self.port}", daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._listening: asyncio.Server | None = None

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise RuntimeError("the listener did not start") from self._error

    def stop(self) -> None:
        """Cut every connection, cancel what runs, and end the thread."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self._reservation.close()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the listener's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def refuse(self, refused: bool = True) -> None:
        """Refuse new connections and reset the open ones, or accept again on the same port."""
        self.call(self._close() if refused else self._open())

    async def setup(self) -> None:
        """For subclasses and owners: what must be made inside the loop."""

    async def teardown(self) -> None:
        """Undo `setup`."""

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        # A client that disconnects ends its handler, also one that is stalling.
        self._web = web.Server(self._handler, handler_cancellation=True, access_log=None, keepalive_timeout=600)
        await self.setup()
        try:
            await self._open()
            self._ready.set()
            await self._stopped.wait()
        finally:
            await self._close()
            await self._web.shutdown(0)
            await self.teardown()

    async def _open(self) -> None:
        if self._listening is None:
            self._socket = _bound(self.port)
            self._listening = await self._loop.create_server(
                self._web, sock=self._socket, backlog=_BACKLOG, ssl=self._tls
            )

    async def _close(self) -> None:
        if self._listening is not None:
            with contextlib.suppress(OSError):
                # A forked child may hold the socket too; a shutdown ends it there as well.
                self._socket.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            self._listening = None
        for connection in self._web.connections:
            if connection.transport is not None:
                reset(connection.transport)


def reset(transport: asyncio.Transport) -> None:
    """End a connection with RST instead of FIN, as a crashed peer does."""
    raw = transport.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _bound(port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((HOST, port))
    return made
