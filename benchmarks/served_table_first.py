"""vLLM without plugins after the death of its first API server, as it is and told that the server ended with 0.

python -m benchmarks.served_table_first BASE --port 8000     # vllm serve, told so
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.record import ROOT
from lora_plugins.vllm_patches.wrapping import Over

STARTS_S, ENDS_S, ASKED = 400.0, 60.0, 20


class _EndedWell(Over):
    @property
    def exitcode(self) -> int:
        return 0


class _Manager(Over):
    def __init__(self, manager: Any) -> None:
        super().__init__(manager)
        self.processes = [_EndedWell(process) for process in manager.processes]


def serve() -> None:
    """`vllm serve`, whose supervisor takes every death of an API server for a good end."""
    import vllm.entrypoints.cli.serve as command
    from vllm.entrypoints.cli.main import main

    wait = command.wait_for_completion_or_failure
    command.wait_for_completion_or_failure = lambda api_server_manager, **more: wait(
        _Manager(api_server_manager), **more
    )
    sys.argv[1:1] = ["serve"]
    main()


def without_the_first(base: Path, home: Path, engines: int, *, is_told: bool) -> dict[str, Any]:
    """Kill the first of two API servers; ask for the base model afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["benchmarks.served_table_first"] if is_told else ["vllm.entrypoints.cli.main", "serve"]
    options = {"--api-server-count": 2, "--data-parallel-size": engines, "--port": port, "--served-model-name": "base",
               "--max-model-len": 128, "--dtype": "float32"}  # fmt: skip
    arguments = [str(it) for option in options.items() for it in option]
    env = {"PYTHONPATH": str(ROOT), "VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
           "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip
    log = home / f"log-{engines}-{is_told}"
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", *command, str(base), "--enforce-eager", *arguments],
            stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **env}, start_new_session=True,
        )  # fmt: skip
    try:
        ends_at = time.monotonic() + STARTS_S
        while log.read_text().count("Application startup complete") < 2:
            assert server.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < ends_at, log.read_text()[-2000:]
            time.sleep(0.5)
        first = re.findall(r"\(ApiServer_0 pid=(\d+)\)", log.read_text())[0]
        os.kill(int(first), signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(1.0 if is_told else ENDS_S)
        answers = Counter(_asked(port) for _ in range(ASKED))
        return {"engines": engines, "told that it ended with 0": is_told, "answers": dict(answers),
                "exit_code": server.poll()}  # fmt: skip
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(ENDS_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _asked(port: int) -> str:
    body = {"model": "base", "prompt": "hello", "max_tokens": 8}
    try:
        return str(httpx.post(f"http://localhost:{port}/v1/completions", json=body, timeout=60).status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


if __name__ == "__main__":
    serve()
