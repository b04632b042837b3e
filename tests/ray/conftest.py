"""Ray Serve on this machine, started once, with replicas of a stand-in for `vllm serve`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from testbed.server import reserved_port

STAND_IN = (sys.executable, "-P", "-m", "testbed.stand_in")


@dataclass(frozen=True)
class Cluster:
    """Where Serve's proxy listens."""

    url: str


@dataclass(frozen=True)
class App:
    """A running application, and what its servers noted."""

    url: str
    journal: Path
    options: Any

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def noted(self, what: str, name: str | None = None) -> list[Mapping[str, Any]]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if row["what"] == what and name in (None, row["name"])]

    def replicas(self) -> dict[str, int]:
        """The replicas that are there now, by name, with the process of each."""
        from ray._private.state import actors  # the public interface needs Ray's dashboard

        alive = [it for it in actors().values() if it["State"] == "ALIVE"]
        ours = [it for it in alive if it["Name"].startswith("SERVE_REPLICA::lora-plugins#vllm#")]
        return {it["Name"].rpartition("#")[2]: it["Pid"] for it in ours}


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Ray, until the last test here: while it is idle, its processes poll beside whatever tests follow."""
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    from ray import serve

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"
    root = str(Path(__file__).resolve().parents[2])
    env = {
        "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))),
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Ray ends a proxy that is not ready after 5 s; on a busy machine no process of Ray's is.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    for attempt in range(3):
        try:
            ray.init(
                address="local",
                num_cpus=8,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                log_to_driver=False,
                runtime_env={"env_vars": env},
            )
            break
        except Exception:  # Ray waits 30 s for itself, which on a busy machine may be too short
            if attempt == 2:
                raise
    with reserved_port() as port:
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield Cluster(f"http://127.0.0.1:{port}")
        finally:
            serve.shutdown()
            ray.shutdown()


Start = Callable[..., App]


@pytest.fixture(scope="package")
def start(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Run the application with these options of the stand-in, in the place of the one before."""

    def run(replicas: int = 2, *, journal: Path | None = None, **stand_in: object) -> App:
        from ray import serve

        from lora_plugins.ray.application import Options, base_names, deployments

        journal = journal or tmp_path_factory.mktemp("app") / "journal.jsonl"
        arguments = ["base", "--journal", str(journal)]
        for name, value in stand_in.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        options = Options(
            arguments=arguments, replicas=replicas, resources={"num_cpus": 0.1}, stats_period_s=0.5, busy_requests=4
        )
        # Of one version are those of one test: scaling keeps them.
        of_one_test = {"version": " ".join(arguments), "_internal": True}
        replicas_of_test, ingress = (one.options(**of_one_test) for one in deployments(options))
        built = ingress.bind(replicas_of_test.bind(arguments, {}, STAND_IN), base_names(arguments))
        serve.run(built, name="lora-plugins", route_prefix="/")
        return App(cluster.url, journal, options)

    return run


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "it did not come true in time"
        time.sleep(0.1)


def counted(rows: list[Mapping[str, Any]]) -> Counter[str]:
    return Counter(row["name"] for row in rows)
