"""Programs of vLLM forked from one process that has imported it: each import takes some twelve seconds of a core.

    python -P testbed/forking_vllm.py SOCKET MODULE:FUNCTION

A program's own processes are forked too: on CPUs vLLM always spawns its engine and workers; elsewhere it forks them by
default, so plugins must live with both. What a library reads from the environment while it is imported is read once,
so programs that differ in it (`READ_AT_IMPORT`) are forked from different processes; the Hub's library, Prometheus's
client and fsspec read it again. The processes of one test run share them, and are forked so themselves, from one that
has imported the tests too (`tests/forked_workers.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock

READ_AT_IMPORT = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "TRITON_INTERPRET": "",
    "PYTHONPATH": "",  # only a part with a module that Python imports first, as `v2_runner` has it
}
IMPORTED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "transformers.models.llama",
)
# What servers, engines, workers and commands import later, a third of a start; not every release of vLLM has all.
# Not `lora_plugins.plugin`, which reads the environment then, nor SageMaker's package, which sets a level of logs.
IMPORTED_LATER = (
    "vllm.entrypoints.generate.generative_scoring.api_router",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.launchers.run_batch",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.rl.online.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.core.sched.scheduler",
    "ray.dag",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "lora_plugins.process",
    "lora_plugins.endpoint_plugin",
    "lora_plugins.api.routes",
    "lora_plugins.worker.manager",
    "lora_plugins.cli.commands",
    "s3fs",
)
RUN = "PYTEST_XDIST_TESTRUNUID"  # whose processes share the one that programs are forked from
LOOK_S = 0.02
LONGEST_S = 600.0
GRACE_S = 10.0
_NAP_S = 0.0002
_FOLDER = Path(tempfile.gettempdir()) / f"lora-plugins-{os.getuid()}"


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

    def wait(self, timeout_s: float = LONGEST_S) -> int:
        ends = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("vllm", timeout_s)
            time.sleep(LOOK_S)
        return self.returncode


class _Parent:
    """The process that programs are forked from; they end with the connection by which they were asked for, it itself
    with the last one.
    """

    def __init__(self, read_at_import: Mapping[str, str], prepare: str) -> None:
        self._lock = threading.Lock()
        run = os.environ.get(RUN, str(os.getpid()))
        described = json.dumps([run, __file__, dict(read_at_import), prepare])
        key = hashlib.sha256(described.encode()).hexdigest()[:16]
        path = _FOLDER / key
        _FOLDER.mkdir(mode=0o700, exist_ok=True)
        with FileLock(_FOLDER / f"lock-{key[0]}"):  # a few files: those of different parents seldom wait
            connection = _connected(path) or self._start(path, read_at_import, prepare)
        self._file = connection.makefile("rw", encoding="utf-8")

    def ask(self, question: object) -> Any:
        with self._lock:
            self._file.write(json.dumps(question) + "\n")
            self._file.flush()
            answer = self._file.readline()
        if not answer:
            raise RuntimeError("the process that imports vLLM has ended")
        return json.loads(answer)

    def fork(
        self, function: str, arguments: Sequence[str], environment: Mapping[str, str], *files: str, is_vllm: bool = True
    ) -> Forked:
        """As the functions `fork` and `fork_python`; `files` are input, output and errors."""
        question = {
            "function": function,
            "arguments": list(arguments),
            "environment": dict(environment),
            "directory": str(Path.cwd()),
            "files": files,
            "is_vllm": is_vllm,
        }
        return Forked(self, self.ask(question))

    def _start(self, path: Path, read_at_import: Mapping[str, str], prepare: str) -> socket.socket:
        ours = ("LORA_PLUGINS_", "VLLM_", "TRITON_", *READ_AT_IMPORT)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(path), prepare],
            stdin=subprocess.DEVNULL,
            env={**environment, **read_at_import, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        while (connection := _connected(path)) is None:
            if process.poll() is not None:
                raise RuntimeError(f"the process that imports vLLM ended with {process.returncode}")
            time.sleep(LOOK_S)
        return connection


def _connected(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


_parents: dict[str, _Parent] = {}


def fork(
    function: str, arguments: Sequence[str], *, environment: Mapping[str, str], output: Path, error: Path | None = None
) -> Forked:
    """Call `module:function` with these command line arguments, in a process and session of its own.

    What it prints goes to `output`, and its errors to `error` or to the same file.
    """
    read_at_import = {name: environment.get(name, default) for name, default in READ_AT_IMPORT.items()}
    read_at_import["PYTHONPATH"] = os.pathsep.join(filter(_is_imported_first, _python_path(environment)))
    read_at_import = {name: value for name, value in read_at_import.items() if value}
    environment = {"HF_HUB_OFFLINE": "1", **read_at_import, **environment}
    files = os.devnull, str(output), str(error or output)
    return _parent(read_at_import).fork(function, arguments, environment, *files)


def fork_python(code: str, prepare: str) -> Forked:
    """Run this code as `python -c` would, with this process's environment, input and outputs, in a fork of a process
    that has called `prepare`; what is started there is none of vLLM's programs, and spawned as Python does.
    """
    parent = _parent({"OMP_NUM_THREADS": "1"}, prepare)
    return parent.fork("testbed.forking_vllm:code", ["-c", code], os.environ, *map(_path_of, range(3)), is_vllm=False)


def start_parent() -> None:
    """Begin to import vLLM for the first programs, without waiting."""
    defaults = {name: value for name, value in READ_AT_IMPORT.items() if value}
    threading.Thread(target=_parent, args=(defaults,), daemon=True).start()


def _parent(read_at_import: Mapping[str, str], prepare: str = "testbed.forking_vllm:prepare") -> _Parent:
    key = json.dumps([read_at_import, prepare])
    if key not in _parents:
        _parents[key] = _Parent(read_at_import, prepare)
    return _parents[key]


def _path_of(number: int) -> str:
    """The path under which another process opens a descriptor of this one; a socket cannot be opened."""
    path = f"/proc/{os.getpid()}/fd/{number}"
    try:
        os.close(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY))
    except OSError:
        return os.devnull
    return path


def _python_path(environment: Mapping[str, str]) -> list[str]:
    return [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]


def _is_imported_first(folder: str) -> bool:
    return (Path(folder) / "sitecustomize.py").exists()


def run_forked(
    function: str, arguments: Sequence[str], *, environment: Mapping[str, str], home: Path
) -> subprocess.CompletedProcess[str]:
    """As `fork`, and wait until it has ended; `home` gets files with what it prints."""
    output, error = (home / f"{name}-{len(list(home.iterdir()))}" for name in ("output", "error"))
    forked = fork(function, arguments, environment=environment, output=output, error=error)
    try:
        status = forked.wait()
    finally:
        if forked.returncode is None:
            os.killpg(forked.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(arguments, status, output.read_text(), error.read_text())


def run_script(
    code: str, *arguments: str, environment: Mapping[str, str], home: Path
) -> subprocess.CompletedProcess[str]:
    """As `run_forked`, of Python code."""
    file = home / f"script-{len(list(home.iterdir()))}.py"
    file.write_text(code)
    return run_forked("testbed.forking_vllm:script", [str(file), *arguments], environment=environment, home=home)


def script() -> None:
    runpy.run_path(sys.argv[0], run_name="__main__")


def code() -> None:
    exec(sys.argv.pop(), {"__name__": "__main__"})


def main() -> None:
    path, prepare = sys.argv[1:]
    Path(path).unlink(missing_ok=True)  # of one that was killed
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    os.dup2(2, 1)  # vLLM prints
    sys.path.append(str(Path(__file__).parent.parent))
    gc.disable()  # what is imported stays
    _called(prepare)
    gc.enable()
    gc.collect()
    gc.freeze()  # else the first collection of each program copies all of it
    _serve(listener, path)


def prepare() -> None:
    """What servers and engines import, wait for and compile at each start."""
    import_vllm()
    importlib.import_module("testbed.model_kinds").ask_in_this_process()
    _sleep_while_waiting()
    _bind_kernels()
    _compile_kernels()


def import_vllm() -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    for module in IMPORTED_LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with contextlib.suppress(ImportError):
        _read_service_models()


def _read_service_models() -> None:
    """Have clients of S3 find botocore's descriptions parsed: 0.1 seconds of a core for each that does so itself."""
    from botocore.loaders import JSONFileLoader

    from testbed.s3 import make_client

    read = functools.cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda _, path: read(path)
    make_client("http://127.0.0.1:1").close()


def _compile_kernels() -> None:
    """Have programs find our CPU kernels compiled: 0.7 seconds of a core for each that does so itself."""
    from lora_plugins.kernels.compiled import build

    with contextlib.suppress(build.CannotCompile):
        build.problem()
        build.product("float32")


def _sleep_while_waiting() -> None:
    """Have engines and workers sleep between looks for a message: vLLM's look all the time, for a second after each."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = functools.partial(time.sleep, _NAP_S)


def _bind_kernels() -> None:
    """Have workers find vLLM's C++ kernels bound: 0.4 seconds of a core for each that looks through all modules."""
    from vllm.platforms import current_platform

    bind = getattr(current_platform, "register_triton_kernel_overrides", None)
    if bind is not None:
        bind()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)


def _serve(listener: socket.socket, path: str) -> None:
    running: dict[int, set[int]] = {}  # programs, by the descriptor of the connection that asked for them
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection = listener.accept()[0]
                selector.register(connection, selectors.EVENT_READ, connection.makefile("rw", encoding="utf-8"))
            elif line := _line(key.data):
                question = json.loads(line)
                answer = _status(question["poll"]) if "poll" in question else os.fork()
                if answer == 0 and "poll" not in question:
                    for each in selector.get_map().values():
                        os.close(each.fileobj.detach())
                    _run(question)
                mine = running.setdefault(key.fd, set())
                if "poll" not in question:
                    mine.add(answer)
                elif answer is not None:
                    mine.discard(question["poll"])
                with contextlib.suppress(OSError):  # tests that have just been killed: the next line is their end
                    key.data.write(json.dumps(answer) + "\n")
                    key.data.flush()
            else:
                selector.unregister(key.fileobj)
                with contextlib.suppress(OSError):
                    key.data.close()
                key.fileobj.close()
                _end(running.pop(key.fd, set()))
        if len(selector.get_map()) == 1:
            Path(path).unlink(missing_ok=True)  # who comes now starts another; who came just before is still served
            if not selector.select(timeout=0):
                os._exit(0)  # without what its libraries print at an end


def _line(connection: Any) -> str:
    try:
        return str(connection.readline())
    except OSError:
        return ""


def _end(programs: set[int]) -> None:
    """End, with all that they have started, programs whose tests have ended without doing so, as by a signal."""
    left = set(programs)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
        ends = time.monotonic() + GRACE_S
        while left and time.monotonic() < ends:
            left = {pid for pid in left if _status(pid) is None}
            time.sleep(LOOK_S)


def _status(pid: int) -> int | None:
    pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def _run(question: dict[str, Any]) -> NoReturn:
    """End as an interpreter does, but for taking apart what was imported, which takes seconds."""
    status = 1
    try:
        _become(question)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())  # which a program may have replaced
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become(question: dict[str, Any]) -> None:
    os.setsid()
    to_write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, (path, mode) in enumerate(zip(question["files"], (os.O_RDONLY, to_write, to_write), strict=True)):
        os.dup2(os.open(path, mode, 0o644), number)
    os.chdir(question["directory"])
    os.environ.clear()
    os.environ.update(question["environment"])
    sys.path[:0] = [part for part in _python_path(os.environ) if part not in sys.path]
    _read_hub_settings()
    _read_prometheus_settings()
    _read_fsspec_settings()
    sys.argv = list(question["arguments"])
    if question["is_vllm"]:
        fork = functools.partial(multiprocessing.get_context, "fork")
        multiprocessing.get_context = lambda method=None: fork()
    _called(question["function"])


def _called(name: str) -> None:
    module, _, function = name.partition(":")
    getattr(importlib.import_module(module), function)()


def _read_hub_settings() -> None:
    """Which Hub this program asks, and where it keeps what it gets, as if it had imported the Hub's library itself."""
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import _cache_manager

    importlib.reload(constants)
    hf_api.api.endpoint = constants.ENDPOINT
    _cache_manager.HF_HUB_CACHE = constants.HF_HUB_CACHE


def _read_prometheus_settings() -> None:
    """Whether this program's metrics are in files, which those of its processes share."""
    from prometheus_client import values

    values.ValueClass = values.get_value_class()


def _read_fsspec_settings() -> None:
    """What this program's environment says of stores (`FSSPEC_…`)."""
    from fsspec import config

    config.set_conf_env(config.conf)


if __name__ == "__main__":
    main()
