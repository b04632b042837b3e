"""Pushes over real connections whose lengths lie, or that stall: refused with 4xx or 503, and nothing is kept."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import uvicorn
from fastapi import FastAPI
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from lora_plugins.api.routes import router
from lora_plugins.lifecycle import arrivals
from tests.api.test_push_body import FILES, ONE_FILE, parts
from tests.lifecycle.test_pushing import Names

LENGTH = len(ONE_FILE)
ZIPPED = gzip.compress(ONE_FILE)
CHUNK = b"%x\r\n" % LENGTH + ONE_FILE + b"\r\n"
MULTIPART = "Content-Type: multipart/form-data; boundary=b0undary"

# Headers, a body, and what is answered by each of uvicorn's two parsers.
HOSTILE: dict[str, tuple[list[str], bytes, str]] = {
    "less than is said": ([f"Content-Length: {LENGTH + 5}"], ONE_FILE, "400.*L005"),
    "more than is said": ([f"Content-Length: {LENGTH - 5}"], ONE_FILE, "400"),
    "two lengths": ([f"Content-Length: {LENGTH}", f"Content-Length: {LENGTH + 5}"], ONE_FILE, "400"),
    "a length and chunks": (["Content-Length: 5", "Transfer-Encoding: chunked"], CHUNK + b"0\r\n\r\n", "400"),
    "a length of 18 digits": ([f"Content-Length: {'9' * 18}"], ONE_FILE, "400.*L005.* or more"),
    "a length of 5000 digits": ([f"Content-Length: {'9' * 5000}"], ONE_FILE, "400"),
    "a negative length": (["Content-Length: -5"], ONE_FILE, "400"),
    "chunks without an end": (["Transfer-Encoding: chunked"], CHUNK, "408.*L012"),
    "a chunk that lies": (["Transfer-Encoding: chunked"], b"f" * 16 + b"\r\n" + ONE_FILE, "40[08]"),
    "gzip": (["Content-Encoding: gzip", f"Content-Length: {len(ZIPPED)}"], ZIPPED, "400.*L005.*Content-Encoding: gzip"),
    "no body": ([], b"", "400.*L005.*no weights"),
    "parts without an end": ([MULTIPART, "Transfer-Encoding: chunked"], CHUNK[:-2], "40[08].*L0"),
    "a part's header of 1 MB": (
        [MULTIPART, "Transfer-Encoding: chunked"],
        b"%x\r\n" % (19 + (1 << 20)) + b"--b0undary\r\nName: x" + b"x" * (1 << 20),
        "400.*L005",
    ),
    "parts in parts": (
        [MULTIPART, f"Content-Length: {len(parts({'x': parts(FILES)}))}"],
        parts({"x": parts(FILES)}),
        "400.*L005.*'x'",
    ),
}


class Listening:
    """A server with the admin routes and real pushes, before a made-up lifecycle."""

    def __init__(self, root: Path, parser: Literal["h11", "httptools"]) -> None:
        self.names = Names(root, timeout_s=1)
        self.names.written = lambda: asyncio.sleep(0)  # type: ignore[attr-defined]
        app = FastAPI()
        app.state.args = SimpleNamespace(log_error_stack=False)
        app.state.lora_plugins_lifecycle = self.names
        app.state.lora_plugins_pushes = self.names.pushes
        app.include_router(router)
        init_exception_handler(app)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", http=parser))
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self._socket])))
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def begin(self, headers: list[str], body: bytes) -> socket.socket:
        connection = socket.create_connection(self._socket.getsockname())
        connection.settimeout(20)
        lines = ["PUT /v1/loras/sql HTTP/1.1", "Host: here", "Connection: close", *headers, "", ""]
        with contextlib.suppress(OSError):  # answered and closed before the end of the body
            connection.sendall("\r\n".join(lines).encode() + body)
        return connection

    @staticmethod
    def end(connection: socket.socket) -> str:
        with connection:
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(1 << 16):
                    answer += piece
            return answer.decode()

    def left(self) -> list[Any]:
        """What is kept, once all answers are out."""
        for _ in range(200):
            kept = [*self.names.store.layout.temporaries(), *self.names.pushes._arrivals._places._uses]
            if not kept:
                break
            time.sleep(0.01)
        return kept


@pytest.fixture(params=["httptools", "h11"])
def listening(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    monkeypatch.setattr(arrivals, "_LEAST_S", 0.5)
    made = Listening(tmp_path / "store", request.param)
    yield made
    made.server.should_exit = True
    made.thread.join(20)


def test_lengths_that_lie_are_refused(listening: Listening) -> None:
    begun = {case: listening.begin(headers, body) for case, (headers, body, _) in HOSTILE.items()}
    for case, connection in begun.items():
        answer = listening.end(connection)
        assert re.match(rf"HTTP/1.1 {HOSTILE[case][2]}", answer, re.DOTALL), f"{case}: {answer[:400]}"
    assert not listening.left()


def test_many_slow_connections_end_and_leave_nothing(listening: Listening) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    begun = [listening.begin([f"Content-Length: {LENGTH}"], ONE_FILE[:10]) for _ in range(100)]
    for connection in begun[::3]:
        connection.close()
    statuses = {listening.end(it)[9:12] for number, it in enumerate(begun) if number % 3}
    assert statuses == {"408", "503"}
    assert not listening.left()
    assert "L005" in listening.end(listening.begin(["Content-Length: 5"], b"12345")), "a place is free again"
    assert len(os.listdir("/proc/self/fd")) <= opened + 2
