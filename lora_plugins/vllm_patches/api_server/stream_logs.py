"""A refused stream is logged as every refusal: one line of ours, once for each name and text.

vLLM's stream generators write a traceback for every exception, so that a client could fill the log at will.
"""

from __future__ import annotations

import logging

from lora_plugins.errors import LoRAPluginsError

_LOGGERS = (
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.scale_out.token_in_token_out.serving",
    "vllm.entrypoints.speech_to_text.base.serving",
)


def patch() -> None:
    """Filter the generators' loggers of this process; a second call changes nothing.

    `async_llm.py` logs the error; records of the exception raised in its place are dropped.

    Touches:
        vllm.entrypoints.openai.chat_completion.serving: logger
        vllm.entrypoints.openai.completion.serving: logger
        vllm.entrypoints.scale_out.token_in_token_out.serving: logger
        vllm.entrypoints.speech_to_text.base.serving: logger
    Why: a traceback for each refused stream: a client fills the log at will.
    Until: the stream generators write no traceback for HTTPException and VLLMClientError.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_not_ours)


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Return whether a record has no exception of vLLM that stands for an error of ours."""
    # `raise … from None` hides our error from the traceback, and keeps the error as the context.
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not isinstance(error.__context__, LoRAPluginsError)
