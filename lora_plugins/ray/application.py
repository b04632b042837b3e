"""The Serve application: an ingress, and replicas of `vllm serve`.

Runs where the application is deployed: in `python -m lora_plugins.ray`, or in `serve deploy` by the path
`lora_plugins.ray.application:build` of a configuration file. In go the `Options`; out comes what Ray deploys.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from lora_plugins.ray.ingress import Ingress
from lora_plugins.ray.replica import VllmReplica
from lora_plugins.ray.router import BUSY_REQUESTS

# Seconds: a replica or an ingress that is to go has so long for the requests that have begun.
DRAIN_S = 300.0


class Options(BaseModel):
    """The `args:` of a Serve configuration file; Ray's own options stand below the file's `deployments:`.

    Attributes:
        arguments: of `vllm serve`, the model first.
        env: environment variables of the servers, beside the variables of Ray's workers; Ray shows `env`.
        secrets: names of variables that Ray's workers must have by themselves, or the servers do not start.
        replicas: how many, or the lowest and the highest number for Ray's autoscaling.
        busy_requests: a replica is busy with more requests in flight than these, and than 1.25 times the mean of all.
        resources: Ray's options for each replica: num_cpus, num_gpus, resources.
        stats_period_s: how often replicas report their adapters and requests.
    """

    model_config = ConfigDict(extra="forbid")

    arguments: Annotated[list[str], Field(min_length=1)]
    env: dict[str, str] = {}
    secrets: list[str] = []
    replicas: int | tuple[int, int] = 1
    busy_requests: Annotated[int, Field(ge=1)] = BUSY_REQUESTS
    resources: dict[str, Any] = {"num_cpus": 1}
    stats_period_s: Annotated[float, Field(gt=0)] = 1.0


def build(options: Options) -> Application:
    """Return the application; a Serve configuration file has `import_path: lora_plugins.ray.application:build`."""
    replicas, ingress = deployments(options)
    bound = replicas.bind(options.arguments, options.env, secrets=options.secrets)
    return ingress.bind(bound, base_names(options.arguments))


def deployments(options: Options) -> tuple[Deployment, Deployment]:
    """Return the deployments of the replicas and of the ingress."""
    replicas = serve.deployment(
        name="vllm",
        max_ongoing_requests=256,  # further requests wait in the ingress
        request_router_config=RequestRouterConfig(
            request_router_class="lora_plugins.ray.router:AdapterAffinityRouter",
            request_router_kwargs={"busy_requests": options.busy_requests},
            request_routing_stats_period_s=options.stats_period_s,
        ),
        ray_actor_options=options.resources,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=DRAIN_S,
        **_scale(options.replicas),
    )(VllmReplica)
    ingress = serve.deployment(
        name="ingress",
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=DRAIN_S,
        ray_actor_options={"num_cpus": 0},
    )(Ingress)
    return replicas, ingress


def _scale(replicas: int | tuple[int, int]) -> dict[str, Any]:
    if isinstance(replicas, int):
        return {"num_replicas": replicas}
    low, high = replicas
    return {"autoscaling_config": {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": 8.0}}


def base_names(arguments: Sequence[str]) -> list[str]:
    """Return the base model's names of a server with these arguments."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--served-model-name", "--served_model_name", nargs="+")
    parser.add_argument("--model")
    known, others = parser.parse_known_args(arguments)
    return known.served_model_name or [known.model or others[0]]
