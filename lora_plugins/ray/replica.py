"""The deployment that Ray Serve replicates: each replica owns a server, and passes requests on to the server.

Runs in a Ray worker for each replica; `vllm serve` is a child process (`server_process.py`). In go the ingress's
`Call`s; out come the parts of the server's answer. Ray also asks for the replica's health, and for the adapters and
requests that routers need.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from cachetools import LRUCache
from ray import serve

from lora_plugins.errors import InvalidSettings, ReplicaLost
from lora_plugins.log import logger
from lora_plugins.ray.server_process import ServerProcess, vllm_serve
from lora_plugins.routing.residency import Tier
from lora_plugins.settings import environment

Headers = tuple[tuple[bytes, bytes], ...]

# Headers of a connection, not of a request (RFC 9110, 7.6.1), or set again by the next sender.
HOP_BY_HOP = {b"connection", b"expect", b"host", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
HOP_BY_HOP |= {b"proxy-authenticate", b"proxy-authorization"}
# Ray's proxy sets `server` and `date` itself.
TO_SERVER, TO_CLIENT = HOP_BY_HOP | {b"content-length"}, HOP_BY_HOP | {b"server", b"date"}
REPLICA_HEADER = "x-lora-plugins-replica"
REMEMBERED = 1000
WATCH_S = 0.5


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request on its way to a server; `excluded` are replicas that failed at the request."""

    method: str
    target: str
    headers: Headers
    body: bytes
    adapter: str = ""
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an answer."""

    status: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class ServerGone:
    """The replica's server has ended, perhaps before the request; nothing follows."""

    replica: str
    found: str


@dataclass(frozen=True, slots=True)
class AdminAnswer:
    """A replica's answer to a call that all replicas got."""

    replica: str
    status: int
    body: bytes


class VllmReplica:
    """A `vllm serve` behind Ray Serve; server and replica end together, whichever ends first."""

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        command: Sequence[str] | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        # Before the server starts: an open server for a moment is an open server.
        require_secrets(secrets)
        self.name = serve.get_replica_context().replica_id.unique_id
        # Ports come again, and with a port the list of a replica that has ended: for LORA_PLUGINS_RESTORE.
        env = {**env, "LORA_PLUGINS_REPLICA": self.name}
        self._server = ServerProcess((*(command or vllm_serve()), *arguments), env)
        self._has_started = False
        self._served: LRUCache[str, bool] = LRUCache(REMEMBERED)  # adapters whose files the server has
        self._watching: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Ray Serve's: wait for the server at first; later raise where the server does not answer."""
        if not self._has_started:
            await self._server.wait_until_healthy()
            self._has_started = True
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        elif not await self._server.is_healthy():
            raise ReplicaLost(f"no healthy answer from replica {self.name}")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Ray Serve's: return the routers' facts about this replica."""
        if not self._has_started:
            return {}
        report = await self._server.report()
        # The server's report wins over the note that files are here: memory is a better tier than the store.
        adapters = {**dict.fromkeys(self._served, Tier.STORE), **report.adapters}
        tiers = {name: int(tier) for name, tier in adapters.items()}
        return {"adapters": tiers, "capacity": report.capacity, "requests": report.requests}

    async def forward(self, call: Call) -> AsyncIterator[Head | bytes | ServerGone]:
        """Pass a request on: yield the answer's head, then its body as it comes; or `ServerGone`, at any time."""
        headers = _without(TO_SERVER, call.headers)
        request = self._server.client.build_request(call.method, call.target, headers=headers, content=call.body)
        try:
            answer = await self._server.client.send(request, stream=True)
        except httpx.HTTPError as error:
            yield self._gone(error)
            return
        try:
            # A failing server on its way down answers 5xx: another replica should get the request.
            if answer.status_code >= 500 and not await self._server.is_healthy():
                yield ServerGone(self.name, f"status {answer.status_code} of a server that is not healthy")
                return
            named = (REPLICA_HEADER.encode(), self.name.encode())
            yield Head(answer.status_code, (*_without(TO_CLIENT, answer.headers.raw), named))
            async for chunk in answer.aiter_raw():
                yield chunk
            if call.adapter and answer.status_code == 200:
                self._served[call.adapter] = True
        except httpx.HTTPError as error:
            yield self._gone(error)
        finally:
            await answer.aclose()  # closing aborts the request in the server where the client is gone

    async def admin(self, call: Call) -> AdminAnswer:
        """Pass on a call that every replica gets, and return the whole answer."""
        status, body = 503, b""
        async for part in self.forward(call):
            match part:
                case Head():
                    status = part.status
                case ServerGone():
                    return AdminAnswer(self.name, 503, str(ReplicaLost(part.found)).encode())
                case _:
                    body += part
        return AdminAnswer(self.name, status, body)

    def __del__(self) -> None:
        """End the server with the replica."""
        if not hasattr(self, "_watching"):
            return  # no server was started
        if self._watching is not None:
            self._watching.get_loop().call_soon_threadsafe(self._watching.cancel)
        self._server.end()

    async def _watch(self) -> None:
        while not self._server.has_ended:  # noqa: ASYNC110 - the server is a process, without an asyncio event
            await asyncio.sleep(WATCH_S)
        logger.error("The server of replica %s has ended:\n%s", self.name, self._server.log_tail())
        # Ray notices a dead replica sooner than an unhealthy replica.
        os.kill(os.getpid(), signal.SIGKILL)

    def _gone(self, error: Exception) -> ServerGone:
        text = f"no answer from replica {self.name}: {type(error).__name__} {error}"
        return ServerGone(self.name, text.strip())


def require_secrets(names: Sequence[str]) -> None:
    """Refuse to serve without a secret of the starter's: without a key, the server would let everybody in.

    Raises:
        InvalidSettings: a secret is missing in this process's environment.
    """
    here = environment()
    missing = [name for name in names if name not in here]
    if missing:
        raise InvalidSettings(
            f"a Ray worker without {', '.join(missing)}",
            expected="the secrets of whoever has started the servers, which Ray is not given",
            remedy="set them in the environment in which 'ray start' runs on each node",
        )


def _without(names: set[bytes], headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in names)
