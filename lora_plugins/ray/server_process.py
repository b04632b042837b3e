"""A `vllm serve` as a child process on a loopback port: started, waited for, asked, and ended.

Runs in a replica's Ray worker (`replica.py`). In goes a command line; out come an HTTP client for the server, whether
it is healthy, and its adapters and requests, read from its page of metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lora_plugins.errors import InvalidSettings, ReplicaLost
from lora_plugins.log import logger
from lora_plugins.routing.residency import Report, Tier
from lora_plugins.settings import environment

# Seconds: a large model loads for many minutes; the end allows `keeper.GRACE_S` and a little more.
START_TIMEOUT_S = 1800.0
END_TIMEOUT_S = 25.0
TAIL_LINES = 60
_LOADED, _CAPACITY = "vllm:lora_adapter_loaded", "lora_plugins_host_max_adapters"
_IN_FLIGHT = ("vllm:num_requests_running", "vllm:num_requests_waiting", "lora_plugins_held")
_PLACES = {"gpu": Tier.SLOT, "cpu": Tier.HOST}


def vllm_serve() -> tuple[str, ...]:
    """Return the command `vllm serve` of this Python's environment."""
    beside = Path(sys.executable).with_name("vllm")
    program = (str(beside),) if beside.exists() else (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main")
    return (*program, "serve")


class ServerProcess:
    """The running server.

    Args:
        command: starts the server; gets `--host` and `--port` at its end.
        env: beside this process's own environment.

    Attributes:
        client: sends requests to the server; only connecting has a time limit.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        # The socket holds the port for as long as the server runs: no other process gets the port, and vLLM's own
        # SO_REUSEPORT lets the server share the port.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind(("127.0.0.1", 0))
        port = self._held.getsockname()[1]
        kept = (*command, "--host", "127.0.0.1", "--port", str(port))
        self._process = subprocess.Popen(  # noqa: S603 - the command line that the user gave
            [sys.executable, "-P", "-m", "lora_plugins.ray.keeper", *kept],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A router has to know of every adapter in memory, so the limit of a dashboard is too low.
            env={"LORA_PLUGINS_METRICS_ADAPTERS": "all", **environment(), **env},
            start_new_session=True,
        )
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._passing_on = threading.Thread(target=self._pass_on, daemon=True)
        self._passing_on.start()
        # No limit on an answer: a long stream is healthy. `trust_env`: a proxy of the environment must not see
        # loopback.
        self.client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=4.0),
            trust_env=False,
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def log_tail(self) -> str:
        if self.has_ended:
            self._passing_on.join(1.0)
        return b"".join(self._tail).decode(errors="replace")

    async def wait_until_healthy(self) -> None:
        """Wait until the server answers.

        Raises:
            InvalidSettings: the server ended, or did not answer in `START_TIMEOUT_S`.
        """
        started = time.monotonic()
        while not await self.is_healthy():
            waited_s = time.monotonic() - started
            if self.has_ended or waited_s > START_TIMEOUT_S:
                found = "a server that ended" if self.has_ended else f"no answer in {waited_s:.0f} s"
                raise InvalidSettings(
                    f"{found}; the end of what it printed:\n{self.log_tail()}",
                    expected="a vllm serve that becomes healthy",
                    remedy="start it with the same arguments by itself, and correct them",
                )
            await asyncio.sleep(0.2)

    async def is_healthy(self) -> bool:
        try:
            return (await self.client.get("/health", timeout=10.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def report(self) -> Report:
        """Return the server's adapters and requests, from its metrics, which need no key.

        Raises:
            ReplicaLost: the server does not answer.
        """
        try:
            page = (await self.client.get("/metrics", timeout=10.0)).text
        except httpx.HTTPError as error:
            raise ReplicaLost(f"no answer to GET /metrics: {type(error).__name__}") from error
        # In a thread: parsing thousands of adapters takes longer than a token may wait.
        return await asyncio.to_thread(report_of, page)

    def end(self) -> None:
        """End the server and all its processes, and wait for the end."""
        # The keeper takes the closed pipe for the end of this process, and ends everything.
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("A replica's server has not ended in %s s.", END_TIMEOUT_S)
        self._held.close()

    def _pass_on(self) -> None:
        for line in self._process.stdout:  # type: ignore[union-attr]
            self._tail.append(line)
            # Here too, where Ray keeps the output with the replica's log.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(line.decode(errors="replace"))


def report_of(page: str) -> Report:
    """Return a report from a page of metrics; a page without our planner has no adapters."""
    adapters: dict[str, Tier] = {}
    capacities: list[int] = []
    requests = 0
    # Only the wanted lines are parsed: prometheus_client's parser is slow for a page of thousands of series.
    wanted = (line for line in page.splitlines() if line.startswith((_LOADED, _CAPACITY, *_IN_FLIGHT)))
    families = text_string_to_metric_families("\n".join(wanted) + "\n")
    for sample in (sample for family in families for sample in family.samples):
        if sample.name == _LOADED:
            name, tier = sample.labels["adapter_name"], _PLACES[sample.labels["level"]]
            # With data parallelism an adapter may be in a slot of one engine and in host memory of another.
            adapters[name] = min(tier, adapters.get(name, tier))
        elif sample.name == _CAPACITY:
            capacities.append(int(sample.value))
        elif sample.name in _IN_FLIGHT:
            requests += int(sample.value)
    return Report(adapters, min(capacities, default=None), requests)
