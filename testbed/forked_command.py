"""`vllm` for a shell's PATH, forked from the process that has imported it, as the other servers of the tests are.

    python -P testbed/forked_command.py serve MODEL ...

It prints where its caller does, if that is a file, passes on the signals that end a server, and ends as it does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

LONGEST_S = 3600.0
PATIENCE_S = 4  # of one that is to end; its caller kills this process a little later


def install(directory: Path) -> None:
    """Put the command into a directory of a PATH."""
    directory.mkdir(exist_ok=True)
    command = directory / "vllm"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P {Path(__file__).resolve()} "$@"\n')
    command.chmod(0o755)


def main() -> int:
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    from testbed.forking_vllm import fork

    output, error = (Path(os.readlink(f"/proc/self/fd/{number}")) for number in (1, 2))
    arguments = ["vllm", *sys.argv[1:]]
    forked = fork("vllm.entrypoints.cli.main:main", arguments, environment=os.environ, output=output, error=error)

    def pass_on(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(forked.pid, signal.SIGKILL if number == signal.SIGALRM else number)
        if number == signal.SIGTERM:
            signal.alarm(PATIENCE_S)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, pass_on)
    return forked.wait(LONGEST_S)


if __name__ == "__main__":
    sys.exit(main())
