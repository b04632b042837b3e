"""Additions of scheduler and workers to vLLM's own messages of a step, which carry them to the other side.

`SchedulerOutput` (vllm/v1/core/sched/output.py) and `ModelRunnerOutput` (vllm/v1/outputs.py, 0.30 to 0.33) are plain
dataclasses, pickled whole, without a field for more.

Touches:
    vllm.v1.core.sched.output: SchedulerOutput{total_num_scheduled_tokens}
    vllm.v1.outputs: ModelRunnerOutput
Why: commands reach every worker with the batch that they are for, and reports the scheduler.
Until: vLLM has a field for what plugins send along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from lora_plugins.scheduler.messages import Command, Report, Slots


@dataclass(frozen=True, slots=True)
class StepCommands:
    """On a `SchedulerOutput`: every worker's commands, in order."""

    commands: tuple[Command, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReports:
    """On a `ModelRunnerOutput`: finished work of all workers, and once, before all reports, the workers' slots."""

    reports: tuple[Report | Slots, ...] = ()


T = TypeVar("T", StepCommands, StepReports)
_NAMES = {StepCommands: "lora_commands", StepReports: "lora_reports"}


def attach(output: Any, message: StepCommands | StepReports) -> None:
    """Attach our message to a message of vLLM."""
    setattr(output, _NAMES[type(message)], message)


def attached(output: Any, kind: type[T]) -> T:
    """Return our message of type `kind` on a message of vLLM; an empty message where there is none."""
    # Outputs of vLLM's own making, such as an empty output, lack the attribute.
    found: T = getattr(output, _NAMES[kind], None) or kind()
    return found
