"""A real `vllm serve` on loopback: started with small settings, waited for, and ended by its process group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed.forking_vllm import Forked, fork

START_TIMEOUT_S = 600
VLLM = "vllm.entrypoints.cli.main:main"
SMALL_ENGINE = (
    "--dtype", "float32",
    "--enforce-eager",
    "--max-model-len", "256",
    "--max-num-batched-tokens", "256",
    "--max-num-seqs", "16",
)  # fmt: skip


# One thread that computes, bound to no core: vLLM would bind that of each server to the same one.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Server:
    """A running server: its base URL, its process and the file with everything that it printed."""

    url: str
    process: subprocess.Popen[bytes] | Forked
    log_file: Path

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")


def outer_environment() -> dict[str, str]:
    """This process's environment without a development shell's own settings, which must not leak into an engine."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("LORA_PLUGINS_", "VLLM_"))}


def plugged(plugins: str, store: Path, adapters: Path | None = None) -> dict[str, str]:
    """The variables of a server with these plugins over a store, and over a directory of adapters."""
    return {
        "VLLM_PLUGINS": plugins,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "LORA_PLUGINS_STORE_DIR": str(store),
        **({} if adapters is None else {"VLLM_LORA_RESOLVER_CACHE_DIR": str(adapters)}),
    }


@contextmanager
def reserved_port() -> Iterator[int]:
    """A loopback port that no other process is given while the block runs; connections to it are refused.

    A server may listen on it that sets SO_REUSEADDR or SO_REUSEPORT, as vLLM's does.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@contextmanager
def vllm_server(
    model: Path,
    log_file: Path,
    *,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    progress: Callable[[float], None] = lambda seconds: None,
    is_forking: bool = False,
    program: str = VLLM,
) -> Iterator[Server]:
    """Start `vllm serve model`, wait until it is healthy, and end it and all its children afterwards.

    With `is_forking` it is forked, and forks its engine and workers (`forking_vllm`); `program` then is the function
    that serves.
    """
    environment = {
        **outer_environment(),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Clients drop idle connections after 5 s, vLLM too: a request sent just then would meet a closed one.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        **(env or {}),
    }
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with reserved_port() as port:
        address = ("--host", "127.0.0.1", "--port", str(port))
        command = ["vllm", "serve", str(model), *address, *SMALL_ENGINE, *arguments]
        if is_forking:
            process = fork(program, command, environment=environment, output=log_file)
        else:
            command[0] = str(Path(sys.executable).with_name("vllm"))
            with log_file.open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            server = Server(f"http://127.0.0.1:{port}", process, log_file)
            wait_until_healthy(server, progress)
            yield server
        finally:
            end(process)


def wait_until_healthy(server: Server, progress: Callable[[float], None] = lambda seconds: None) -> None:
    """Return when `/health` answers 200; raises where the server ends before, or takes too long."""
    started = time.monotonic()
    while True:
        waited_s = time.monotonic() - started
        if server.process.poll() is not None:
            raise RuntimeError(f"vllm serve ended with {server.process.returncode}:\n{server.log()[-4000:]}")
        if waited_s > START_TIMEOUT_S:
            raise TimeoutError(f"vllm serve is not healthy after {START_TIMEOUT_S} s:\n{server.log()[-4000:]}")
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=10) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        progress(waited_s)
        time.sleep(0.25)


def end(process: subprocess.Popen[bytes] | Forked) -> None:
    """End the process group that this module started, kindly first."""
    for number, patience_s in ((signal.SIGINT, 15), (signal.SIGTERM, 5), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        # The server has ended; its children get the next, harder signal if any is left.
        time.sleep(0.2)
    process.wait()
