"""A program that was forked for a test run ends with it, however the run ends: nobody else would end it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
WITHOUT_VLLM = "from testbed.forking_vllm import main; main()"
LONGEST_S = 30


def connected(path: Path) -> socket.socket:
    ends = time.monotonic() + LONGEST_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            return connection
        except OSError:
            connection.close()
            assert time.monotonic() < ends
            time.sleep(0.02)


def test_programs_end_with_the_tests_that_forked_them(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with subprocess.Popen([sys.executable, "-c", WITHOUT_VLLM, str(path), "os:getpid"], cwd=REPOSITORY) as parent:
        tests, others = connected(path), connected(path)
        programs = []
        for connection in (tests, others):
            question = {
                "function": "signal:pause",
                "arguments": ["program"],
                "environment": dict(os.environ),
                "directory": str(tmp_path),
                "files": [os.devnull, str(tmp_path / "output"), str(tmp_path / "error")],
                "is_vllm": True,
            }
            connection.sendall(json.dumps(question).encode() + b"\n")
            programs.append(psutil.Process(json.loads(connection.recv(100))))
        try:
            tests.sendall(json.dumps({"poll": programs[0].pid}).encode() + b"\n")
            tests.close()  # as by a run that is killed, before it has its answer
            psutil.wait_procs(programs[:1], LONGEST_S)
            assert [program.is_running() for program in programs] == [False, True]
            others.close()
            parent.wait(LONGEST_S)
            assert not programs[1].is_running()
        finally:
            for program in programs:
                with contextlib.suppress(psutil.NoSuchProcess):
                    program.kill()
            parent.kill()
