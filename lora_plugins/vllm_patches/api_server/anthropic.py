"""`/v1/messages` and `/v1/messages/count_tokens` answer with the status and headers that our errors have elsewhere.

vLLM's two routes catch every exception, log a traceback, and answer errors of others than vLLM with 500.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from lora_plugins.server.response import present
from lora_plugins.vllm_patches.wrapping import wrap


def patch() -> None:
    """Have the serving class of this process answer so; a second call changes nothing."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    for name in ("create_messages", "count_tokens"):
        wrap(AnthropicServingMessages, name, _returning_errors)


def _returning_errors(original: Any) -> Any:
    """Return errors: the routes put a returned error into Anthropic's form; the response carries its headers.

    Touches:
        vllm.entrypoints.anthropic.serving:
            AnthropicServingMessages{create_messages(self, request, raw_request),
                count_tokens(self, request, raw_request)}
        vllm.entrypoints.serve.engine.protocol: ErrorInfo{message, type, code} ErrorResponse{error}
    Why: the routes catch HTTPException too: 500, a traceback in the log, and no Retry-After.
    Until: vLLM's create_error_response keeps to the status and headers of an HTTPException.
    """
    from fastapi import HTTPException
    from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

    async def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await original(self, *args, **kwargs)
        except HTTPException as error:
            present().headers.update(error.headers or {})
            status = HTTPStatus(error.status_code)
            return ErrorResponse(error=ErrorInfo(message=error.detail, type=status.phrase, code=status.value))

    return answer
