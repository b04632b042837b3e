"""The clients' address: names each request's adapter for the router, and asks another replica after a loss.

A Ray Serve deployment in a process of its own, between Ray's HTTP proxy and the replicas (`replica.py`). In goes a
client's HTTP request; out comes the answer of one replica as it streams, or of all replicas for calls that change or
list adapters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from lora_plugins.api.http_errors import body_of, headers_of
from lora_plugins.errors import LoRAPluginsError, ReplicaLost
from lora_plugins.log import logger
from lora_plugins.ray.replica import AdminAnswer, Call, Head, ServerGone

# Attempts double the wait: from 0.1 s, `ATTEMPTS` cover the seconds in which Ray finds a dead replica.
ATTEMPTS = 5
WAIT_S = 0.1
LONGEST_NAME = 1024
# Paths of calls that go to every replica, as each replica has its own registry.
_ADMIN = ("/v1/loras/", "/v1/load_lora_adapter/", "/v1/unload_lora_adapter/")
_MODELS = "/v1/models/"


class Ingress:
    """OpenAI's API, as the replicas' servers have the API."""

    def __init__(self, replicas: DeploymentHandle[Any], base_names: Sequence[str]) -> None:
        self._replicas = replicas
        self._base_names = frozenset(base_names)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        body = await request.body()
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        # A proxy names its client: without a key, servers let only callers on their own machine administer.
        client = request.client.host if request.client is not None else "unknown"
        headers = (*request.headers.raw, (b"x-forwarded-for", client.encode()))
        call = Call(request.method, target, headers, body)
        path = request.url.path.rstrip("/") + "/"
        if path.startswith(_ADMIN):
            return await self._administer(call)
        if path == _MODELS and request.method == "GET":
            return await self._models(call)
        name = await _model(request, body)
        # No adapter's name is so long; the server refuses the name, and the router need not remember it.
        adapter = "" if name in self._base_names or len(name) > LONGEST_NAME else name
        return await self._forward(call, adapter)

    async def _forward(self, call: Call, adapter: str) -> Response:
        excluded: tuple[str, ...] = ()
        found = ""
        for attempt in range(ATTEMPTS):
            if attempt > 1:  # the remaining replicas may be starting
                await asyncio.sleep(WAIT_S * 2**attempt)
            answer = await self._begun(Call(call.method, call.target, call.headers, call.body, adapter, excluded))
            if not isinstance(answer, ServerGone):
                return answer
            excluded, found = (*excluded, answer.replica), answer.found
            logger.warning("A request is sent to another replica: %s", found)
        return _error(
            ReplicaLost(
                f"{ATTEMPTS} replicas without an answer, the last one: {found}",
                expected="one that runs",
                remedy="send the request again; the replicas' logs say why they ended",
            )
        )

    async def _begun(self, call: Call) -> Response | ServerGone:
        """Return an answer whose first part is here; from then on no other replica can give the answer."""
        stream = self._replicas.options(stream=True, multiplexed_model_id=call.adapter).forward.remote(call)
        try:
            head = await anext(stream)
            first = head if isinstance(head, ServerGone) else await anext(stream, b"")
        except RayActorError as error:
            return ServerGone("", f"{type(error).__name__}: {error}")
        except BaseException:
            stream.cancel()  # the client is gone
            raise
        if isinstance(first, ServerGone):
            return first
        response = StreamingResponse(_body(head, first, stream), head.status)
        response.raw_headers = list(head.headers)
        return response

    async def _administer(self, call: Call) -> Response:
        """Pass the call to every replica, and return each replica's answer."""
        answers, lost = await self._ask_all(call)
        rows: list[dict[str, Any]] = [
            {"replica": it.replica, "status": it.status, "body": _json(it.body)} for it in answers
        ]
        rows += [{"replica": None, "status": 503, "body": {"error": {"message": text}}} for text in lost]
        # The worst status of all: a client that looks at the status alone notices a single failure.
        return JSONResponse({"replicas": rows}, status_code=max(int(row["status"]) for row in rows))

    async def _models(self, call: Call) -> Response:
        """Return the models of all replicas together."""
        answers, lost = await self._ask_all(call)
        cards: dict[str, Any] = {}
        for answer in answers:
            if answer.status != 200:
                return Response(answer.body, answer.status, media_type="application/json")
            for card in _json(answer.body).get("data", []):
                cards.setdefault(card.get("id"), card)
        if lost and not cards:
            return _error(ReplicaLost(lost[0], expected="a replica that runs", remedy="send the request again"))
        return JSONResponse({"object": "list", "data": list(cards.values())})

    async def _ask_all(self, call: Call) -> tuple[list[AdminAnswer], list[str]]:
        results = await self._replicas.broadcast("admin", call).results_async(return_exceptions=True)
        answers = sorted((it for it in results if isinstance(it, AdminAnswer)), key=lambda it: it.replica)
        return answers, [f"{type(it).__name__}: {it}" for it in results if not isinstance(it, AdminAnswer)]


async def _body(head: Head, first: bytes, rest: Any) -> AsyncIterator[bytes]:
    """Yield the parts of an answer's body; an event stream whose replica is lost ends with an error event."""
    try:
        yield first
        async for chunk in rest:
            if isinstance(chunk, ServerGone):
                raise ReplicaLost(chunk.found, remedy="send the request again")
            yield chunk
    except (RayActorError, ReplicaLost) as error:
        lost = error if isinstance(error, ReplicaLost) else ReplicaLost(f"{type(error).__name__}: {error}")
        logger.warning("An answer ends before it is whole: %s", lost)
        if not dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            raise  # the connection breaks off, so that no client takes a part for a whole answer
        yield f"\n\ndata: {json.dumps(body_of(lost))}\n\n".encode()
    except BaseException:
        rest.cancel()  # the client is gone
        raise


async def _model(request: Request, body: bytes) -> str:
    """Return the `model` of a request, of JSON or of a form; empty without a model."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        with suppress(Exception):  # the server refuses a form that cannot be parsed, with its own text
            return str((await request.form()).get("model", ""))
        return ""
    name = _json(body).get("model", "")
    return name if isinstance(name, str) else ""


def _json(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {"text": body.decode(errors="replace")} if body else {}
    return value if isinstance(value, dict) else {"value": value}


def _error(error: LoRAPluginsError) -> Response:
    return JSONResponse(body_of(error), error.http_status, headers_of(error))
