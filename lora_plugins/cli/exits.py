"""How commands end: one exit code for each kind of outcome; docs/guides/command-line.md has the table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from lora_plugins.errors import (
    AdapterNotFound,
    InvalidSettings,
    LoRAPluginsError,
    NoFreeSlot,
    OutOfMemory,
    SourceUnavailable,
)


class Exit(IntEnum):
    """Exit codes; 130 and 141 are what a shell reports for the signals behind them."""

    OK = 0
    WRONG = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAVAILABLE = 4
    NO_ROOM = 5
    SETTINGS = 6
    BUG = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class UsageProblem(Exception):
    """An argument that cannot be right."""


_EXITS: Mapping[type[LoRAPluginsError], Exit] = {
    AdapterNotFound: Exit.NOT_FOUND,
    SourceUnavailable: Exit.UNAVAILABLE,
    NoFreeSlot: Exit.NO_ROOM,
    OutOfMemory: Exit.NO_ROOM,
    InvalidSettings: Exit.SETTINGS,
}


def exit_of(error: LoRAPluginsError) -> Exit:
    """The exit code for one of our errors."""
    return next((code for kind, code in _EXITS.items() if isinstance(error, kind)), Exit.WRONG)
