"""The server of a soak: all plugins, 4 slots, room for about 20 adapters, and sources behind proxies that fail.

What its processes take is sampled: memory, threads and open files; and how fast memory grows.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults.injection import Interposer
from soak.bank import Bank
from soak.world import ABSENT_TTL_S, REVALIDATE_S
from testbed import v2_runner
from testbed.hub import Hub
from testbed.proxy import FaultProxy
from testbed.s3 import S3
from testbed.server import ONE_THREAD, Server, plugged, vllm_server

SLOTS, HOST_ADAPTERS = 4, 20
HOST_MAX_BYTES = 2_000_000
REFRESH_S = 20.0
STORE_PART = 0.75  # of all versions' bytes: so that those which nobody leases have to go
PLUGINS = ("filesystem_resolver", "s3_resolver", "hf_hub_resolver", "lru_manager", "kernels", "admin")


@dataclass(frozen=True)
class Surroundings:
    """What the server is started with, the first time and after it was killed."""

    bank: Bank
    home: Path
    s3: S3
    s3_proxy: FaultProxy
    hub: Hub
    hub_proxy: FaultProxy
    is_forking: bool = False
    disk: Interposer | None = None
    mutant: Path | None = None  # a folder with another lora_plugins, for controls
    runs_v2: bool = False  # Model Runner V2 with asynchronous scheduling, as on CUDA

    @property
    def store(self) -> Path:
        return self.home / "store"

    @property
    def store_max_bytes(self) -> int:
        return int(self.bank.size_bytes * STORE_PART)

    def env(self, *, is_direct: bool = False) -> Mapping[str, str]:
        """What every process on the store is started with; `is_direct` asks sources that never fail."""
        s3_url = self.s3.url if is_direct else self.s3_proxy.url
        hub_url = self.hub.url if is_direct else self.hub_proxy.url
        return {
            **plugged(",".join(f"lora_{plugin}" for plugin in PLUGINS), self.store, self.home / "adapters"),
            **ONE_THREAD,
            "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc
            "S3_PATH_TEMPLATE": "s3://adapters/loras/{lora_name}",
            "LOCAL_PATH_TEMPLATE": str(self.home / "links" / "{lora_name}"),
            "VLLM_LORA_RESOLVER_HF_REPO_LIST": "acme/*",
            "LORA_PLUGINS_ALLOWED_URIS": f"{(self.home / 'allowed').as_uri()},s3://adapters/uris,hf://other",
            "LORA_PLUGINS_STORE_MAX_BYTES": str(self.store_max_bytes),
            "LORA_PLUGINS_HOST_MAX_BYTES": str(HOST_MAX_BYTES),
            "LORA_PLUGINS_ABSENT_TTL_S": str(ABSENT_TTL_S),
            "LORA_PLUGINS_REVALIDATE_S": str(REVALIDATE_S),
            "LORA_PLUGINS_FETCH_TIMEOUT_S": "20",
            "LORA_PLUGINS_DRAIN_TIMEOUT_S": "20",
            "LORA_PLUGINS_REFRESH_S": str(REFRESH_S),
            "LORA_PLUGINS_RESTORE": "1",
            "LORA_PLUGINS_REPLICA": "soak",  # at each port: a replica with a new name begins with the names of all
            **self.s3.env(s3_url),
            **self.hub.env(self.home / ("hub-home-of-the-neighbour" if is_direct else "hub-home"), url=hub_url),
        }

    def start(self) -> AbstractContextManager[Server]:
        """Over the same store; each one logs into a file of its own."""
        if self.is_forking:
            # huggingface_hub reads these as it is imported, which happens in the process that servers are forked from.
            os.environ.update(self.hub.env(self.home / "hub-home", url=self.hub_proxy.url))
        more = {**({} if self.disk is None else self.disk.env), **(v2_runner.ENVIRONMENT if self.runs_v2 else {})}
        if self.mutant is not None:
            others = more.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
            more["PYTHONPATH"] = f"{self.mutant}:{others}"
        number = len(list(self.home.glob("server-*.log")))
        server = vllm_server(
            self.bank.base,
            self.home / f"server-{number}.log",
            arguments=(
                *("--enable-lora", "--max-lora-rank", "16", "--max-loras", str(SLOTS)),
                *("--max-cpu-loras", str(HOST_ADAPTERS), "--served-model-name", "base"),
                # Few enough that all are in use after a minute: memory grows with what was never used before.
                *("--block-size", "32", "--num-gpu-blocks-override", "200"),
                *(v2_runner.ARGUMENTS if self.runs_v2 else ()),
            ),
            env={**self.env(), **more},
            is_forking=self.is_forking,
        )
        return v2_runner.checked(server) if self.runs_v2 else server


def processes_of(server: Server) -> dict[str, psutil.Process]:
    """The API server, the engine and its worker, by what they are called."""
    # vLLM puts who says something before each line of its log; what is forked does not show it in its command line.
    said = re.findall(r"^\((EngineCore|Worker)\S* pid=(\d+)\)", server.log(), re.MULTILINE)
    found = {name: psutil.Process(int(pid)) for name, pid in dict(said).items()}
    return {"API server": psutil.Process(server.process.pid), **found}


def kill(server: Server, what: str) -> None:
    """End a process as the kernel does where memory is short."""
    os.kill(processes_of(server)[what].pid, signal.SIGKILL)


@dataclass(frozen=True)
class Sample:
    """One process at one time."""

    at_s: float
    resident_mb: float
    threads: int
    files: int


class Processes:
    """The API server, the engine and the worker of one server."""

    def __init__(self, server: Server) -> None:
        self._processes = processes_of(server)
        self.samples: dict[str, list[Sample]] = {name: [] for name in self._processes}

    def sample(self, at_s: float) -> None:
        """Look at each; one that has ended has no sample."""
        for name, process in self._processes.items():
            try:
                with process.oneshot():
                    resident_mb = process.memory_info().rss / 1e6
                    self.samples[name].append(Sample(at_s, resident_mb, process.num_threads(), process.num_fds()))
            except psutil.NoSuchProcess:
                continue

    def ended(self) -> list[str]:
        """Those that run no more."""
        return [name for name, process in self._processes.items() if not process.is_running()]


def growth_mb_per_min(samples: Sequence[Sample]) -> float:
    """Theil and Sen's slope: the median of the slopes between pairs, which a single large piece does not move."""
    few = samples[:: max(1, len(samples) // 200)]
    slopes = [
        (later.resident_mb - sooner.resident_mb) / (later.at_s - sooner.at_s) * 60
        for i, sooner in enumerate(few)
        for later in few[i + 1 :]
        if later.at_s - sooner.at_s > (few[-1].at_s - few[0].at_s) / 4
    ]
    return statistics.median(slopes) if slopes else 0.0
