"""vLLM's offline engine (`LLM`): the output of a request whose adapter cannot be had says why.

Wrapped is `LLMEngine.step` (vllm/v1/engine/llm_engine.py, 0.30 to 0.33).
"""

from __future__ import annotations

import functools
from typing import Any

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.log import logger
from lora_plugins.vllm_patches.request_errors import error_in, error_in_tensor


def patch() -> None:
    """Have every offline engine of this process do so."""
    from vllm.v1.engine.llm_engine import LLMEngine

    LLMEngine.step = _stepping(LLMEngine.step)


def _stepping(original: Any) -> Any:
    @functools.wraps(original)
    def step(self: Any) -> Any:
        outputs = original(self)
        for output in outputs:
            if output.finished:
                _explain(output)
        return outputs

    return step


def _explain(output: Any) -> None:
    """Put an error's text where the user finds it: the stop reason; of a pooling request, its own error."""
    if hasattr(output.outputs, "data"):
        error = error_in_tensor(output.outputs.data)
        if error is not None:
            _say(output.request_id, error)
            output.outputs.data = output.outputs.data[:0]
            if hasattr(output, "error"):
                output.error = _request_error(error)
        return
    for one in output.outputs:
        error = error_in(one.stop_reason)
        if error is not None:
            one.stop_reason = str(error)
            _say(output.request_id, error)


def _request_error(error: LoRAPluginsError) -> Any:
    from vllm.outputs import RequestError

    return RequestError(code=error.code, message=str(error), retryable=error.retry_after_s is not None)


def _say(request_id: str, error: LoRAPluginsError) -> None:
    logger.warning("Request %s was not answered: %s", request_id, error)


LEDGER = (
    Patch(
        """
        vllm.v1.engine.llm_engine:
            LLMEngine.step(self)
        vllm.outputs:
            RequestError{code, message, retryable}  # since 0.32
        """,
        what="wrapped: the error of a refused request is put where users of the offline engine find it",
        why="a stop reason, or a tensor for pooling, carries it",
    ),
)
