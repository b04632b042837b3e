"""The deployment that Ray Serve replicates: each replica owns one server, and passes requests on to it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from ray import serve

from lora_plugins.errors import InvalidSettings, ReplicaLost
from lora_plugins.log import logger
from lora_plugins.ray.engine import Engine, EngineCommand
from lora_plugins.routing.residency import Tier
from lora_plugins.settings import environment

# Of one connection, not of the request (RFC 9110, 7.6.1), or set again by whoever sends it on.
HOP_BY_HOP = {"connection", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
HOP_BY_HOP |= {"proxy-authenticate", "proxy-authorization"}
REPLICA_HEADER = "x-lora-plugins-replica"
REMEMBERED = 1000
WATCH_S = 0.5


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request on its way to a server; `excluded` are replicas that failed at it."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    adapter: str = ""
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an answer, and which replica gave it."""

    replica: str
    status: int
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The replica's server is gone, or was when it was asked; nothing follows."""

    replica: str
    found: str


@dataclass(frozen=True, slots=True)
class AdminAnswer:
    """What one replica answered to a call that all of them got."""

    replica: str
    status: int
    body: bytes


class VllmReplica:
    """One `vllm serve` behind Ray Serve; it ends with the replica, however that ends, and the replica with it."""

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        command: Sequence[str] | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        require_secrets(secrets)
        self.name = serve.get_replica_context().replica_id.unique_id
        given = EngineCommand.vllm_serve(arguments, env)
        self._engine = Engine(given if command is None else EngineCommand((*command, *arguments), dict(env)))
        self._has_started = False
        self._served: OrderedDict[str, None] = OrderedDict()  # adapters whose files are here; the oldest first
        self._watching: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Ray Serve's: wait for the server at first; raise where it does not answer."""
        if not self._has_started:
            await self._engine.wait_until_healthy()
            self._has_started = True
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        elif not await self._engine.is_healthy():
            raise ReplicaLost(f"no healthy answer from replica {self.name}")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Ray Serve's: what the routers should know of this replica."""
        if not self._has_started:
            return {}
        report = await self._engine.report()
        adapters = {**dict.fromkeys(self._served, int(Tier.STORE)), **{k: int(v) for k, v in report.adapters.items()}}
        return {"adapters": adapters, "capacity": report.capacity, "requests": report.requests}

    async def forward(self, call: Call) -> AsyncIterator[Head | bytes | Lost]:
        """Pass a request on: yields the head of the answer, then its body as it comes; or `Lost`, at any time."""
        request = self._engine.client.build_request(
            call.method, call.target, headers=_to_server(call.headers), content=call.body
        )
        try:
            answer = await self._engine.client.send(request, stream=True)
        except httpx.HTTPError as error:
            yield self._lost(error)
            return
        try:
            if answer.status_code >= 500 and not await self._engine.is_healthy():
                yield Lost(self.name, f"status {answer.status_code} of a server that is not healthy")
                return
            yield Head(self.name, answer.status_code, _to_client(answer.headers, self.name))
            async for chunk in answer.aiter_raw():
                yield chunk
            if call.adapter and answer.status_code == 200:
                self._remember(call.adapter)
        except httpx.HTTPError as error:
            yield self._lost(error)
        finally:
            await answer.aclose()  # a request whose client is gone is aborted by that

    async def admin(self, call: Call) -> AdminAnswer:
        """Pass a call on that every replica gets, and return its whole answer."""
        try:
            answer = await self._engine.client.request(
                call.method, call.target, headers=_to_server(call.headers), content=call.body
            )
        except httpx.HTTPError as error:
            refusal = ReplicaLost(self._lost(error).found)
            return AdminAnswer(self.name, refusal.http_status, str(refusal).encode())
        return AdminAnswer(self.name, answer.status_code, answer.content)

    def __del__(self) -> None:
        """End the server with the replica."""
        if not hasattr(self, "_watching"):
            return  # no server was started
        if self._watching is not None:
            self._watching.get_loop().call_soon_threadsafe(self._watching.cancel)
        self._engine.end()

    async def _watch(self) -> None:
        """A replica without its server is no use, and Ray notices a dead replica sooner than an unhealthy one."""
        while not self._engine.has_ended:  # noqa: ASYNC110 - it is a process
            await asyncio.sleep(WATCH_S)
        logger.error("The server of replica %s has ended:\n%s", self.name, self._engine.log_tail())
        os.kill(os.getpid(), signal.SIGKILL)

    def _lost(self, error: Exception) -> Lost:
        return Lost(self.name, f"no answer from replica {self.name}: {type(error).__name__} {error}".strip())

    def _remember(self, adapter: str) -> None:
        self._served[adapter] = None
        self._served.move_to_end(adapter)
        while len(self._served) > REMEMBERED:
            self._served.popitem(last=False)


def require_secrets(names: Sequence[str]) -> None:
    """Refuse to serve without a variable that the one who started this has: without a key, everybody would be let in.

    Raises:
        InvalidSettings: one of them is not in this process's environment.
    """
    here = environment()
    missing = [name for name in names if name not in here]
    if missing:
        raise InvalidSettings(
            f"a Ray worker without {', '.join(missing)}",
            expected="the secrets of whoever has started the servers, which Ray is not given",
            remedy="set them in the environment in which 'ray start' runs on each node",
        )


def _to_server(headers: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    left_out = HOP_BY_HOP | {"content-length"}
    return [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers if name.lower() not in left_out
    ]


def _to_client(headers: httpx.Headers, replica: str) -> tuple[tuple[str, str], ...]:
    left_out = HOP_BY_HOP | {"server", "date"}  # Ray's proxy has its own
    texts = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers.raw)
    return (*((name, value) for name, value in texts if name not in left_out), (REPLICA_HEADER, replica))
