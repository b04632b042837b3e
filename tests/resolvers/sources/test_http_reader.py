"""The range reader over TLS, through proxies, and when it is stopped."""

from __future__ import annotations

import datetime as dt
import http.server
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509  # comes with moto, which is our S3
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lora_plugins.resolvers.sources.errors import FailureKind, diagnose
from lora_plugins.resolvers.sources.http_reader import HttpOptions, HttpReader
from lora_plugins.resolvers.sources.source import SourceFile

DATA = os.urandom(3_000_000)
LONG_S = 200.0
FILE = SourceFile("f", len(DATA), '"etag"')


class _Server(http.server.BaseHTTPRequestHandler):
    """Ranges of DATA; also a proxy: for absolute URLs, and by CONNECT to whatever it is asked for."""

    protocol_version = "HTTP/1.1"
    stalled: threading.Event | None = None
    go: threading.Event
    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Proxy-Authorization")))
        start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(206)
        self.send_header("ETag", '"etag"')
        self.send_header("Content-Range", f"bytes {start}-{end}/{len(DATA)}")
        self.send_header("Content-Length", str(end + 1 - start))
        self.end_headers()
        self.wfile.write(DATA[start : start + 1000])
        if self.stalled is not None:
            self.stalled.set()
            self.go.wait(LONG_S)
        self.wfile.write(DATA[start + 1000 : end + 1])

    def do_CONNECT(self) -> None:
        self.seen.append((self.path, self.headers.get("Proxy-Authorization")))
        host, port = self.path.split(":")
        with socket.create_connection((host, int(port))) as far:
            self.send_response(200)
            self.end_headers()
            ways = [(self.connection, far), (far, self.connection)]
            threads = [threading.Thread(target=_pipe, args=way, daemon=True) for way in ways]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.close_connection = True

    def log_message(self, *arguments) -> None:
        pass


def _pipe(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[tuple[int, type[_Server]]]:
    handler = type("Server", (_Server,), {"seen": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], handler
    finally:
        server.shutdown()
        server.socket.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(1))
        .not_valid_after(now + dt.timedelta(1))
        .add_extension(alternative, critical=False)
        .sign(key, hashes.SHA256())
    )
    directory = tmp_path_factory.mktemp("tls")
    (directory / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "key.pem").write_bytes(pem)
    return directory / "cert.pem", directory / "key.pem"


@pytest.fixture
def secure(certificate: tuple[Path, Path]) -> Iterator[tuple[int, type[_Server]]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with serving(context) as server:
        yield server


def read(reader: HttpReader, start: int = 0, end: int = len(DATA)) -> bytes:
    data = bytearray()
    reader.read(FILE, start, end, data.extend)
    return bytes(data)


def test_tls_keeps_its_connection(secure, certificate) -> None:
    port, _ = secure
    reader = HttpReader(
        {"f": f"https://127.0.0.1:{port}/k?X=1"}, HttpOptions(tls=ssl.create_default_context(cafile=certificate[0]))
    )
    assert read(reader) == DATA
    (first,) = reader._idle
    assert read(reader, 5, 2_000_000) == DATA[5:2_000_000]
    assert reader._idle == [first]
    reader.close()


def test_unknown_certificate_is_refused(secure) -> None:
    port, _ = secure
    with pytest.raises(ssl.SSLError) as caught:
        read(HttpReader({"f": f"https://127.0.0.1:{port}/k"}))
    assert diagnose(caught.value).kind is FailureKind.TLS


@pytest.mark.parametrize("encrypted", [True, False])
def test_through_a_proxy_with_a_login(secure, certificate, encrypted: bool) -> None:
    with serving() as (proxy_port, proxy):
        url = f"https://127.0.0.1:{secure[0]}/k?X=1" if encrypted else "http://nowhere.invalid/k?X=1"
        options = HttpOptions(
            tls=ssl.create_default_context(cafile=certificate[0]), proxy=f"http://me:p%40ss@127.0.0.1:{proxy_port}"
        )
        reader = HttpReader({"f": url}, options)
        assert read(reader) == DATA
        reader.close()
        ((path, login),) = proxy.seen
        assert path == (urlsplit(url).netloc if encrypted else url)
        assert login == "Basic bWU6cEBzcw=="


@pytest.mark.parametrize("encrypted", [True, False])
def test_stop_ends_a_stalled_read(secure, certificate, encrypted: bool) -> None:
    with serving() as plain:
        port, handler = secure if encrypted else plain
        handler.stalled, handler.go = threading.Event(), threading.Event()
        options = HttpOptions(tls=ssl.create_default_context(cafile=certificate[0]), read_timeout_s=LONG_S)
        reader = HttpReader({"f": f"{'https' if encrypted else 'http'}://127.0.0.1:{port}/k"}, options)

        def stop() -> None:
            assert handler.stalled is not None
            handler.stalled.wait(LONG_S)
            time.sleep(0.3)  # most often the reader has what came, and waits for more
            reader.stop()

        threading.Thread(target=stop, daemon=True).start()
        data = bytearray()
        with pytest.raises(Exception, match=r".*"):
            reader.read(FILE, 0, len(DATA), data.extend)
        assert data == DATA[: len(data)]
        assert len(data) <= 1000, "and not when the server went on"
        handler.go.set()
        with pytest.raises(ConnectionAbortedError):
            read(reader)
        assert not reader._idle
