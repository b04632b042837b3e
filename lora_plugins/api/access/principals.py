"""The principal of the running request, and the routes for administrators only; pure ASGI, no vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from lora_plugins.api.access.administrators import Administrators, Scope, forbidden
from lora_plugins.api.access.policy import Principal
from lora_plugins.errors import LoRAPluginsError, NotAllowed
from lora_plugins.server.limits import NO_LIMIT, Rate, Share
from lora_plugins.server.response import route_path

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# The principal of the request that this code runs for; None outside requests, such as at start.
principal_of_request: ContextVar[Principal | None] = ContextVar("lora_plugins_principal", default=None)
# What a trainer calls for a name that its key may push: `lora_plugins.client`, and a rollback.
_PUSHERS = {"PUT": ("",), "GET": ("",), "DELETE": ("",), "POST": ("/pause", "/resume", "/rollback")}
# Makes the refusal for this request's caller on a route for administrators.
_refusal: ContextVar[Callable[[], NotAllowed]] = ContextVar("lora_plugins_refusal", default=forbidden)

# Without a policy: routes of this package; of vLLM; and, in vLLM's development mode, of every method of the workers.
_LORAS = "/v1/loras"
_ADMIN_PATHS = (_LORAS, "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc")


def label_of_request() -> str | None:
    """The label of the running request's principal; None outside requests."""
    principal = principal_of_request.get()
    return None if principal is None else principal.label


def share_of_request() -> Share:
    """The share of the running request's principal."""
    principal = principal_of_request.get()
    return NO_LIMIT if principal is None else Share(principal.label, principal.share)


def rate_of_request() -> Rate | None:
    """The limits of the running request's principal; None without limits."""
    principal = principal_of_request.get()
    return None if principal is None else principal.rate


async def require_admin() -> None:
    """Let only administrators in; a FastAPI dependency. Code outside requests passes.

    Raises:
        HTTPException: 403.
    """
    principal = principal_of_request.get()
    if principal is not None and not principal.is_admin:
        from fastapi import HTTPException

        raise HTTPException(NotAllowed.http_status, str(_refusal.get()()))


class KnowPrincipal:
    """ASGI middleware: notes the principal of a request, and keeps all but administrators from their routes.

    Stands inside vLLM's own authentication, which answers 401 first.

    Args:
        admit: counts a request of a principal with limits; raises the refusal of a request over them.
    """

    def __init__(
        self, app: App, administrators: Administrators, admit: Callable[[Rate], Awaitable[None]] | None = None
    ) -> None:
        self._app = app
        self._administrators = administrators
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        # WebSockets too: vLLM serves realtime requests over them.
        ours = self._administrators
        principal = ours.principal(scope)
        # Refuse here, before vLLM reads the body, which may be gigabytes of a push.
        if not principal.is_admin and _is_administrators(scope, has_policy=ours.policy is not None):
            if not _may_call(principal, scope):
                await _refuse(scope, send, ours.refusal(scope), asks_for_key=ours.asks_for_key(scope))
                return
            principal = replace(principal, is_admin=True, is_pusher=True)
        if self._admit is not None and principal.rate is not None and _is_among(_COUNTED, *_route(scope)):
            try:
                await self._admit(principal.rate)
            except LoRAPluginsError as refusal:
                await _refuse(scope, send, refusal)
                return
        # Context variables follow the request into its tasks, but not into other requests.
        tokens = principal_of_request.set(principal), _refusal.set(lambda: ours.refusal(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            principal_of_request.reset(tokens[0])
            _refusal.reset(tokens[1])


def _is_administrators(scope: Scope, *, has_policy: bool) -> bool:
    if has_policy:
        return not is_tenants(*_route(scope))
    path = route_path(scope)
    return any(path == admin or path.startswith(f"{admin}/") for admin in _ADMIN_PATHS)


def _route(scope: Scope) -> tuple[str, str]:
    return "WEBSOCKET" if scope["type"] == "websocket" else scope["method"], route_path(scope)


def _may_call(principal: Principal, scope: Scope) -> bool:
    path = route_path(scope)
    name = path.removeprefix(f"{_LORAS}/")
    query = scope.get("query_string", b"").decode("latin-1")
    # A pin takes a slot from all others for good; `?pin` alone is a pin too.
    if name == path or scope["type"] != "http" or "pin" in parse_qs(query, True):
        return False
    ends = [end for end in _PUSHERS.get(scope["method"], ()) if name.endswith(end)]
    return any(principal.may_push(name.removesuffix(end)) for end in ends)


async def _refuse(scope: Scope, send: Send, refusal: LoRAPluginsError, *, asks_for_key: bool = False) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    status = HTTPStatus(401 if asks_for_key else refusal.http_status)
    error = {"message": str(refusal), "type": status.phrase, "param": None, "code": status}
    of_anthropic = {"type": "error"} if route_path(scope).startswith("/v1/messages") else {}
    body = json.dumps(of_anthropic | {"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if asks_for_key:
        # RFC 9110 requires the header with a 401.
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# The routes that an access policy leaves to everybody, of vLLM 0.30 to 0.33. One that a later release adds, or another
# endpoint plugin, is an administrator's until it stands here: it may change the engine, or other tenants' work.

# Use one model, which the policy checks, or none at all: with the engine, which a key's limits count, or without.
_RUNS_THE_ENGINE = """
/v1/completions /v1/chat/completions /v1/chat/completions/batch /v1/responses /v1/messages /cohere/v2/chat
/v1/audio/transcriptions /v1/audio/translations
/v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank
/generative_scoring /v1/systemone /v1/decisions /inference/v1/generate /invocations
"""
_USES_A_MODEL = f"""{_RUNS_THE_ENGINE}
/v1/completions/render /v1/completions/derender /v1/chat/completions/render /v1/chat/completions/derender
/v1/responses/render /v1/responses/ID/cancel /v1/messages/count_tokens /v1/messages/render /cohere/v2/chat/render
/tokenize /detokenize
"""
# `/metrics` also answers below it, for Prometheus; the pages of the documentation come with files of their own.
_READS = """
/v1/models /v1/models/REST /v1/responses/ID /tokenizer_info /health /load /version /metrics /metrics/REST
/docs /docs/oauth2-redirect /redoc /openapi.json /static/REST
"""


def _matching(routes: str) -> re.Pattern[str]:
    return re.compile(
        "|".join(re.escape(route) for route in routes.split()).replace("ID", "[^/]+").replace("REST", ".*")
    )


_BY_METHOD = {
    "POST": _matching(_USES_A_MODEL + "/ping"),
    "GET": _matching(_READS + "/ping"),
    "HEAD": _matching(_READS + "/ping"),
    "WEBSOCKET": _matching("/v1/realtime"),
}


# What a key's limits count.
_COUNTED = {"POST": _matching(_RUNS_THE_ENGINE), "WEBSOCKET": _BY_METHOD["WEBSOCKET"]}


def is_tenants(method: str, path: str) -> bool:
    """Whether every key reaches a route; `path` is below the root path, and `method` is `WEBSOCKET` for those."""
    return _is_among(_BY_METHOD, method, path)


def _is_among(by_method: Mapping[str, re.Pattern[str]], method: str, path: str) -> bool:
    routes = by_method.get(method)
    return routes is not None and routes.fullmatch(path) is not None
