"""vLLM drops the headers of an `HTTPException`; with this patch `Retry-After` reaches the client."""

from __future__ import annotations

import functools
from typing import Any

from lora_plugins.ledger import Patch


def keep_http_headers() -> None:
    """Have vLLM put an `HTTPException`'s headers on its response."""
    from vllm.entrypoints.serve.exception_handling import register as module

    original = module.http_exception_handler

    @functools.wraps(original)
    async def wrapped(req: Any, exc: Any) -> Any:
        response = await original(req, exc)
        for name, value in (exc.headers or {}).items():
            response.headers[name] = value
        return response

    module.http_exception_handler = wrapped


LEDGER = (
    Patch(
        """
        vllm.entrypoints.serve.exception_handling.register: http_exception_handler
        vllm.entrypoints.serve.exception_handling.handlers.http: http_exception_handler(req, exc)
        """,
        what="wrapped: the headers of the HTTPException are put on the response",
        why="vLLM drops them, and with them Retry-After on a 503",
        remove="vLLM's handler passes exc.headers on, as FastAPI's own does",
    ),
)
