"""Figures of docs/benchmarks/routing.md#two-real-replicas, for R39: `make demo-ray`.

Two real replicas on Ray Serve: cold starts with our router, with Ray's default one and with its multiplexing.

24 adapters, and room for 12 in each replica's host cache. The same two `vllm serve` answer all requests; for each arm
Ray gets another router, and all adapters are unloaded. The first request for each adapter is left out: what counts is
whether later ones find it loaded, as the engines' planners count it. Every answer is compared with PEFT's.
Prints a Markdown table; `--keep` writes the raw figures to benchmarks/results/ray_serve.json. `make demo-ray` runs it
without, so that a demo changes no tracked file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import openai

from benchmarks.record import ROOT, keep
from lora_plugins.plugin_names import how_to_install
from testbed.bed import CACHE, MAX_TOKENS, Bed, prepare
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.server import SMALL_ENGINE, outer_environment, plugged, reserved_port

ADAPTERS, PLACES, SLOTS, REPLICAS = 24, 12, 4, 2
HOME = CACHE.parent / "demo-ray"
KEY = "demo"
APP = "lora-plugins"
PLUGINS = "lora_filesystem_resolver,lora_lru_manager,lora_kernels,lora_admin"
PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
COLD = re.compile(r'^lora_plugins_admission_wait_seconds_count\{[^}]*found="(\w+)"[^}]*\} (\S+)', re.MULTILINE)
HEADINGS = "| router | cold starts | first token p50 · p99, s | requests/s | wrong |\n|---|---|---|---|---|"
ARMS = ("default", "multiplexing", "affinity")
TITLES = {
    "affinity": "AdapterAffinityRouter",
    "multiplexing": "Ray's multiplexing",
    "default": "Ray's default (power of two)",
}


@dataclass(frozen=True)
class Outcome:
    """Of one arm, after each adapter's first request; seconds to the first token."""

    arm: str
    requests: int
    cold: int
    wrong: int
    first_token_p50_s: float
    first_token_p99_s: float
    seconds: float
    by_replica: dict[str, int]

    @property
    def cold_rate(self) -> float:
        return self.cold / self.requests


class Cluster:
    """The application on this machine's Ray, and its clients."""

    def __init__(self, bed: Bed, url: str) -> None:
        self.bed, self.url = bed, url
        self.handle: Any = None
        names = [spec.name for spec in DEMO_ADAPTERS]
        self.like = {f"adapter-{number:02}": names[number % len(names)] for number in range(ADAPTERS)}
        self.arguments = [
            *(str(bed.base), *SMALL_ENGINE, "--served-model-name", "base"),
            *("--enable-lora", "--max-lora-rank", "64", "--max-loras", str(SLOTS), "--max-cpu-loras", str(PLACES)),
        ]

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def publish(self) -> dict[str, str]:
        """The adapters in one directory, and the environment of servers that look there."""
        shutil.rmtree(HOME, ignore_errors=True)
        for name, like in self.like.items():
            shutil.copytree(self.bed.adapters / like, HOME / "adapters" / name)
        return {
            "PYTHONPATH": PATH,
            **plugged(PLUGINS, HOME / "store", HOME / "adapters"),
            "LORA_PLUGINS_BASE_MATCH": "off",
            "LORA_PLUGINS_ADMIN_KEY": KEY,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }

    def deploy(self, arm: str, env: dict[str, str]) -> None:
        """Give the running replicas another router; the first time, start them."""
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        from benchmarks.routing.ray_replica import IngressWithoutNames, MultiplexedReplica
        from lora_plugins.ray.application import Options, base_names, deployments

        options = Options(arguments=self.arguments, env=env, replicas=REPLICAS, resources={"num_cpus": 1})
        replicas, ingress = deployments(options)
        changes: dict[str, Any] = {}
        if arm != "affinity":
            changes["request_router_config"] = RequestRouterConfig(
                request_router_class="ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
                request_routing_stats_period_s=options.stats_period_s,
            )
        # Of one version: running replicas are kept. A process of Ray keeps its router, whatever the configuration says
        # later: another router needs another version of the ingress.
        replicas = replicas.options(func_or_class=MultiplexedReplica, version="1", _internal=True, **changes)
        ingress = ingress.options(
            func_or_class=IngressWithoutNames if arm == "default" else None, version=arm, _internal=True
        )
        built = ingress.bind(replicas.bind(options.arguments, env), base_names(options.arguments))
        serve.run(built, name=APP, route_prefix="/")

    def cold_starts(self) -> int:
        """Requests whose adapter was in no memory, of all replicas since they started."""
        from ray import serve

        from lora_plugins.ray.replica import Call

        # One handle for all questions: Ray ended this process when the answer to one that was gone came late.
        if self.handle is None:
            self.handle = serve.get_deployment_handle("vllm", APP)
        pages = self.handle.broadcast("admin", Call("GET", "/metrics", (), b"")).results(timeout_s=60)
        found: Counter[str] = Counter()
        for page in pages:
            for where, count in COLD.findall(page.body.decode()):
                found[where] += int(float(count))
        return found["store"]

    def unload_all(self) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=120) as client:
            for name in self.like:
                client.delete(f"/v1/loras/{name}")

    async def ask(self, client: openai.AsyncOpenAI, name: str) -> tuple[str, float, str]:
        """How one streamed request ends, the seconds to its first token, and the replica."""
        started, first = time.perf_counter(), 0.0
        ids: list[int] = []
        try:
            raw = await client.completions.with_raw_response.create(
                model=name,
                prompt=PROMPT,
                max_tokens=MAX_TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            async for chunk in raw.parse():
                first = first or time.perf_counter() - started
                for choice in chunk.choices:
                    ids.extend(getattr(choice, "token_ids", None) or [])
        except openai.APIError as error:
            return ("broken" if "L009" in str(error) and ids else f"failed: {error}"), first, ""
        is_right = ids == self.bed.answers[self.like[name]]
        return ("right" if is_right else "wrong"), first, raw.headers["x-lora-plugins-replica"]

    async def ask_all(self, names: Sequence[str], clients: int) -> list[tuple[str, float, str]]:
        waiting = iter(names)
        done: list[tuple[str, float, str]] = []
        async with self.client() as client:

            async def one() -> None:
                for name in waiting:
                    done.append(await self.ask(client, name))

            await asyncio.gather(*(one() for _ in range(clients)))
        return done


def measure(cluster: Cluster, arm: str, requests: int, clients: int) -> Outcome:
    names = list(cluster.like)
    asyncio.run(cluster.ask_all(names, clients))
    time.sleep(2.5)  # what is loaded is reported once a second
    before = cluster.cold_starts()
    started = time.perf_counter()
    wanted = random.Random(20261122).choices(names, k=requests)
    done = asyncio.run(cluster.ask_all(wanted, clients))
    seconds = time.perf_counter() - started
    firsts = sorted(first for how, first, _ in done if how == "right")
    return Outcome(
        arm,
        requests,
        cluster.cold_starts() - before,
        sum(how != "right" for how, _, _ in done),
        firsts[len(firsts) // 2],
        firsts[int(len(firsts) * 0.99)],
        seconds,
        dict(Counter(replica for _, _, replica in done)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/ray_serve.json")
    options = parser.parse_args()
    try:
        import ray
        from ray import serve
    except ImportError:
        print(f"Ray is not installed: make set-up installs it, or {how_to_install('ray')}", file=sys.stderr)
        return 1
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"})
    for name in os.environ.keys() - outer_environment().keys():
        del os.environ[name]
    bed = prepare(lambda text: print(f"demo-ray: {text}", flush=True))
    print("demo-ray: starting Ray", flush=True)
    for attempt in range(5):
        try:
            ray.init(
                address="local",
                num_cpus=REPLICAS + 1,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                log_to_driver=False,
                runtime_env={"env_vars": {"PYTHONPATH": PATH, "RAY_SERVE_LOG_TO_STDERR": "0"}},
            )
            break
        except Exception as error:  # Ray waits 30 s for itself, which on a busy machine may be too short
            print(f"demo-ray: {error}", flush=True)
            if attempt == 4:
                raise
    outcomes: list[Outcome] = []
    with reserved_port() as port:
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            cluster = Cluster(bed, f"http://127.0.0.1:{port}")
            env = cluster.publish()
            print(f"demo-ray: starting {REPLICAS} replicas of vllm serve (a minute)", flush=True)
            print(HEADINGS, flush=True)
            for arm in ARMS:
                cluster.deploy(arm, env)
                cluster.unload_all()
                outcomes.append(it := measure(cluster, arm, options.requests, options.clients))
                print(
                    f"| {TITLES[arm]} | {it.cold} of {it.requests} ({it.cold_rate:.1%}) | {it.first_token_p50_s:.2f} · "
                    f"{it.first_token_p99_s:.2f} | {it.requests / it.seconds:.1f} | {it.wrong} |",
                    flush=True,
                )
        finally:
            serve.shutdown()
            ray.shutdown()
    if options.keep:
        rows = {"arms": [asdict(it) for it in outcomes], "load": os.getloadavg()}
        print(f"Raw: {keep('ray_serve', rows).name}")
    ours, default = (next(it for it in outcomes if it.arm == arm) for arm in ("affinity", "default"))
    is_good = ours.cold * 2 <= default.cold and not any(it.wrong for it in outcomes)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
