"""What vLLM's application does with our errors: status and headers on every route, and one line in the log.

Runs in an API server, where a route has raised an error. `/v1/messages` and `/v1/messages/count_tokens` of Anthropic's
API catch every exception, log a traceback, and answer errors of others than vLLM with 500: there our errors are
returned, not raised. vLLM's stream generators write a traceback for every exception, so that a client could fill the
log at will: a refused stream is logged as every refusal, in a line of ours, once for each name and text.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.lifecycle.response import present
from lora_plugins.vllm_patches.wrapping import wrap

_LOGGERS = (
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.scale_out.token_in_token_out.serving",
    "vllm.entrypoints.speech_to_text.base.serving",
)


def patch() -> None:
    """Have the application of this process answer and log our errors so; a second call changes nothing.

    `async_llm.py` logs the error of a stream; records of the exception raised in its place are dropped.

    Touches:
        vllm.entrypoints.openai.chat_completion.serving: logger
        vllm.entrypoints.openai.completion.serving: logger
        vllm.entrypoints.scale_out.token_in_token_out.serving: logger
        vllm.entrypoints.speech_to_text.base.serving: logger
    Why: a traceback for each refused stream: a client fills the log at will.
    Until: the stream generators write no traceback for HTTPException and VLLMClientError.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.serve.exception_handling import register

    wrap(register, "http_exception_handler", _http_exception_handler)
    for name in ("create_messages", "count_tokens"):
        wrap(AnthropicServingMessages, name, _answer_anthropic)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_not_ours)


async def _http_exception_handler(original: Any, req: Any, exc: Any) -> Any:
    """Put the headers of an `HTTPException` on the response.

    Touches:
        vllm.entrypoints.serve.exception_handling.register: http_exception_handler
        vllm.entrypoints.serve.exception_handling.handlers.http: http_exception_handler(req, exc)
    Why: vLLM drops the headers, and with the headers Retry-After on a 503.
    Until: vLLM's handler passes exc.headers on, as FastAPI's own does.
    """
    response = await original(req, exc)
    for name, value in (exc.headers or {}).items():
        response.headers[name] = value
    return response


async def _answer_anthropic(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
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

    try:
        return await original(self, *args, **kwargs)
    except HTTPException as error:
        present().headers.update(error.headers or {})
        status = HTTPStatus(error.status_code)
        return ErrorResponse(error=ErrorInfo(message=error.detail, type=status.phrase, code=status.value))


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Return whether a record has no exception of vLLM that stands for an error of ours."""
    # `raise … from None` hides our error from the traceback, and keeps the error as the context.
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not isinstance(error.__context__, LoRAPluginsError)
