"""An HTTP server on loopback that answers by a function: another program, as clients and commands meet it."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """A request, whose path is the whole URL where the server is a client's proxy."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Answer(NamedTuple):
    """What is sent: bytes as they are, all else as JSON."""

    content: Any = b""
    status: int = 200
    headers: Mapping[str, str] = {}


@contextmanager
def http_server(answer: Callable[[Asked], Answer], context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve until the block ends; yields the URL, of `localhost` with TLS. `answer` runs in a thread a request."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            content, status, headers = answer(Asked(self.command, self.path, self.headers, body))
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_CONNECT = reply

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"{'https://localhost' if context else 'http://127.0.0.1'}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
