"""Engines of tiny models, one after another, each forked from a process that has imported vLLM: seconds apiece.

with ForkedEngines(log_file) as engines, engines.engine(architecture, directory) as engine:
    answers = engine.call("answers", ["attention"])
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Self

from testbed.architectures import BY_NAME, Architecture
from testbed.forking_vllm import fork
from testbed.server import outer_environment

_START_TIMEOUT_S = 300.0

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine and its worker are in the process that asks them
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_PLUGINS": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineError(Exception):
    """An engine could not be made, or a call of it failed; with the traceback."""


class Engine:
    """A process of its own; what can be called are the methods of `testbed.model_engine.ModelEngine`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def call(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, arguments))
        return _received(self._connection)


class ForkedEngines:
    """A process that has imported vLLM and PEFT; it has one engine at a time."""

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file

    def __enter__(self) -> Self:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path := f"{folder}/socket")  # of few characters
            listener.listen()
            listener.settimeout(_START_TIMEOUT_S)
            self._process = fork(
                "testbed.forked_engines:main", ["forked_engines", path],
                environment={**outer_environment(), **_ENVIRONMENT}, output=self.log_file,
            )  # fmt: skip
            accepted, _ = listener.accept()
        accepted.setblocking(True)
        self._connection = Connection(accepted.detach())
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @contextmanager
    def engine(self, architecture: Architecture, directory: Path, *, with_plugins: bool = True) -> Iterator[Engine]:
        """A new process for this architecture, with nothing made yet; it is ended afterwards."""
        self._connection.send((architecture.label, str(directory), with_plugins))
        _received(self._connection)
        try:
            yield Engine(self._connection)
        finally:
            self._connection.send(None)
            while self._connection.recv() != "ended":
                pass


def _received(connection: Connection) -> Any:
    try:
        is_good, answer = connection.recv()
    except (EOFError, ConnectionError):
        raise EngineError("the process that has imported vLLM has ended") from None
    if not is_good:
        raise EngineError(answer)
    return answer


# --- in the process that has imported vLLM, and in its children


def _serve(connection: Connection) -> None:
    import peft  # so that its children have it
    import vllm.lora.worker_manager  # noqa: F401

    assert peft
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            return
        if asked is None:  # the end of an engine that had already ended
            continue
        name, directory, with_plugins = asked
        process = os.fork()
        if process == 0:
            try:
                _run(connection, BY_NAME[name], Path(directory), with_plugins)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        _, status = os.waitpid(process, 0)
        if status:
            connection.send((False, f"the engine ended with {os.waitstatus_to_exitcode(status)}"))
        connection.send("ended")


def _run(connection: Connection, architecture: Architecture, directory: Path, with_plugins: bool) -> None:
    from testbed.model_engine import ModelEngine

    engine = ModelEngine(architecture, directory, with_plugins=with_plugins)
    connection.send((True, None))
    while (asked := connection.recv()) is not None:
        method, arguments = asked
        try:
            answer = True, getattr(engine, method)(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)


def main() -> None:
    with Client(sys.argv[1], "AF_UNIX") as connection:
        _serve(connection)
