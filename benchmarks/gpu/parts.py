"""All programs in one call of a machine that is lent for minutes: each in a process of its own, until its deadline.

A part that is over its time, or fails, costs the other parts nothing: programs write as rows come.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

# Users of `auto` run vLLM's kernels, beside which slots are written too: so `streams` comes first.
SECONDS = {"streams": 90.0, "check": 115.0, "time": 175.0, "tune": 70.0}
BEGINS_NOTHING_NEW = 0.75  # of a part's time: imports come before it, and the last row after it
_GRACE_S = 2.0

Command = Callable[[str, float], Sequence[str]]


def command_of(options: Sequence[str]) -> Command:
    """How a part is started, by its name and seconds; every part gets the options."""
    start = [sys.executable, "-m", "benchmarks.gpu"]
    return lambda part, seconds: [*start, part, "--seconds", f"{seconds:.0f}", *options]


def run(seconds: float, command: Command) -> bool:
    """Run all parts within the seconds; whether each has ended well."""
    began, share, said = time.monotonic(), seconds / sum(SECONDS.values()), dict[str, str]()
    ends = began
    for part, of_part in SECONDS.items():
        ends += of_part * share  # what a part leaves of its time goes to the next
        left = ends - time.monotonic()
        process = subprocess.Popen(command(part, left * BEGINS_NOTHING_NEW), start_new_session=True)
        try:
            said[part] = f"ended with {process.wait(max(0.0, left - _GRACE_S))}"
        except subprocess.TimeoutExpired:
            said[part] = "was ended at its deadline"
            # With the processes that compile for it.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        print(f"{part} {said[part]}, {time.monotonic() - began:.0f} s after the start", flush=True)
    return set(said.values()) == {"ended with 0"}
