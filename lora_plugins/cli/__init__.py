"""The entry point of the command line `lora-plugins`, and its exit codes.

docs/guides/command-line.md has the table of exit codes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum

from lora_plugins.errors import LoRAPluginsError


class Exit(IntEnum):
    """Exit codes; 130 and 141 are those of a shell for SIGINT and SIGPIPE. WRONG: an adapter refused, or a problem."""

    OK = 0
    WRONG = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAVAILABLE = 4
    NO_ROOM = 5
    SETTINGS = 6
    NOT_COMPARED = 7
    BUG = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class UsageProblem(Exception):
    """A wrong argument."""


_BY_CODE = {
    "L001": Exit.NO_ROOM,
    "L002": Exit.NOT_FOUND,
    "L004": Exit.NO_ROOM,
    "L006": Exit.UNAVAILABLE,
    "L007": Exit.SETTINGS,
}


def exit_of(error: LoRAPluginsError) -> Exit:
    return _BY_CODE.get(error.code, Exit.WRONG)


def worst(codes: Iterable[Exit]) -> Exit:
    """Return the largest code, OK without any; "not compared with a base model" is better than every failure."""
    return max(codes, key=lambda code: 0.5 if code is Exit.NOT_COMPARED else float(code), default=Exit.OK)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command of `sys.argv` and end the process with the command's exit code (`Exit`)."""
    try:
        from lora_plugins.cli.commands import run

        code = run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    if code in (Exit.INTERRUPTED, Exit.BROKEN_PIPE):
        # Threads of an interrupted fetch, or a pipe that nobody reads, must not hold up the end.
        os._exit(code)
    sys.exit(code)
