"""Programs of vLLM forked from one process that has imported it: each import takes some twelve seconds of a core.

    python -P testbed/forking_vllm.py < questions > answers

A program's own processes are forked too: on CPUs vLLM always spawns its engine and workers; elsewhere it forks them by
default, so plugins must live with both. What a library reads from the environment while it is imported is read once,
so programs that differ in it (`READ_AT_IMPORT`) are forked from different processes.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

READ_AT_IMPORT = ("OMP_NUM_THREADS", "PROMETHEUS_MULTIPROC_DIR", "TRITON_INTERPRET", "HF_HUB_OFFLINE")
IMPORTED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "transformers.models.llama",
)
LOOK_S = 0.02
LONGEST_S = 600.0


class Forked:
    """A running program, with what `subprocess.Popen` has of it."""

    def __init__(self, parent: _Parent, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout_s: float = float("inf")) -> int:
        ends = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("vllm", timeout_s)
            time.sleep(LOOK_S)
        return self.returncode


class _Parent:
    """The process that programs are forked from."""

    def __init__(self, read_at_import: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**_without_ours(os.environ), **read_at_import},
            start_new_session=True,
        )
        atexit.register(self.end)

    def ask(self, question: object) -> int | None:
        with self._lock:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that imports vLLM ended with {self._process.wait()}")
        return json.loads(answer)

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


_parents: dict[tuple[str | None, ...], _Parent] = {}


def fork(
    function: str, arguments: Sequence[str], *, environment: Mapping[str, str], output: Path, error: Path | None = None
) -> Forked:
    """Call `module:function` with these command line arguments, in a process and session of its own.

    What it prints goes to `output`, and its errors to `error` or to the same file.
    """
    key = tuple(environment.get(name) for name in READ_AT_IMPORT)
    if key not in _parents:
        _parents[key] = _Parent({name: environment[name] for name in READ_AT_IMPORT if name in environment})
    parent = _parents[key]
    question = {
        "function": function,
        "arguments": list(arguments),
        "environment": dict(environment),
        "directory": str(Path.cwd()),
        "output": str(output),
        "error": str(error or output),
    }
    return Forked(parent, parent.ask(question))


def run_forked(
    function: str, arguments: Sequence[str], *, environment: Mapping[str, str], home: Path
) -> subprocess.CompletedProcess[str]:
    """As `fork`, and wait until it has ended."""
    output, error = home / "output", home / "error"
    forked = fork(function, arguments, environment=environment, output=output, error=error)
    try:
        status = forked.wait(LONGEST_S)
    finally:
        if forked.returncode is None:
            os.killpg(forked.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(arguments, status, output.read_text(), error.read_text())


def _without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    ours = ("LORA_PLUGINS_", "VLLM_", *READ_AT_IMPORT)
    return {name: value for name, value in environment.items() if not name.startswith(ours)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints
    sys.path.append(str(Path(__file__).parent.parent))
    for module in IMPORTED:
        importlib.import_module(module)
    for line in iter(sys.stdin.readline, ""):
        question = json.loads(line)
        if "poll" in question:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                answers.close()
                _become(question)
                return
        answers.write(json.dumps(answer) + "\n")


def _become(question: dict[str, object]) -> None:
    os.setsid()
    for number, path, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, question["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, question["error"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        os.dup2(os.open(path, mode, 0o644), number)
    os.chdir(question["directory"])
    os.environ.clear()
    os.environ.update(question["environment"])
    sys.argv = list(question["arguments"])
    fork = functools.partial(multiprocessing.get_context, "fork")
    multiprocessing.get_context = lambda method=None: fork()
    module, _, function = question["function"].partition(":")
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main()
