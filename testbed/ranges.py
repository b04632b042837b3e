"""A fast S3-like server for benchmarks, in a separate process: LIST, HEAD and ranged GET through `sendfile`.

Path-style only: `/bucket/key` is the file `bucket/key` below a directory, or a blob from memory. Signatures are neither
asked for nor checked. It can be given a latency per request and a speed per connection, as a distant S3 has them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import socketserver
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote
from xml.sax.saxutils import escape

from testbed.process import announce_and_wait, child

_PIECE = 1 << 20
_DATE = "2020-01-01T00:00:00.000Z"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)$")


@dataclass(frozen=True)
class RangeServer:
    """A running server: `url` is the endpoint to give to a client."""

    url: str
    pid: int = 0

    def env(self) -> dict[str, str]:
        """The variables by which an S3 client finds the server."""
        return {"AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "k",
                "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "eu-central-1"}  # fmt: skip

    def stats(self) -> Counter[str]:
        """What was asked since the start or `reset`: `requests`, `bytes`, `LIST`, `HEAD`, `GET`, and `GET /path`."""
        with urllib.request.urlopen(f"{self.url}/-/stats") as answer:
            return Counter(json.load(answer))

    def reset(self) -> None:
        with urllib.request.urlopen(f"{self.url}/-/reset") as answer:
            answer.read()


@contextmanager
def range_server(
    directory: Path | None = None,
    blobs: Mapping[str, bytes] | None = None,
    *,
    latency_s: float = 0,
    bytes_per_s: int = 0,
) -> Iterator[RangeServer]:
    """Serve `directory` or `blobs` (by `bucket/key`) until the block ends; `bytes_per_s` limits each connection."""
    with contextlib.ExitStack() as stack:
        descriptors = {}
        for name, data in (blobs or {}).items():
            file = stack.enter_context(os.fdopen(os.memfd_create(name[-200:].replace("/", "_")), "wb"))
            file.write(data)
            file.flush()
            descriptors[name] = file.fileno()
        setup = {
            "directory": str(directory) if directory is not None else None,
            "blobs": descriptors,
            "latency_s": latency_s,
            "bytes_per_s": bytes_per_s,
        }
        running = child("testbed.ranges", [json.dumps(setup)], pass_fds=tuple(descriptors.values()))
        port, process = stack.enter_context(running)
        yield RangeServer(f"http://127.0.0.1:{port}", process.pid)


class _Objects:
    """Keys of a bucket and open files for them. An ETag changes with size, time or inode of its file."""

    def __init__(self, directory: str | None, blobs: Mapping[str, int]) -> None:
        self.directory = None if directory is None else os.path.realpath(directory)
        self.blobs = dict(blobs)

    def open(self, path: str) -> int | None:
        """A descriptor of the object at `bucket/key`, for the caller to close, or None."""
        if path in self.blobs:
            return os.dup(self.blobs[path])
        if self.directory is None:
            return None
        real = os.path.realpath(os.path.join(self.directory, path))
        if not real.startswith(self.directory + os.sep) or not os.path.isfile(real):
            return None
        return os.open(real, os.O_RDONLY)

    def keys(self, bucket: str, prefix: str) -> list[tuple[str, os.stat_result]]:
        found = [(n[len(bucket) + 1 :], os.fstat(d)) for n, d in self.blobs.items() if n.startswith(f"{bucket}/")]
        if self.directory is not None:
            root = os.path.join(self.directory, bucket)
            # Only the directory that the prefix names is walked, so that a LIST in a large bucket stays cheap.
            start = os.path.realpath(os.path.join(root, os.path.dirname(prefix)))
            if start == root or start.startswith(root + os.sep):
                for folder, _, files in os.walk(start):
                    paths = (os.path.join(folder, name) for name in files)
                    found += [(os.path.relpath(path, root), os.stat(path)) for path in paths]
        return sorted((key, stat) for key, stat in found if key.startswith(prefix))


def etag(stat: os.stat_result) -> str:
    """The quoted ETag that the server gives a file."""
    return f'"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: _Objects
    latency_s: float
    bytes_per_s: int
    stats: Counter[str]
    lock: threading.Lock

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        path = unquote(path).strip("/") if path.count("/") < 2 else unquote(path)[1:]
        if path.startswith("-/"):
            self._answer(200, self._control(path).encode(), kind="application/json")
            return
        if self.latency_s:
            time.sleep(self.latency_s)
        listed = "/" not in path.rstrip("/")
        self._count(requests=1, **{"LIST" if listed else self.command: 1, f"{self.command} /{path}": 1})
        if listed:
            self._answer(200, self._list(path.rstrip("/"), dict(parse_qsl(query))).encode())
            return
        descriptor = self.objects.open(path)
        if descriptor is None:
            self._fail(404, "NoSuchKey", "The specified key does not exist.")
            return
        try:
            self._object(descriptor)
        finally:
            os.close(descriptor)

    do_HEAD = do_GET

    def _object(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        tag, size = etag(stat), stat.st_size
        if self.headers.get("If-Match", tag) not in (tag, "*"):
            self._fail(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
            return
        start, end, status = 0, size, 200
        asked = _RANGE.match(self.headers.get("Range", ""))
        if asked and any(asked.groups()):
            first, last = asked.groups()
            start, end = (int(first), int(last) + 1 if last else size) if first else (max(0, size - int(last)), size)
            end, status = min(end, size), 206
            if start >= end:
                self._fail(416, "InvalidRange", "The requested range is not satisfiable")
                return
        headers = {"ETag": tag, "Accept-Ranges": "bytes", "Last-Modified": self.date_time_string(int(stat.st_mtime))}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        self._head(status, end - start, "binary/octet-stream", headers)
        if self.command == "GET":
            self._send(descriptor, start, end)

    def _send(self, descriptor: int, start: int, end: int) -> None:
        began, at = time.monotonic(), start
        # Whole at once unless a speed is to be kept; the kernel copies, and the interpreter is free meanwhile.
        piece = max(1, min(_PIECE, self.bytes_per_s // 20)) if self.bytes_per_s else 1 << 30
        while at < end:
            sent = os.sendfile(self.connection.fileno(), descriptor, at, min(piece, end - at))
            if sent == 0:
                raise ConnectionError("the file is shorter than it was")
            at += sent
            if self.bytes_per_s:
                time.sleep(max(0, began + (at - start) / self.bytes_per_s - time.monotonic()))
        self._count(bytes=end - start)

    def _list(self, bucket: str, query: Mapping[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        limit, after = int(query.get("max-keys", 1000)), query.get("continuation-token", query.get("start-after", ""))
        shown = quote if query.get("encoding-type") == "url" else escape
        contents, folders, last = [], {}, ""
        truncated = False
        for key, stat in self.objects.keys(bucket, prefix):
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if cut < 0 else key[: cut + len(delimiter)]
            if name <= after or name in folders:
                continue
            if len(contents) + len(folders) >= limit:
                truncated = True
                break
            last = name
            if cut < 0:
                contents.append(
                    f"<Contents><Key>{shown(key)}</Key><LastModified>{_DATE}</LastModified><ETag>{escape(etag(stat))}"
                    f"</ETag><Size>{stat.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
                )
            else:
                folders[name] = f"<CommonPrefixes><Prefix>{shown(name)}</Prefix></CommonPrefixes>"
        more = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if truncated else ""
        encoding = "<EncodingType>url</EncodingType>" if shown is quote else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{escape(bucket)}</Name><Prefix>{shown(prefix)}</Prefix><MaxKeys>{limit}</MaxKeys>{encoding}"
            f"<Delimiter>{escape(delimiter)}</Delimiter><KeyCount>{len(contents) + len(folders)}</KeyCount>"
            f"<IsTruncated>{str(truncated).lower()}</IsTruncated>{more}{''.join(contents)}{''.join(folders.values())}"
            "</ListBucketResult>"
        )

    def _control(self, path: str) -> str:
        with self.lock:
            if path == "-/reset":
                self.stats.clear()
            return json.dumps(self.stats)

    def _fail(self, status: int, code: str, message: str) -> None:
        xml = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
        self._answer(status, xml.encode())

    def _answer(self, status: int, body: bytes, kind: str = "application/xml") -> None:
        self._head(status, len(body), kind, {})
        if self.command == "GET":
            self.wfile.write(body)

    def _head(self, status: int, length: int, kind: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _count(self, **numbers: int) -> None:
        with self.lock:
            self.stats.update(numbers)

    def log_message(self, *arguments: Any) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def get_request(self) -> tuple[socket.socket, Any]:
        made, address = super().get_request()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _PIECE)
        return made, address

    def handle_error(self, *arguments: Any) -> None:
        """A client that goes away is nothing to print."""


def _main() -> None:
    setup = json.loads(sys.argv[1])
    _Handler.objects = _Objects(setup["directory"], setup["blobs"])
    _Handler.latency_s, _Handler.bytes_per_s = setup["latency_s"], setup["bytes_per_s"]
    _Handler.stats, _Handler.lock = Counter(), threading.Lock()
    server = _Server(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    announce_and_wait(server.server_address[1])


if __name__ == "__main__":
    _main()
