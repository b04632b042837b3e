"""The planner of an engine core, and its `AdapterSpec` for each `LoRARequest` of vLLM's.

Runs in an engine core, as vLLM makes the scheduler, and later for each request and call that names an adapter. A
`LoRARequest` has an engine id, a name and a path, which callers of vLLM's own API choose freely: an id may come again
with another name, path or bytes. `AdapterSpecs` decides whether a `LoRARequest` means the version that the planner
knows, or another.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from cachetools import LRUCache

from lora_plugins.errors import InvalidSettings
from lora_plugins.process import this_process
from lora_plugins.scheduler.eviction_policies import make_policy
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.scheduler.planner import Planner
from lora_plugins.scheduler.request_queue import QueueOrder
from lora_plugins.scheduler.state import PlannerState
from lora_plugins.vllm_patches.engine_args import MAX_BYTES
from lora_plugins.vllm_patches.engine_core.request import is_in_store
from lora_plugins.worker.request_types import is_inplace, is_vllms
from lora_plugins.worker.slot_counts import slots_of

_REMEMBERED = 10_000  # URIs


def make_planner(vllm_config: Any) -> Planner:
    """Return the planner for an engine with LoRA, of this `VllmConfig`.

    Raises:
        InvalidSettings: a setting cannot be right, or the executor's workers would miss commands.
    """
    _refuse_executor(vllm_config)
    lora, settings = vllm_config.lora_config, this_process().settings
    # Where the settings name no budget, `engine_args.py` has put this engine's share of memory on `lora`.
    max_bytes = getattr(lora, MAX_BYTES, settings.host_max_bytes)
    cache = HostCache(max_bytes, lora.max_cpu_loras, make_policy(settings.host_policy))
    order = QueueOrder(is_by_priority=vllm_config.scheduler_config.policy == "priority")
    return Planner(slots_of(lora, vllm_config.scheduler_config.max_num_seqs), cache, order=order)


def _refuse_executor(vllm_config: Any) -> None:
    """Refuse executors whose workers would miss commands.

    With an external launcher every rank has a scheduler of its own, and only one of them gets outputs.

    Touches: vllm.v1.executor.abstract: Executor.get_class(vllm_config)
    Why: Ray's first executor calls model runners past the worker, which reads commands; external launchers have
        several schedulers.
    """
    from vllm.v1.executor.abstract import Executor

    executor = Executor.get_class(vllm_config)
    if executor.__name__ == "ExecutorWithExternalLauncher" and vllm_config.parallel_config.world_size > 1:
        raise InvalidSettings(
            "lora_lru_manager with an external launcher of several workers",
            expected="one scheduler for all workers",
            remedy="leave --distributed-executor-backend external_launcher out, or lora_lru_manager",
        )
    if executor.__name__ == "RayDistributedExecutor":
        raise InvalidSettings(
            "lora_lru_manager with vLLM's first Ray executor",
            expected="multiprocessing, or Ray's second executor",
            remedy="set VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1, or leave --distributed-executor-backend ray out",
        )


class AdapterSpecs:
    """Makes the planner's `AdapterSpec` of a `LoRARequest`.

    Attributes:
        uris: where adapters were loaded from, by engine id; a worker without the files fetches them there.
    """

    def __init__(self, state: PlannerState) -> None:
        self._state = state
        self.uris: LRUCache[int, str] = LRUCache(_REMEMBERED)

    def of(self, lora_request: Any) -> AdapterSpec:
        """Return the spec that a `LoRARequest` describes: the planner's own, if it knows these weights."""
        spec = AdapterSpec(
            lora_request.lora_int_id,
            lora_request.lora_name,
            lora_request.lora_path,
            # An object of another class may hold weights itself, so the worker gets the object.
            lora_request=None if is_vllms(lora_request) else lora_request,
        )
        return self.complete(spec, is_inplace=is_inplace(lora_request))

    def complete(self, spec: AdapterSpec, *, is_inplace: bool = False) -> AdapterSpec:
        """Return a spec with size and URI, or the planner's own spec of the same weights.

        If the requests of the spec's id have moved to another adapter, the result is the spec of that adapter. Only the
        load of an adapter has a URI, so the URI is remembered for later specs of the id.
        """
        spec = self._state.generations.successor_of(spec.engine_id) or spec
        if spec.uri is not None:
            self.uris[spec.engine_id] = spec.uri
        known = self._state.current.get(spec.engine_id)
        is_same = known is not None and known.spec.path == spec.path and spec.lora_request is None
        # A caller's code may have given the worker other weights than the path's: a load in place reads the path.
        if known is not None and is_same and not (known.spec.given and is_inplace):
            return known.spec
        return replace(spec, uri=self.uris.get(spec.engine_id), size_bytes=spec.size_bytes or self._weights_bytes(spec))

    def adapter_for_request(self, lora_request: Any) -> tuple[AdapterSpec, bool]:
        """Return the spec that computes a request, and whether the request begins another generation of its id.

        As in vLLM, the id decides, whatever the path. With a known id and another name the request means another
        adapter, if its path holds files. An evicted adapter stays known, so its path may be gone.
        """
        if is_inplace(lora_request):
            return self.of(lora_request), self.is_other(lora_request)
        successor = self._state.generations.successor_of(lora_request.lora_int_id)
        known = self._state.known(lora_request.lora_int_id if successor is None else successor.engine_id)
        if known is not None and known.spec.name == lora_request.lora_name:
            return known.spec, False
        spec = self.of(lora_request)
        has_weights = spec.size_bytes or spec.lora_request is not None
        if not has_weights:  # the path is gone: the generation that was known last answers
            return self.known(spec.engine_id) or spec, False
        return spec, known is not None and known.spec.path != spec.path

    def is_other(self, lora_request: Any) -> bool:
        """Return whether a load in place names other bytes than its id has; a path of the store never changes bytes."""
        if not is_inplace(lora_request):
            return False
        known = self.known(lora_request.lora_int_id)
        is_same_path = known is not None and known.path == lora_request.lora_path
        return not (is_same_path and is_in_store(lora_request.lora_path))

    def known(self, engine_id: int) -> AdapterSpec | None:
        """Return the spec of the current generation, or of the last generation, loaded and evicted since."""
        adapter, evicted = self._state.known(engine_id), self._state.cache.known_bytes.get(engine_id)
        return adapter.spec if adapter is not None else evicted[0] if evicted is not None else None

    def _weights_bytes(self, spec: AdapterSpec) -> int:
        """Return the host memory that the weights will take, as their file says; workers report the exact size."""
        evicted = self._state.cache.known_bytes.get(spec.engine_id)
        if evicted is not None and evicted[0].path == spec.path and is_in_store(spec.path):
            return evicted[0].size_bytes  # without a look at a file system, which may hang
        try:
            files = os.scandir(spec.path)
            return sum(entry.stat().st_size for entry in files if entry.name.startswith("adapter_model."))
        except OSError:
            return 0  # on another node; the workers will report the adapter's faults
