"""The principal of the running request, and the routes that the principal may call; pure ASGI, no vLLM.

`KnowPrincipal` stands in the API server's stack of middlewares, and runs once for each connection: `administrators.py`
says who calls, the middleware refuses or passes the call on, and notes the principal in a context variable. The
functions above the class read the variable, wherever the request's code needs limits or rights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from lora_plugins.api.access.administrators import Administrators, forbidden
from lora_plugins.api.access.open_routes import is_counted, is_open
from lora_plugins.api.access.policy import Principal
from lora_plugins.api.http_errors import body_of, headers_of, hidden
from lora_plugins.errors import LoRAPluginsError, NotAllowed
from lora_plugins.lifecycle.principal_limits import NO_LIMIT, Rate, Share
from lora_plugins.lifecycle.response import route_path

# The principal of the request that this code runs for; None outside requests, such as at start.
principal_of_request: ContextVar[Principal | None] = ContextVar("lora_plugins_principal", default=None)
# What a trainer calls for a name that its key may push: `lora_plugins.client`, and a rollback.
_PUSHERS = {"PUT": ("",), "GET": ("",), "DELETE": ("",), "POST": ("/pause", "/resume", "/rollback")}
# Makes the refusal for this request's caller on a route for administrators.
_refusal: ContextVar[Callable[[], NotAllowed]] = ContextVar("lora_plugins_refusal", default=forbidden)


def label_of_request() -> str | None:
    """The label of the running request's principal; None outside requests."""
    principal = principal_of_request.get()
    return None if principal is None else principal.label


def share_of_request() -> Share:
    principal = principal_of_request.get()
    return NO_LIMIT if principal is None else Share(principal.label, principal.share)


def rate_of_request() -> Rate | None:
    """The limits of the running request's principal; None without limits."""
    principal = principal_of_request.get()
    return None if principal is None else principal.rate


def shown(error: LoRAPluginsError) -> LoRAPluginsError:
    """The error as the running request's caller may see it: only an administrator of every name sees paths."""
    principal = principal_of_request.get()
    sees_all = principal is None or (principal.is_admin and not principal.is_pusher)
    return error if sees_all else hidden(error)


async def require_admin() -> None:
    """Let only administrators in; a FastAPI dependency. Code outside requests passes.

    Raises:
        HTTPException: 403.
    """
    principal = principal_of_request.get()
    if principal is not None and not principal.is_admin:
        from fastapi import HTTPException

        raise HTTPException(NotAllowed.http_status, str(_refusal.get()()))


@dataclass(eq=False)
class KnowPrincipal:
    """ASGI middleware: notes the principal of a request, and keeps all but administrators from their routes.

    Stands inside vLLM's own authentication, which answers 401 first.

    Attributes:
        admit: counts a request of a principal with limits; raises the refusal of a request over them.
    """

    app: ASGIApp
    administrators: Administrators
    admit: Callable[[Rate], Awaitable[None]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        # WebSockets too: vLLM serves realtime requests over them.
        ours = self.administrators
        principal = ours.principal(scope)
        # Refuse here, before vLLM reads the body, which may be gigabytes of a push.
        method = "WEBSOCKET" if scope["type"] == "websocket" else scope["method"]
        route = method, route_path(scope)
        if not principal.is_admin and not is_open(*route, has_policy=ours.policy is not None):
            if not _may_call(principal, scope):
                await _refuse(scope, receive, send, ours.refusal(scope), asks_for_key=ours.asks_for_key(scope))
                return
            principal = replace(principal, is_admin=True, is_pusher=True)
        if self.admit is not None and principal.rate is not None and is_counted(*route):
            try:
                await self.admit(principal.rate)
            except LoRAPluginsError as refusal:
                await _refuse(scope, receive, send, refusal)
                return
        # Context variables follow the request into its tasks, but not into other requests.
        tokens = principal_of_request.set(principal), _refusal.set(lambda: ours.refusal(scope))
        try:
            await self.app(scope, receive, send)
        finally:
            principal_of_request.reset(tokens[0])
            _refusal.reset(tokens[1])


def _may_call(principal: Principal, scope: Scope) -> bool:
    path = route_path(scope)
    name = path.removeprefix("/v1/loras/")
    query = scope.get("query_string", b"").decode("latin-1")
    # A pin takes a slot from all others for good; `?pin` alone is a pin too.
    if name == path or scope["type"] != "http" or "pin" in parse_qs(query, True):
        return False
    ends = [end for end in _PUSHERS.get(scope["method"], ()) if name.endswith(end)]
    return any(principal.may_push(name.removesuffix(end)) for end in ends)


async def _refuse(
    scope: Scope, receive: Receive, send: Send, refusal: LoRAPluginsError, *, asks_for_key: bool = False
) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    status = 401 if asks_for_key else refusal.http_status
    of_anthropic = {"type": "error"} if route_path(scope).startswith("/v1/messages") else {}
    # RFC 9110 requires the header with a 401.
    headers = headers_of(refusal) | ({"WWW-Authenticate": "Bearer"} if asks_for_key else {})
    # Late: engines and workers import this file too, and refuse nobody.
    from starlette.responses import JSONResponse

    await JSONResponse(of_anthropic | body_of(refusal, status), status, headers)(scope, receive, send)
