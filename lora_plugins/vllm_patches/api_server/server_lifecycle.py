"""The lifecycle of the adapters of one of vLLM's API servers, made at its first use.

Names go into `lora_requests`, each version with an id of its own; `abort` ends requests that an unload has waited for
long enough.

Touches:
    vllm.entrypoints.openai.models.serving:
        OpenAIServingModels{lora_requests, lora_id_counter, lora_resolver_lock, base_model_paths, model_config,
            is_base_model(self, model_name)}
    vllm.lora.request: LoRARequest{lora_name, lora_int_id, lora_path, base_model_name}
    vllm.config.lora: LoRAConfig{max_cpu_loras}
    vllm.v1.engine.async_llm: AsyncLLM.abort(self, request_id, internal)
Why: `lora_requests` is the table of the adapters that vLLM serves, and that lora_admin changes.
Until: vLLM has an admin API of its own.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from lora_plugins.lifecycle.api_server import ApiServer
from lora_plugins.lifecycle.background_tasks import background
from lora_plugins.lifecycle.followed_copies import FollowedCopies
from lora_plugins.lifecycle.follower import Follower, not_here
from lora_plugins.lifecycle.leader import Leader
from lora_plugins.lifecycle.lifecycle import Lifecycle
from lora_plugins.lifecycle.registry import Registry
from lora_plugins.lifecycle.stored_copies import Copies, watch
from lora_plugins.process import this_process
from lora_plugins.vllm_patches.api_server.async_llm import COPIES, is_planned, planner_of
from lora_plugins.vllm_patches.api_server.base_serving import near_names
from lora_plugins.vllm_patches.wrapping import ours


def planned_lifecycle(models: Any) -> Lifecycle | None:
    """Return `lifecycle_of`; None where vLLM itself loads the engine's adapters."""
    return lifecycle_of(models) if is_planned(models.engine_client) else None


def lifecycle_of(models: Any) -> Lifecycle:
    """Return the lifecycle of the adapters of `models`, vLLM's `OpenAIServingModels`; the same object every time.

    Raises:
        InvalidSettings: the store cannot be made.
    """

    def made() -> Lifecycle:
        process = this_process()
        table = weakref.proxy(models)  # the store, which outlives the server, has the lifecycle make room
        server = ApiServer(
            Registry(table, process.resolver.known.last, process.resolver.store.blocks, partial(near_names, table)),
            planner_of(models.engine_client),
            _Server(table, process.role),
            process.resolver,
            process.events,
            process.settings.drain_timeout_s,
        )
        role = process.role
        lifecycle = Lifecycle(
            server, FollowedCopies(server, role) if isinstance(role, Follower) else Copies(server, role)
        )
        setattr(models.engine_client, COPIES, lifecycle.copies)
        # A weak reference: the watch ends with the copies.
        background(watch(weakref.ref(lifecycle.copies)))
        return lifecycle

    return ours(models, "lora_plugins_lifecycle", made)


class _Server:
    """Our calls of vLLM (`lifecycle.api_server.VllmServer`)."""

    def __init__(self, models: Any, role: Leader | Follower) -> None:
        self._models, self._role = models, role

    @property
    def base_path(self) -> str:
        return str(self._models.model_config.model)

    @property
    def host_places(self) -> int:
        lora_config = self._models.engine_client.vllm_config.lora_config
        return 0 if lora_config is None else int(lora_config.max_cpu_loras)

    def is_base_model(self, name: str) -> bool:
        return bool(self._models.is_base_model(name))

    def lock(self, name: str) -> Any:
        return self._models.lora_resolver_lock[name]

    def new_request(self, name: str, path: str, base_name: str | None = None) -> Any:
        from vllm.lora.request import LoRARequest

        if isinstance(self._role, Follower):
            raise not_here(name)  # the leader gives engine ids
        return LoRARequest(
            lora_name=name,
            lora_int_id=self._models.lora_id_counter.inc(1),
            lora_path=path,
            base_model_name=base_name or self._models.base_model_paths[0].name,
        )

    async def abort(self, request_ids: list[str]) -> None:
        await self._models.engine_client.abort(request_ids, internal=True)  # ids of the engine core
        self._role.abort(request_ids)
