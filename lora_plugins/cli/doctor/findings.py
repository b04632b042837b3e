"""One verdict of the doctor's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lora_plugins.errors import LoRAPluginsError


class State(StrEnum):
    """`ON` and `OK` are as they should be, `OFF` is a choice; a `PROBLEM` keeps something asked for from working."""

    OK = "ok"
    ON = "on"
    OFF = "off"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found at one place, and what to do where something is to be done."""

    check: str
    state: State
    found: str
    remedy: str = ""


def problem_of(check: str, error: LoRAPluginsError) -> Finding:
    """One of our errors as a finding."""
    expected = f"; expected {error.expected}" if error.expected else ""
    return Finding(check, State.PROBLEM, f"{error.found}{expected}", error.remedy)
