"""The client before made-up servers: a push is taken by all servers or by none, whatever fails."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from lora_plugins import client
from lora_plugins.client import CallFailed, PushFailed, pause, push, push_async, resume, wait_served
from lora_plugins.client.attempt import answers_of

NEW, OLD, OTHER, HUB = "a" * 64, "b" * 64, "c" * 64, "hub"
Use = Callable[..., list[str]]
# Of a proxy, or of another program.
PAGES = {
    "html": "<html>",
    "deep": "[" * 100_000,
    "rows": '{"replicas": [1]}',
    "no body": '{"replicas": [{"status": 200}]}',
    "digests": '{"digest": ["a"], "previous_digest": {}}',
}


@dataclass
class Server:
    """A name on one server: the digest that is served, and the fault of the next push."""

    fault: str = ""
    served: str | None = OLD
    state: str = "serving"
    running: str = ""

    async def answer(self, request: httpx.Request) -> httpx.Response:
        digest = None if self.served == HUB else self.served
        if request.method == "PUT":
            return await self.push(digest)
        if request.method == "GET":
            return httpx.Response(404 if self.served is None else 200, json={"digest": digest, "state": self.state})
        if request.url.path.endswith("/pause"):
            return httpx.Response(200, json={"status": "resumed" if self.fault == "resumed" else "success"})
        if self.fault == "stuck":
            raise httpx.ReadTimeout("")
        if request.headers["If-Match"] != digest:
            return httpx.Response(412)
        body = json.loads(request.content or "{}")
        self.served, self.running = body.get("digest"), body.get("running", "finish" if body else "")
        return httpx.Response(200, json={"status": "success"})

    async def push(self, before: str | None) -> httpx.Response:
        if self.fault == "refused":
            return httpx.Response(400, text="[L003] too large")
        if self.fault == "slow":
            await asyncio.sleep(60)
        if self.fault not in ("late", "redirect", *PAGES):
            self.served = OTHER if self.fault == "other" else NEW
        if self.fault in ("lost", "late"):
            raise httpx.ReadTimeout("")
        if self.fault in PAGES:
            return httpx.Response(200, text=PAGES[self.fault])
        if self.fault == "redirect":
            return httpx.Response(301, headers={"Location": "https://s1/v1/loras/policy"})
        body = {"digest": self.served, "previous_digest": before, "swapped": before != self.served, "timings": {}}
        return httpx.Response(200, json=body | ({"swapped": False} if before is None and self.fault != "hub" else {}))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Have s0, s1, ... answer as these servers; several in a list are replicas on Ray Serve."""

    def start(*servers: Server | list[Server]) -> list[str]:
        async def handler(request: httpx.Request) -> httpx.Response:
            addressed = servers[int(request.url.host[1:])]
            if isinstance(addressed, Server):
                return await addressed.answer(request)
            answers = [await it.answer(request) for it in addressed]
            rows = [
                {"replica": f"r{number}", "status": it.status_code, "body": it.json() if it.content[:1] == b"{" else {}}
                for number, it in enumerate(answers)
            ]
            return httpx.Response(max(it.status_code for it in answers), json={"replicas": rows})

        transport = httpx.MockTransport(handler)
        monkeypatch.setattr(client, "_client", lambda *_: httpx.AsyncClient(transport=transport))
        return [f"http://s{number}" for number in range(len(servers))]

    return start


def pushed(servers: Any, **options: Any) -> Any:
    return push("policy", {"w": np.zeros((2, 2))}, {"r": 2}, servers=servers, **options)


# What each server does, which digests they serve in the end, and where the push is not rolled back.
FAILED: dict[str, tuple[list[Any], list[Any], tuple[str, ...]]] = {
    "new name": ([Server(), Server(served=None), Server("refused")], [OLD, None, OLD], ()),
    "stuck": ([Server("stuck"), Server(), Server("refused")], [NEW, OLD, OLD], ("http://s0",)),
    "lost": ([Server(), Server("lost"), Server("lost", None)], [OLD, OLD, None], ()),
    "late": ([Server(), Server("late")], [OLD, OLD], ("http://s1",)),
    **{page: ([Server(), Server(page)], [OLD, OLD], ("http://s1",)) for page in PAGES},
    "redirect": ([Server(), Server("redirect")], [OLD, OLD], ()),
    "alone": ([Server("lost")], [NEW], ("http://s0",)),
    "hub": ([Server("hub", HUB), Server("refused")], [NEW, OLD], ("http://s0",)),
    "other digest": ([Server(), Server("other")], [OLD, OLD], ()),
    "replica": ([[Server(), Server("refused")]], [OLD, OLD], ()),
    "replicas": ([[Server(), Server()], Server("refused")], [OLD, OLD, OLD], ()),
}


@pytest.mark.parametrize("case", FAILED)
def test_a_failed_push_is_undone_or_named(use: Use, case: str) -> None:
    servers, serve, left = FAILED[case]
    with pytest.raises(PushFailed) as failed:
        pushed(use(*servers), mode="inflight")
    each = [it for one in servers for it in (one if isinstance(one, list) else [one])]
    assert [it.served for it in each] == serve
    assert failed.value.not_rolled_back == left
    assert {it.running for it in each} <= {"", "inflight"}


def test_a_login_in_a_redirect_is_not_shown() -> None:
    leads = {"Location": "https://me:secret@other/v1/loras?X-Amz-Signature=secret"}
    (said,) = answers_of(httpx.Response(307, headers=leads))
    assert "leads to https://" in said.text
    assert "other/v1/loras" in said.text
    assert "secret" not in said.text


def test_a_cancelled_push_is_undone(use: Use) -> None:
    servers = [Server(), Server("slow")]

    async def cancelled() -> None:
        async with asyncio.timeout(0.2):
            await push_async("policy", {"w": np.zeros((2, 2))}, {"r": 2}, servers=use(*servers))

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert [it.served for it in servers] == [OLD, OLD]


def test_replicas_answer_as_one_server(use: Use) -> None:
    (address,) = use([Server(), Server()])
    assert (pushed(f"{address}/v1").digest, pushed([f"{address}/", address]).previous_digests) == (NEW, {address: NEW})
    wait_served("policy", NEW, address, timeout_s=0)
    pause("policy", servers=address)
    with pytest.raises(CallFailed, match="replica r1: 200"):
        pause("policy", servers=use([Server(), Server("resumed")]))


def test_waiting_ends_for_a_served_digest_alone(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    for servers in ([Server(served=OLD, state="draining")], [[Server(), Server(served=NEW)]]):
        with pytest.raises(TimeoutError):
            wait_served("policy", OLD, use(*servers), timeout_s=0)
    denies = httpx.MockTransport(lambda _: httpx.Response(401))
    monkeypatch.setattr(client, "_client", lambda *_: httpx.AsyncClient(transport=denies))
    with pytest.raises(CallFailed, match="401"):
        wait_served("policy", OLD, "http://s0")
    for call in (pushed, lambda none: wait_served("policy", OLD, none)):
        with pytest.raises(ValueError, match="servers: empty"):
            call([])


LOGINS = ["http://user:secret@127.0.0.1:9", "http://user:secret@[", "user:secret@h:9", "http://user:a/secret@h"]


@pytest.mark.parametrize("address", LOGINS)
@pytest.mark.parametrize("call", [pause, resume, wait_served, pushed], ids=lambda it: it.__name__)
def test_no_error_shows_a_login(call: Callable[..., Any], address: str) -> None:
    further = {pause: ("policy",), resume: ("policy",), wait_served: ("policy", OLD)}.get(call)
    with pytest.raises(ValueError, match=r"login.*`key`") as raised:
        call([address]) if further is None else call(*further, servers=[address], timeout_s=0.1)
    assert "secret" not in "".join(traceback.format_exception(raised.value))


KEYS = ["secret\n", "secret\r\nX-Other: 1", "secret ", "secrét"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("call", [pause, wait_served, push], ids=lambda it: it.__name__)
def test_no_error_shows_a_key(call: Callable[..., Any], key: str) -> None:
    """HTTP libraries show a header that cannot be sent."""
    further = {push: ({}, {}), wait_served: (OLD,)}.get(call, ())
    with pytest.raises(ValueError, match="key: characters") as raised:
        call("policy", *further, servers=["http://127.0.0.1:9"], key=key, timeout_s=0.1)
    assert "secr" not in "".join(traceback.format_exception(raised.value))
