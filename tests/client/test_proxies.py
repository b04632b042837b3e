"""Calls of trainers and commands behind a proxy of the environment: a real one, on loopback."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_plugins.cli.compare import CompletionServer
from lora_plugins.cli.server_client import AdminClient
from lora_plugins.client import CallFailed, wait_served
from lora_plugins.errors import InvalidSettings, SourceUnavailable
from lora_plugins.ray.server_process import ServerProcess
from tests.certificates import self_signed
from tests.http_server import Answer, Asked, http_server

DIGEST = "a" * 64
ELSEWHERE = "server.invalid:8000"


class Listening:
    """A proxy and a server in one: notes what is asked of it, and answers for every host."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.url = ""

    def answer(self, asked: Asked) -> Answer:
        said = f"{asked.path} {asked.headers.get('Authorization')}"
        self.asked.append(f"CONNECT {said}" if asked.method == "CONNECT" else said)
        if asked.method == "CONNECT":
            return Answer(status=403)
        return Answer({"digest": DIGEST, "state": "serving", "data": [{"id": "base"}]})

    def at(self, host: str) -> str:
        return self.url.replace("127.0.0.1", host)


@pytest.fixture
def server() -> Iterator[Listening]:
    made = Listening()
    with http_server(made.answer) as made.url:
        yield made


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    """Of all URLs, as far as the environment says."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "key")
    monkeypatch.delenv("LORA_PLUGINS_ADMIN_KEY", raising=False)
    made = Listening()
    with http_server(made.answer) as made.url:
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, made.url)
        yield made


CALLS: dict[str, Callable[..., object]] = {
    "client": lambda url, timeout_s=5: wait_served("policy", DIGEST, [url], key="key", timeout_s=timeout_s),
    "command": lambda url, timeout_s=5: AdminClient(url, timeout_s).text("/v1/loras/policy"),
    "compare": lambda url, timeout_s=5: CompletionServer(url, timeout_s).base_model(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_proxy_of_the_environment_is_used(proxy: Listening, call: str) -> None:
    CALLS[call](f"http://{ELSEWHERE}")
    assert [it.partition("/v1")[0] for it in proxy.asked] == [f"http://{ELSEWHERE}"]


@pytest.mark.parametrize("call", CALLS)
def test_a_proxy_of_https_never_sees_the_key(proxy: Listening, call: str) -> None:
    with pytest.raises((SourceUnavailable, CallFailed, TimeoutError)):
        CALLS[call](f"https://{ELSEWHERE}", timeout_s=1)
    assert set(proxy.asked) == {f"CONNECT {ELSEWHERE} None"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("call", CALLS)
def test_no_proxy_sees_a_call_to_this_machine(proxy: Listening, server: Listening, call: str, host: str) -> None:
    """The proxy would get the key, and ask its own machine."""
    CALLS[call](server.at(host))
    assert (proxy.asked, len(server.asked)) == ([], 1)


@pytest.mark.parametrize("call", CALLS)
def test_no_proxy_sees_what_the_environment_excludes(
    proxy: Listening, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv("NO_PROXY", "server.invalid")
    with pytest.raises((SourceUnavailable, CallFailed, TimeoutError)):
        CALLS[call](f"http://{ELSEWHERE}", timeout_s=1)
    assert proxy.asked == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_to_this_machine_needs_no_usable_proxy(
    proxy: Listening, server: Listening, monkeypatch: pytest.MonkeyPatch, call: str, host: str
) -> None:
    """SOCKS needs a package of its own, which httpx asks for before the first call."""
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    CALLS[call](server.at(host))
    assert len(server.asked) == 1


@pytest.mark.parametrize("call", ["command", "compare"])
def test_a_proxy_that_cannot_be_used_is_named(proxy: Listening, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(InvalidSettings, match=r"SOCKS.*ALL_PROXY"):
        CALLS[call](f"http://{ELSEWHERE}")


def test_servers_here_and_elsewhere_are_asked_together(proxy: Listening, server: Listening) -> None:
    wait_served("policy", DIGEST, [server.url, f"http://{ELSEWHERE}"], timeout_s=5)
    assert [len(server.asked), [it.partition("/v1")[0] for it in proxy.asked]] == [1, [f"http://{ELSEWHERE}"]]


def test_certificates_of_the_environment_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, context = self_signed(tmp_path)
    with http_server(Listening().answer, context) as url:
        with pytest.raises(SourceUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            AdminClient(url, 5).text("/version")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert DIGEST in AdminClient(url, 5).text("/version")
        wait_served("policy", DIGEST, [url], timeout_s=5)


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
