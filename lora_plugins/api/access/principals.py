"""Who the running request comes from, and the routes that only an administrator may use; pure ASGI, no vLLM."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from lora_plugins.api.access.policy import Policy, Principal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Of the request that this code runs for; None where it runs for none, such as at start.
principal_of_request: ContextVar[Principal | None] = ContextVar("lora_plugins_principal", default=None)

FORBIDDEN = "This needs a key with admin rights in the server's access policy."
# Ours; vLLM's; and, in its development mode, the one that reaches every method of the workers, ours too.
_ADMIN_PATHS = ("/v1/loras", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc")


async def require_admin() -> None:
    """Let only administrators in; a FastAPI dependency. Without a policy everybody is one.

    Raises:
        HTTPException: 403.
    """
    principal = principal_of_request.get()
    if principal is not None and not principal.is_admin:
        from fastapi import HTTPException

        raise HTTPException(403, FORBIDDEN)


class KnowPrincipal:
    """ASGI middleware: notes whose key a request carries, and keeps others than administrators from their routes.

    Goes inside of vLLM's own authentication, which answers 401 first.
    """

    def __init__(self, app: App, policy: Policy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        principal = self._policy.of_key(_bearer(scope))
        if not principal.is_admin and _is_for_admins(scope):
            await _forbid(scope, send)
            return
        token = principal_of_request.set(principal)
        try:
            await self._app(scope, receive, send)
        finally:
            principal_of_request.reset(token)


def _bearer(scope: Scope) -> str | None:
    """The key of the first Authorization header, read as vLLM's `AuthenticationMiddleware` (0.32) reads it."""
    for name, value in scope["headers"]:
        if name.lower() == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            return key if scheme.lower() == "bearer" else None
    return None


def _is_for_admins(scope: Scope) -> bool:
    path, root = scope["path"], scope.get("root_path", "")
    return any(
        candidate == admin or candidate.startswith(f"{admin}/")
        for candidate in (path, path.removeprefix(root))
        for admin in _ADMIN_PATHS
    )


async def _forbid(scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    error = {"message": FORBIDDEN, "type": "Forbidden", "param": None, "code": 403}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
