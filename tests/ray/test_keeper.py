"""The keeper of a server's processes: none survives whoever asked for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# Starts another process in a session of its own, which ignores SIGTERM, and ends: its parent cannot end it.
STUBBORN = """
import os, signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(%r, 'w').close(); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code % sys.argv[1]], start_new_session=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
time.sleep(600)
"""
HOLDER = """
import subprocess, sys, time
kept = subprocess.Popen([sys.executable, "-P", "-m", "lora_plugins.ray.keeper", *sys.argv[1:]], stdin=subprocess.PIPE)
print(kept.pid, flush=True)
time.sleep(600)
"""


def started(tmp_path: Path) -> tuple[subprocess.Popen[bytes], psutil.Process, list[psutil.Process]]:
    """Who asks, the keeper, and all that is kept."""
    ready = tmp_path / "ready"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, sys.executable, "-c", STUBBORN, str(ready)], stdout=subprocess.PIPE
    )
    keeper = psutil.Process(int(holder.stdout.readline()))
    ends = time.monotonic() + 60
    while not ready.exists():
        assert time.monotonic() < ends
        time.sleep(0.05)
    kept = keeper.children(recursive=True)
    assert len(kept) == 2
    return holder, keeper, kept


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_who_asked(tmp_path: Path, number: int) -> None:
    holder, keeper, kept = started(tmp_path)
    holder.send_signal(number)
    holder.wait()
    _, alive = psutil.wait_procs([keeper, *kept], timeout=30)
    assert alive == []


def test_nothing_survives_a_command_that_ends(tmp_path: Path) -> None:
    holder, keeper, kept = started(tmp_path)
    kept[0].kill()
    _, alive = psutil.wait_procs(kept, timeout=30)
    holder.kill()
    holder.wait()
    psutil.wait_procs([keeper], timeout=30)
    assert alive == []
    assert not keeper.is_running()


def test_killed_keeper_ends_the_command(tmp_path: Path) -> None:
    holder, keeper, kept = started(tmp_path)
    keeper.kill()
    _, alive = psutil.wait_procs(kept[:1], timeout=30)
    holder.kill()
    holder.wait()
    for process in alive + kept[1:]:
        if process.is_running():
            process.kill()
    assert alive == []


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_keeper_exits_as_the_command_does(code: str, expected: int) -> None:
    reading, writing = os.pipe()
    kept = subprocess.run(
        [sys.executable, "-P", "-m", "lora_plugins.ray.keeper", sys.executable, "-c", code], stdin=reading, check=False
    )
    os.close(writing)
    os.close(reading)
    assert kept.returncode == expected
