"""Run one module of this package as a child process that serves a loopback port, and end it by its pid."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 240
END_TIMEOUT_S = 5


@contextmanager
def child(
    module: str, arguments: Sequence[str] = (), *, env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start `python -m module`, wait for its `announce`, and yield its port and process.

    The child ends when its standard input does, so it does not outlive a test run that was killed.
    """
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],  # -P: not the `testbed` of wherever we stand
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        pass_fds=tuple(pass_fds),
        # A Ctrl-C in the terminal is for the tests, not for their servers.
        start_new_session=True,
    )
    try:
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line.startswith(b"port "):
            raise RuntimeError(f"{module} did not start: it said {line!r} and ended with {process.poll()}")
        yield int(line.split()[1]), process
    finally:
        _end(process)


def announce_and_wait(port: int) -> None:
    """In the child: tell the parent the port, then return when the parent closes the pipe or dies."""
    sys.stdout.write(f"port {port}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
