"""A web server with adapters, whose answers a test changes; the fixture `web`."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from urllib.parse import unquote

import pytest


class WebFiles(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    status: int | None = None
    etags = True

    def do_GET(self) -> None:
        data = self.files.get(unquote(self.path))
        if self.status or data is None:
            self.head(self.status or 404, {"Content-Length": "0"})
            return
        head = {"ETag": f'"{hash(data)}"'} if self.etags else {}
        ranged, size, code = self.headers.get("Range"), len(data), 200
        if ranged:
            start, end = map(int, ranged.removeprefix("bytes=").split("-"))
            head["Content-Range"], code = f"bytes {start}-{end}/{size}", 206
            data = data[start : end + 1]
        self.head(code, {**head, "Content-Length": str(len(data))})
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def web() -> Iterator[tuple[str, type[WebFiles]]]:
    handler = type("Files", (WebFiles,), {"files": {}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/l/{{lora_name}}", handler
    server.shutdown()
    thread.join()
    server.server_close()
