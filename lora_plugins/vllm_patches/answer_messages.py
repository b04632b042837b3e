"""Additions of the engine core to vLLM's outputs for the API server: versions, and the error that ends a request.

An error travels in the last output of its request: as the stop reason, or as a tensor of bytes for a pooling request
(`EngineCoreOutput` in vllm/v1/engine/__init__.py, 0.30 to 0.33).

A part of a client's request that a pause has aborted ends with an output of ours too.

Touches:
    vllm.v1.request: RequestStatus{FINISHED_ERROR}
    vllm.v1.engine:
        EngineCoreOutput{request_id, new_token_ids, pooling_output, finish_reason, stop_reason, events, trace_headers}
        FinishReason{ABORT, ERROR}
Why: the client gets our status and text, and does not wait for a part until the resume.
"""

from __future__ import annotations

import json
from typing import Any

from lora_plugins.errors import LoRAPluginsError, error_of

VERSIONS = "lora_versions"  # in the kv_transfer_params of an output: vLLM passes no other free field on to answers
_PREFIX = "lora-plugins:"  # of the stop reason


def refused_output(request: Any, error: LoRAPluginsError) -> Any:
    """Return the last output of a request, which ends with `error`; vLLM's `EngineCoreOutput`."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.request import RequestStatus

    # vLLM turns FINISHED_ERROR into `FinishReason.ERROR`, for which its API server raises: no short text goes out.
    request.status = RequestStatus.FINISHED_ERROR
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        pooling_output=None if request.pooling_params is None else error_tensor(error),
        finish_reason=FinishReason.ERROR,
        stop_reason=stop_reason(error),
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )


def aborted_output(request: Any) -> Any:
    """Return the last output of a part of a client's request that a pause has aborted; vLLM's `EngineCoreOutput`."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ABORT,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )


def stop_reason(error: LoRAPluginsError) -> str:
    """Return an error as a stop reason."""
    return _PREFIX + json.dumps(error.plain())


def error_tensor(error: LoRAPluginsError) -> Any:
    """Return an error as a pooling request's output: vLLM asks for a tensor, and drops the stop reason."""
    import torch

    return torch.frombuffer(bytearray(stop_reason(error).encode()), dtype=torch.uint8)


def error_in_tensor(pooled: Any) -> LoRAPluginsError | None:
    """Return the error in a pooled output; None for a result, as no result is of bytes."""
    if str(getattr(pooled, "dtype", "")) != "torch.uint8":
        return None
    return error_in(bytes(pooled.tolist()).decode(errors="replace"))


def error_in(reason: object) -> LoRAPluginsError | None:
    """Return the error in a stop reason; None for another stop reason."""
    if isinstance(reason, str) and reason.startswith(_PREFIX):
        return error_of(json.loads(reason.removeprefix(_PREFIX)))
    return None
