"""vLLM drops the headers of an `HTTPException`; with this patch `Retry-After` reaches the client."""

from __future__ import annotations

import functools
from typing import Any


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
