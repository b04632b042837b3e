"""verl's trainer, unmodified, with rollouts from `vllm serve`: a module that verl imports in each of its processes.

    PYTHONPATH=examples/rl VERL_USE_EXTERNAL_MODULES=verl_rollout LORA_PLUGINS_URL=http://gpu-7:8000 \\
      python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=lora_plugins \\
        actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.model.lora_rank=8 …

Each weight sync is a push; server and trainer share neither GPUs nor a directory, and vLLM has no patch of verl's.

Run by hand, with verl 0.9.1 on the CPU beside vLLM 0.32: both classes as verl's registries return them, a push of an
adapter as PEFT gives it, and the actor on Ray; the answers were PEFT's. Not run: verl's trainer, which needs GPUs,
several processes, partial rollouts (`abort_all_requests` does nothing here), images and tools. No test runs this file:
verl is no dependency of this project.
"""

import os
from collections.abc import Iterable
from typing import Any

import httpx
import ray
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from lora_plugins.client import push_async

NAME, ROLLOUT = "policy", "lora_plugins"
URL, KEY = os.environ.get("LORA_PLUGINS_URL", "http://localhost:8000"), os.environ.get("LORA_PLUGINS_ADMIN_KEY", "none")


class PushingRollout(BaseRollout):  # type: ignore[misc]  # verl's classes are Any here
    """The trainer's side: a weight sync is a push."""

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, peft_config: Any = None, **more: Any
    ) -> None:
        """Push the adapter from the first process; all processes take part in collecting it."""
        assert peft_config is not None, "LoRA, and model.lora.merge=False"
        assert more.get("base_sync_done", True), "the server has the base model already"
        tensors = dict(weights)
        if torch.distributed.get_rank() == 0:
            pushed = await push_async(NAME, tensors, peft_config, servers=[URL], key=KEY)
            print(f"step {more.get('global_steps')}: rollouts come from {NAME}@{pushed.digest[:12]}", flush=True)

    async def resume(self, tags: list[str]) -> None:
        """Nothing to do: the server has memory of its own."""

    async def release(self) -> None:
        """Nothing to do."""


class Server:
    """The rollouts' side: an actor that verl's clients ask, and that asks the server."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._client = httpx.AsyncClient(base_url=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=None)

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any) -> TokenOutput:
        """Complete one prompt by the newest version."""
        assert not any(more.get(f"{kind}_data") for kind in ("image", "video", "audio")), "text only"
        body = {"model": NAME, "prompt": list(prompt_ids), "max_tokens": self._max_tokens, **sampling_params}
        body |= {"return_token_ids": True, "logprobs": 0 if sampling_params.get("logprobs") else None}
        choice = (await self._client.post("/v1/completions", json=body)).raise_for_status().json()["choices"][0]
        log_probs = choice["logprobs"]["token_logprobs"] if body["logprobs"] is not None else None
        reason = "aborted" if choice["finish_reason"] == "abort" else "completed"
        return TokenOutput(token_ids=choice["token_ids"], log_probs=log_probs, stop_reason=reason)

    async def wake_up(self, **_: Any) -> None:
        """Nothing to do, as in all that follow."""

    sleep = abort_all_requests = resume_generation = clear_kv_cache = release_kv_cache = resume_kv_cache = wake_up


class PushedReplica(RolloutReplica):  # type: ignore[misc]
    """A replica of verl's that starts no engine."""

    async def launch_servers(self) -> None:
        """Start the actor."""
        actor = ray.remote(Server).options(max_concurrency=self.max_concurrency)
        self._server_handle = actor.remote(self.config.response_length)
        self.servers, self._server_address = [self._server_handle], f"{URL}#{self.replica_rank}"


_ROLLOUT_REGISTRY[ROLLOUT, "async"] = f"{__name__}.{PushingRollout.__name__}"
RolloutReplicaRegistry.register(ROLLOUT, lambda: PushedReplica)
