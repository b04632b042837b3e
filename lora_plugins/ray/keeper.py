"""Runs a command, and ends the command and all its processes when the asking process is gone, for whatever cause.

    python -m lora_plugins.ray.keeper COMMAND ...

Standard input is a pipe from the asking process. At the pipe's end, closed or broken by SIGKILL, the command gets
SIGTERM, and after `GRACE_S` everything below this process SIGKILL. Linux: processes whose parent has ended become
children of this process (PR_SET_CHILD_SUBREAPER), so none is missed. Exits as the command does, with 128 + its signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

GRACE_S = 15.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: Sequence[str]) -> int:
    """Run the command; see the module."""
    # Signals are for the command, not for this process: this process ends last.
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def before_exec() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # the command must not outlive a killed keeper

    process = subprocess.Popen(  # noqa: S603 - the command line that the user gave
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=before_exec,  # noqa: PLW1509 - this process has a single thread
    )
    # A pidfd wakes `select` when the command ends; a signal handler for SIGCHLD would race with `poll`.
    stdin, ended = sys.stdin.fileno(), os.pidfd_open(process.pid)
    while process.poll() is None and not asked:
        readable, _, _ = select.select([stdin, ended], [], [], 1.0)
        if stdin in readable and not os.read(stdin, 4096):
            break
    code = _end(process)
    return code if code >= 0 else 128 - code


def _end(process: subprocess.Popen[bytes]) -> int:
    """End the command, then all its remaining processes; return the command's exit code."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    process.kill()
    code = process.wait()
    # The children of an ending process come here before its own end is seen: without a child, no process is left.
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return code


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
