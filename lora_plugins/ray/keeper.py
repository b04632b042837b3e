"""Runs a command, and ends it and all that it started when the process that asked for it is gone, however it went.

    python -m lora_plugins.ray.keeper COMMAND ...

Standard input is a pipe from that process: at its end, be it closed or killed with SIGKILL, the command gets SIGTERM,
and after `GRACE_S` everything below this process SIGKILL. Linux: processes whose parent has ended come here
(PR_SET_CHILD_SUBREAPER), so that none is missed. Exits as the command does, with 128 + its signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

GRACE_S = 15.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: Sequence[str]) -> int:
    """Run it; see the module."""
    # Signals are for the command's end, not for this process: it ends last.
    asked = [False]

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler
        asked[0] = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def before_exec() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # should this process be killed

    process = subprocess.Popen(  # noqa: S603 - the command line that the user gave
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=before_exec,  # noqa: PLW1509 - there is one thread
    )
    watched = os.pidfd_open(process.pid)
    try:
        while process.poll() is None and not asked[0]:
            readable, _, _ = select.select([sys.stdin.fileno(), watched], [], [], 1.0)
            if sys.stdin.fileno() in readable and not os.read(sys.stdin.fileno(), 4096):
                break
    finally:
        _end(process)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it kindly, then all that is left of it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    while left := list(descendants(os.getpid())):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Those of the command that came here are reaped; itself, only where nobody else would miss its exit code.
        process.poll()
        while process.returncode is not None:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                return
        time.sleep(0.02)


def descendants(pid: int) -> Iterator[int]:
    """The processes below one, as far as they run: not those that have ended and are not reaped."""
    for child in _children(pid):
        yield from descendants(child)
        if _state(child) not in ("Z", ""):
            yield child


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                children += [int(child) for child in file.read().split()]
    return children


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
