"""What the scheduler and the workers attach to vLLM's own messages of a step, which carry it to the other side.

`SchedulerOutput` (vllm/v1/core/sched/output.py) and `ModelRunnerOutput` (vllm/v1/outputs.py, 0.30 to 0.33) are plain
dataclasses, pickled whole, without a field for more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from lora_plugins.ledger import Patch
from lora_plugins.scheduler.messages import Command, Report, Slots


@dataclass(frozen=True, slots=True)
class StepCommands:
    """On a `SchedulerOutput`: what every worker carries out, in this order."""

    commands: tuple[Command, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReports:
    """On a `ModelRunnerOutput`: what all workers have done, and once, before it, which slots they have."""

    reports: tuple[Report | Slots, ...] = ()


T = TypeVar("T", StepCommands, StepReports)
_NAMES = {StepCommands: "lora_commands", StepReports: "lora_reports"}


def attach(output: Any, message: StepCommands | StepReports) -> None:
    """Have one of vLLM's messages carry one of ours."""
    setattr(output, _NAMES[type(message)], message)


def attached(output: Any, kind: type[T]) -> T:
    """What one of vLLM's messages carries of this kind; an empty one where there is none."""
    found: T = getattr(output, _NAMES[kind], None) or kind()
    return found


LEDGER = (
    Patch(
        """
        vllm.v1.core.sched.output: SchedulerOutput{total_num_scheduled_tokens}
        vllm.v1.outputs: ModelRunnerOutput
        """,
        what="plain dataclasses, given the attributes lora_commands and lora_reports",
        why="commands reach every worker with the batch that they are for, and reports the scheduler",
        remove="vLLM has a field for what plugins send along",
    ),
)
