"""SkyRL's trainer, unmodified, with rollouts from `vllm serve`: an entry point that SkyRL imports by its name.

    PYTHONPATH=examples/rl python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=skyrl_push \\
      trainer.placement.colocate_all=false trainer.policy.model.lora.rank=8 \\
      generator.inference_engine.run_engines_locally=false \\
      generator.inference_engine.external_proxy_url=http://gpu-7:8000 \\
      generator.inference_engine.external_server_urls='["http://gpu-7:8000"]' …

SkyRL's own way is a directory that trainer and servers share, and a route `/skyrl/v1/load_lora_adapter` that SkyRL adds
to vLLM. Here each weight sync is a push: `lora_sync_path` is a disk of the trainer's alone, and the server is plain
`vllm serve`, with `--enable-scale-out` for the route of SkyRL's rollouts.

Run by hand, with SkyRL 0.3.0 on the CPU beside vLLM 0.32: this module, SkyRL's check of the settings above, the
client as SkyRL makes and pickles it, and three weight syncs by the method of SkyRL's FSDP worker; the client's
completions were PEFT's. Modules stood in for flash_attn and vllm_router, which these calls do not reach. On Python
3.11, SkyRL was imported with the TypedDict of typing_extensions in the place of Python's. Not run: SkyRL's trainer,
which needs GPUs, its processes on Ray, its route for rollouts, and Megatron. No test runs this file: SkyRL is no
dependency of this project.
"""

import os
import sys
from typing import Any

import ray
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from lora_plugins.client import push_async

KEY, HOOK = os.environ.get("LORA_PLUGINS_ADMIN_KEY", "none"), "trainer.override_entrypoint="


class PushingClient(RemoteInferenceClient):  # type: ignore[misc]  # SkyRL's classes are Any here
    """SkyRL's client of the servers, which the trainer's first worker calls with the adapter that it has saved."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, Any]:
        """Push the directory to all servers; none has the version unless all have."""
        pushed = await push_async(lora_name, lora_path, servers=self.server_urls, key=KEY)
        print(f"rollouts come from {lora_name}@{pushed.digest[:12]}", flush=True)
        return {server: {"status": 200, "body": pushed.digest} for server in self.server_urls}

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Any]:
        """Nothing to do: each version has a prefix cache of its own."""
        return {}


class PushingTrainer(RayPPOTrainer):  # type: ignore[misc]
    """SkyRL's trainer, without the group of NCCL that only full weights need."""

    def init_weight_sync_state(self) -> None:
        """Nothing to do."""


class Experiment(BasePPOExp):  # type: ignore[misc]
    """SkyRL's experiment, with both."""

    def get_inference_client(self) -> Any:
        """Have SkyRL make its client, and change the class."""
        client = super().get_inference_client()
        client.__class__ = PushingClient
        return client

    def get_trainer(self, **parts: Any) -> Any:
        """Make the trainer of the same parts."""
        return PushingTrainer(**parts)


@ray.remote(num_cpus=1)
def run(config: Any) -> None:
    """Train, in a process of Ray's as SkyRL does."""
    Experiment(config).run()


def main() -> None:
    """Do as SkyRL's own entry point."""
    config = SkyRLTrainConfig.from_cli_overrides([it for it in sys.argv[1:] if not it.startswith(HOOK)])
    validate_cfg(config)
    initialize_ray(config)
    ray.get(run.remote(config))
