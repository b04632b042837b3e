"""Our additions to messages between vLLM's processes: a step's commands and reports, and why a request ended.

Commands ride on the `SchedulerOutput` of the engine core's step to the workers (vllm/v1/core/sched/output.py), and
reports on their `ModelRunnerOutput` back (vllm/v1/outputs.py, 0.30 to 0.33). vLLM pickles both as plain dataclasses
without a field for more, so `attach_commands` and `attach_reports` set an attribute.

The error that ends a request travels from the engine core to the API server in the request's last `EngineCoreOutput`
(vllm/v1/engine/__init__.py, 0.30 to 0.33): as JSON in the stop reason, or as a tensor of bytes for a pooling request,
of which vLLM drops the stop reason.

Touches:
    vllm.v1.request: RequestStatus{FINISHED_ERROR}
    vllm.v1.engine:
        EngineCoreOutput{request_id, new_token_ids, pooling_output, finish_reason, stop_reason, events, trace_headers}
        FinishReason{ABORT, ERROR}
Why: the client gets our status and text; a part of a request that a pause has aborted ends before the resume.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from lora_plugins.errors import LoRAPluginsError, error_of
from lora_plugins.scheduler.messages import Command, Report

VERSIONS = "lora_versions"  # in the kv_transfer_params of an output: vLLM passes no other free field on to answers
_PREFIX = "lora-plugins:"  # of the stop reason


def attach_commands(output: Any, commands: Iterable[Command]) -> None:
    """Attach every worker's commands, in order, to a `SchedulerOutput`.

    Touches:
        vllm.v1.core.sched.output: SchedulerOutput{total_num_scheduled_tokens}
        vllm.v1.outputs: ModelRunnerOutput
    Why: commands reach every worker with the batch that they are for, and reports the scheduler.
    Until: vLLM has a field for what plugins send along.
    """
    output.lora_commands = tuple(commands)


def commands_of(output: Any) -> tuple[Command, ...]:
    """Return the commands on a `SchedulerOutput`; none on an output of vLLM's own making, such as an empty output."""
    return tuple(getattr(output, "lora_commands", ()))


def attach_reports(output: Any, reports: Iterable[Report]) -> None:
    """Attach to a `ModelRunnerOutput` which jobs have ended on all workers, and which slots could not be written."""
    output.lora_reports = tuple(reports)


def reports_of(output: Any) -> tuple[Report, ...]:
    """Return the reports on a `ModelRunnerOutput`; none on an output of vLLM's own making."""
    return tuple(getattr(output, "lora_reports", ()))


def last_output(request: Any, error: LoRAPluginsError | None) -> Any:
    """Return vLLM's `EngineCoreOutput` that ends a request with an error; without one, an abort by a pause."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.request import RequestStatus

    if error is not None:
        request.status = RequestStatus.FINISHED_ERROR
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        pooling_output=None if error is None or request.pooling_params is None else error_tensor(error),
        # For `FinishReason.ERROR`, vLLM's API server raises: no short text goes out.
        finish_reason=FinishReason.ABORT if error is None else FinishReason.ERROR,
        stop_reason=None if error is None else stop_reason(error),
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )


def stop_reason(error: LoRAPluginsError) -> str:
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


def error_of_output(output: Any) -> LoRAPluginsError | None:
    """Return the error in an output of vLLM's API for its callers, of a completion or pooled; None without one."""
    if hasattr(output.outputs, "data"):
        return error_in_tensor(output.outputs.data)
    return next((error for one in output.outputs if (error := error_in(one.stop_reason)) is not None), None)


def error_in(reason: object) -> LoRAPluginsError | None:
    """Return the error in a stop reason; None for another stop reason."""
    if isinstance(reason, str) and reason.startswith(_PREFIX):
        return error_of(json.loads(reason.removeprefix(_PREFIX)))
    return None
