"""Calls of trainers and commands behind a proxy of the environment: a real one, on loopback."""

from __future__ import annotations

import asyncio
import http.server
import json
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_plugins.cli.compare import CompletionServer
from lora_plugins.cli.server_client import AdminClient
from lora_plugins.client import CallFailed, wait_served
from lora_plugins.errors import InvalidSettings, SourceUnavailable
from lora_plugins.ray.server_process import ServerProcess
from tests.certificates import self_signed

DIGEST = "a" * 64
ELSEWHERE = "server.invalid:8000"


class Listening:
    """A proxy and a server in one: notes what is asked of it, and answers for every host."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(f"{self.path} {self.headers.get('Authorization')}")
                body = json.dumps({"digest": DIGEST, "state": "serving", "data": [{"id": "base"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_CONNECT(self) -> None:
                asked.append(f"CONNECT {self.path} {self.headers.get('Authorization')}")
                self.send_error(403)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def listen() -> Iterator[Callable[[], Listening]]:
    made: list[Listening] = []

    def start() -> Listening:
        made.append(Listening())
        return made[-1]

    yield start
    for one in made:
        one.server.shutdown()
        one.server.server_close()


@pytest.fixture
def proxy(listen: Callable[[], Listening], monkeypatch: pytest.MonkeyPatch) -> Listening:
    """Of all URLs, as far as the environment says."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    made = listen()
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{made.port}")
    monkeypatch.setenv("VLLM_API_KEY", "key")
    monkeypatch.delenv("LORA_PLUGINS_ADMIN_KEY", raising=False)
    return made


CALLS: dict[str, Callable[[str], object]] = {
    "client": lambda url: wait_served("policy", DIGEST, [url], key="key", timeout_s=5),
    "command": lambda url: AdminClient(url, 5).text("/v1/loras/policy"),
    "compare": lambda url: CompletionServer(url, 5).base_model(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_proxy_of_the_environment_is_used(proxy: Listening, call: str) -> None:
    CALLS[call](f"http://{ELSEWHERE}")
    assert [it.partition("/v1")[0] for it in proxy.asked] == [f"http://{ELSEWHERE}"]


@pytest.mark.parametrize("call", CALLS)
def test_a_proxy_of_https_never_sees_the_key(proxy: Listening, call: str) -> None:
    with pytest.raises((SourceUnavailable, CallFailed, TimeoutError)):
        CALLS[call](f"https://{ELSEWHERE}")
    assert set(proxy.asked) == {f"CONNECT {ELSEWHERE} None"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("call", CALLS)
def test_no_proxy_sees_a_call_to_this_machine(
    proxy: Listening, listen: Callable[[], Listening], call: str, host: str
) -> None:
    """The proxy would get the key, and ask its own machine."""
    server = listen()
    CALLS[call](f"http://{host}:{server.port}")
    assert (proxy.asked, len(server.asked)) == ([], 1)


@pytest.mark.parametrize("call", CALLS)
def test_no_proxy_sees_what_the_environment_excludes(
    proxy: Listening, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv("NO_PROXY", "server.invalid")
    with pytest.raises((SourceUnavailable, CallFailed, TimeoutError)):
        CALLS[call](f"http://{ELSEWHERE}")
    assert proxy.asked == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_to_this_machine_needs_no_usable_proxy(
    proxy: Listening, listen: Callable[[], Listening], monkeypatch: pytest.MonkeyPatch, call: str, host: str
) -> None:
    """SOCKS needs a package of its own, which httpx asks for before the first call."""
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    server = listen()
    CALLS[call](f"http://{host}:{server.port}")
    assert len(server.asked) == 1


@pytest.mark.parametrize("call", ["command", "compare"])
def test_a_proxy_that_cannot_be_used_is_named(proxy: Listening, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(InvalidSettings, match=r"SOCKS.*ALL_PROXY"):
        CALLS[call](f"http://{ELSEWHERE}")


def test_servers_here_and_elsewhere_are_asked_together(proxy: Listening, listen: Callable[[], Listening]) -> None:
    here = listen()
    wait_served("policy", DIGEST, [f"http://127.0.0.1:{here.port}", f"http://{ELSEWHERE}"], timeout_s=5)
    assert [len(here.asked), [it.partition("/v1")[0] for it in proxy.asked]] == [1, [f"http://{ELSEWHERE}"]]


def test_certificates_of_the_environment_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, context = self_signed(tmp_path)
    server = Listening(context)
    url = f"https://localhost:{server.port}"
    try:
        with pytest.raises(SourceUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            AdminClient(url, 5).text("/version")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert DIGEST in AdminClient(url, 5).text("/version")
        wait_served("policy", DIGEST, [url], timeout_s=5)
    finally:
        server.server.shutdown()
        server.server.server_close()


SERVER = """
import sys, http.server
http.server.BaseHTTPRequestHandler.do_GET = lambda it: (it.send_response(200), it.end_headers())
class Server(http.server.HTTPServer):
    allow_reuse_port = True
Server(("127.0.0.1", int(sys.argv[-1])), http.server.BaseHTTPRequestHandler).serve_forever()
"""


def test_no_proxy_sees_a_replicas_calls_to_its_server(proxy: Listening) -> None:
    async def run() -> None:
        server = ServerProcess((sys.executable, "-c", SERVER), {})
        try:
            async with asyncio.timeout(30):
                await server.wait_until_healthy()
        finally:
            server.end()
            await server.client.aclose()

    asyncio.run(run())
    assert proxy.asked == []
