"""Engines of tiny models, one after another, each forked from one process that has imported vLLM: seconds apiece.

with ForkedEngines(log_file) as engines, engines.engine(architecture, directory) as engine:
    answers = engine.call("answers", ["attention"])
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any, Self

from testbed.architectures import BY_NAME, Architecture
from testbed.server import outer_environment

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
    """The process that has imported vLLM; it has one engine at a time."""

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file

    def __enter__(self) -> Self:
        ours, theirs = socketpair()
        root = str(Path(__file__).resolve().parent.parent)
        environment = {**outer_environment(), **_ENVIRONMENT}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "testbed.forked_engines", str(theirs.fileno())]
        with self.log_file.open("wb") as log, theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, pass_fds=[theirs.fileno()]
            )
        self._connection = Connection(ours.detach())
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
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
    import peft
    import vllm
    import vllm.lora.worker_manager
    import vllm.v1.worker.cpu_worker  # noqa: F401 - so that its children have it

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


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
