"""The command line `lora-plugins`."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

from lora_plugins.cli.exits import Exit

_NEEDED = ("typer", "rich")  # vLLM brings them; an installation without dependencies may not


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command of `sys.argv` and end the process with the command's exit code (`exits.Exit`)."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"lora-plugins: the command line needs {' and '.join(missing)}. To fix: pip install {' '.join(missing)}\n"
        )
        sys.exit(Exit.USAGE)
    try:
        from lora_plugins.cli.app import run

        code = run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    if code in (Exit.INTERRUPTED, Exit.BROKEN_PIPE):
        # Threads of an interrupted fetch, or a pipe that nobody reads, must not hold up the end.
        os._exit(code)
    sys.exit(code)
