"""Ranges of objects by plain HTTP GET, from sockets straight into a buffer and to disk, without an event loop.

`http.client` into a buffer of ours, because aiohttp and s3fs hand every byte on as new objects, in an event loop;
`benchmarks/fetch.py` measures the whole against s3fs and boto3. Reading and writing release the interpreter's lock, so
that vLLM's own event loop goes on meanwhile. URLs are signed beforehand (`s3.py`).
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from lora_plugins.resolvers.sources.errors import BrokenAnswer, HttpStatus, ObjectChanged, retry_after
from lora_plugins.resolvers.sources.source import SourceFile

BUFFER_BYTES = 1 << 18
_ERROR_BODY_BYTES = 4096
_ERROR_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
_NOT_MD5 = ("aws:kms", "aws:kms:dsse", "aws:fsx")


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """How to connect: time-outs in seconds, TLS, and the HTTP proxy for these URLs, if there is one."""

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 15.0
    tls: ssl.SSLContext | None = None
    proxy: str | None = None


@dataclass
class HttpReader:
    """Reads ranges of files by their URLs; connections are kept alive between ranges until `close`.

    All URLs are of one server. Thread-safe. One buffer of `BUFFER_BYTES` per thread that reads.
    """

    urls: Mapping[str, str]
    options: HttpOptions = field(default_factory=HttpOptions)
    md5_etags: bool = True

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: dict[http.client.HTTPConnection, socket.socket] = {}
        self._stopped = False
        self._buffers = threading.local()
        self._parsed = {name: urlsplit(url) for name, url in self.urls.items()}
        self._not_md5: set[str] = set()

    def has_md5_etag(self, name: str) -> bool:
        """Whether the answers so far let a file's ETag be the MD5 of its bytes (not encrypted with another's key)."""
        return self.md5_etags and name not in self._not_md5

    def is_exact(self, file: SourceFile) -> bool:
        """Whether every answer was of the located ETag, byte for byte."""
        return bool(file.etag) and not file.etag.startswith("W/")

    def read(self, file: SourceFile, start: int, end: int, write: Callable[[memoryview], None]) -> None:
        """Hand the bytes from `start` to `end` to `write`, in order; what was received before a failure is written.

        Raises:
            HttpStatus, BrokenAnswer, ObjectChanged, OSError, http.client.HTTPException: as `errors.py` maps them.
            Whatever `write` raises.
        """
        url = self._parsed[file.name]
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        if file.etag and not file.etag.startswith("W/"):
            headers["If-Match"] = file.etag
        if self.options.proxy and url.scheme == "http":
            headers |= _proxy_authorization(urlsplit(self.options.proxy))
        with self._connection(url) as connection:
            connection.request("GET", self._target(url), headers=headers)
            response = connection.getresponse()
            self._check(response, file, start, end)
            self._pump(response, end - start, write)
            # The body is read to its end; without this the connection could not be used again.
            response.close()
            if response.will_close:
                connection.close()

    def stop(self) -> None:
        """Make every `read`, now and later, fail at once."""
        with self._lock:
            self._stopped = True
            for sock in self._busy.values():
                with contextlib.suppress(OSError):
                    # Not SSLSocket's own, which takes the TLS state away below a thread that reads.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    @contextmanager
    def _connection(self, url: SplitResult) -> Iterator[http.client.HTTPConnection]:
        with self._lock:
            if self._stopped:
                raise ConnectionAbortedError
            connection = self._idle.pop() if self._idle else self._connect(url)
        try:
            if connection.sock is None:
                connection.connect()
            with self._lock:
                if self._stopped:  # `stop` came while there was no socket to shut
                    raise ConnectionAbortedError
                connection.sock.settimeout(self.options.read_timeout_s)
                # Kept here too: `http.client` lets go of the socket of an answer that ends the connection.
                self._busy[connection] = connection.sock
            yield connection
        except BaseException:
            connection.close()
            raise
        finally:
            with self._lock:
                self._busy.pop(connection, None)
                if connection.sock is not None:
                    self._idle.append(connection)

    def _connect(self, url: SplitResult) -> http.client.HTTPConnection:
        proxy = urlsplit(self.options.proxy) if self.options.proxy else None
        via = proxy or url
        host, timeout_s = via.hostname or "", self.options.connect_timeout_s
        if url.scheme == "https":
            port = via.port or (443 if proxy is None else 8080)
            tls = self.options.tls or ssl.create_default_context()
            secure = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls)
            if proxy is not None:
                secure.set_tunnel(url.hostname or "", url.port or 443, headers=_proxy_authorization(proxy))
            return secure
        return http.client.HTTPConnection(host, via.port or (80 if proxy is None else 8080), timeout=timeout_s)

    def _target(self, url: SplitResult) -> str:
        path = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
        return f"http://{url.netloc}{path}" if self.options.proxy and url.scheme == "http" else path

    def _check(self, response: http.client.HTTPResponse, file: SourceFile, start: int, end: int) -> None:
        """Refuse an answer that is not exactly this range of this version, before its body is read."""
        if response.status not in (200, 206):
            code = _ERROR_CODE.search(response.read(_ERROR_BODY_BYTES))
            waits = retry_after(response.getheader("Retry-After"))
            raise HttpStatus(response.status, code[1].decode() if code else "", waits)
        etag = response.getheader("ETag")
        if etag and file.etag and etag.strip('"') != file.etag.strip('"'):
            raise ObjectChanged
        if response.status == 200 and (start, end) != (0, file.size_bytes):
            raise BrokenAnswer("the whole object in place of a range")
        ranged = response.getheader("Content-Range")
        if response.status == 206 and ranged != f"bytes {start}-{end - 1}/{file.size_bytes}":
            raise BrokenAnswer("another range")
        if response.length is not None and response.length != end - start:
            raise BrokenAnswer("another length")
        encryption = response.getheader("x-amz-server-side-encryption", "")
        if encryption in _NOT_MD5 or response.getheader("x-amz-server-side-encryption-customer-algorithm"):
            self._not_md5.add(file.name)

    def _pump(self, response: http.client.HTTPResponse, size_bytes: int, write: Callable[[memoryview], None]) -> None:
        buffer = getattr(self._buffers, "view", None)
        if buffer is None:
            buffer = self._buffers.view = memoryview(bytearray(BUFFER_BYTES))
        # One receive at a time: `response.readinto` would lose what it has when the connection breaks off.
        receive = response.readinto if response.chunked else response.fp.readinto1
        while size_bytes > 0:
            room = buffer[: min(BUFFER_BYTES, size_bytes)]
            filled = 0
            try:
                while filled < len(room):
                    count = receive(room[filled:])
                    if not count:
                        raise BrokenAnswer("a short body")
                    filled += count
            finally:
                if filled:
                    write(room[:filled])
            size_bytes -= filled
        if response.chunked and response.read(1):
            raise BrokenAnswer("a long body")


def _proxy_authorization(proxy: SplitResult) -> dict[str, str]:
    if not proxy.username:
        return {}
    login = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + b64encode(login.encode()).decode()}
