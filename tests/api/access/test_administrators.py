"""Who may administer where nobody has a key: the caller's address, and what says that it is another's."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from lora_plugins.api.access.administrators import Administrators, is_loopback

HERE = ("127.0.0.1", 40000)


def scope(*headers: tuple[str, str], client: Any = HERE) -> dict[str, Any]:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return {"type": "http", "path": "/v1/loras", "headers": raw, "client": client}


def may(asked: dict[str, Any], **rule: Any) -> bool:
    return Administrators(**rule).principal(asked).is_admin


LOCAL = ["127.0.0.1", "127.255.0.3", "::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1"]
REMOTE = [
    "0.0.0.0",
    "10.0.0.1",
    "172.17.0.1",
    "::",
    "::2",
    "fe80::1",
    "::ffff:10.0.0.1",
    "localhost",
    "127.0.0.1.x",
    "1",
]


@pytest.mark.parametrize("host", [*LOCAL, *REMOTE, ""])
def test_only_addresses_of_this_machine_are_local(host):
    assert is_loopback(host) == may(scope(client=(host, 1))) == (host in LOCAL)


@pytest.mark.parametrize("client", [None, ("127.0.0.1", 1)])
def test_without_address_only_a_unix_socket_is_local(client):
    assert may(scope(client=client), is_unix_socket=True)
    assert may(scope(client=client)) == (client is not None)


@pytest.mark.parametrize(
    "name", ["X-Forwarded-For", "x-forwarded-proto", "X-FORWARDED-HOST", "Forwarded", "via", "X-Real-IP"]
)
def test_what_a_proxy_has_passed_on_is_not_local(name):
    for client in (HERE, None):
        assert not may(scope((name, "127.0.0.1"), client=client), is_unix_socket=True)
    refusal = Administrators().refusal(scope((name, "127.0.0.1")))
    assert refusal.found == "a call that a proxy has passed on"
    assert "LORA_PLUGINS_ADMIN_KEY" in refusal.remedy


LOCAL_ORIGINS = ["http://localhost:8000", "http://127.0.0.1:3000", "http://[::1]:8000"]
ORIGINS = ["https://evil.example", "http://localhost.evil.example", "http://evil.example:8000", "null", "http://["]


@pytest.mark.parametrize("origin", [*LOCAL_ORIGINS, *ORIGINS, ""])
def test_a_browser_here_may_show_pages_of_others(origin):
    assert may(scope(("Origin", origin))) == (origin in LOCAL_ORIGINS)


@pytest.mark.parametrize("trusted", ["127.0.0.1", "*"])
@pytest.mark.parametrize("client", [HERE, ("10.0.0.9", 1)])
def test_no_forwarded_header_makes_a_caller_local(trusted, client):
    """Whatever uvicorn, trusting proxies or everybody, makes of it."""
    seen: list[bool] = []

    async def app(asked: Any, receive: Any, send: Any) -> None:
        seen.append(may(asked))

    for value in ("127.0.0.1", "::1", "10.0.0.8", "10.0.0.8, 127.0.0.1", "", "x"):
        asked = scope(("x-forwarded-for", value), client=client)
        asyncio.run(ProxyHeadersMiddleware(app, trusted)(asked, None, None))
    assert seen == [False] * 6


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer ", "Bearer the-keyx", "Bearer the-ke", "Basic the-key", "Bearer \xe9", "the-key"]
)
def test_only_the_admin_key_itself_will_do(sent):
    rule = {"key": "the-key", "keys_of_vllm": ("of-vllm",), "is_unix_socket": True}
    assert not may(scope(("authorization", sent)), **rule)
    assert may(scope(("authorization", "bearer the-key")), **rule)


def test_uvicorn_gives_callers_of_a_unix_socket_no_address(tmp_path):
    seen: list[Any] = []

    async def app(asked: Any, receive: Any, send: Any) -> None:
        seen.append((asked["client"], may(asked, is_unix_socket=True)))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        path = str(tmp_path / "socket")
        server = uvicorn.Server(uvicorn.Config(app, uds=path, lifespan="off", log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path)) as client:
            await client.get("http://server/v1/loras")
            await client.get("http://server/v1/loras", headers={"X-Forwarded-For": "10.0.0.1"})
        server.should_exit = True
        await serving

    asyncio.run(run())
    assert seen == [(None, True), (None, False)]


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "127.0.0.1", "127.9.9.9:8000", "[::1]", "[::1]:8000", "[::ffff:127.0.0.1]:1"],
)
def test_names_under_which_this_machine_may_be_called(host):
    assert may(scope(("Host", host)))


STRANGE = ["", "localhost:x", "evil@localhost", "localhost/", "[::1", "::1", "\xff"]
OTHERS = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]"]


@pytest.mark.parametrize("host", [*STRANGE, *OTHERS])
def test_a_call_under_another_name_is_a_web_pages(host):
    asked = scope(("host", host))
    assert not may(asked)
    refusal = Administrators().refusal(asked)
    assert refusal.found.startswith("a call under a name that is not this machine's own")
    assert "LORA_PLUGINS_ADMIN_KEY" in refusal.remedy
    assert may(asked | {"client": None}, is_unix_socket=True)
    assert may(scope(("host", host), ("authorization", "Bearer k")), key="k")


def test_each_host_header_must_be_this_machines():
    assert not may(scope(("host", "localhost"), ("host", "evil.example")))
