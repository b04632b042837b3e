"""vLLM's worker LoRA manager, whose adapters come and go as the scheduler says.

Source: `LRUCacheWorkerLoRAManager` in vllm/lora/worker_manager.py, 0.30 to 0.33; what is not overridden stays vLLM's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.utils.gc_utils import freeze_gc_heap

from lora_plugins.adapter.landing import mismatch
from lora_plugins.adapter.model_modules import ModelModules
from lora_plugins.errors import describing
from lora_plugins.ledger import Patch
from lora_plugins.log import logger
from lora_plugins.scheduler.messages import AdapterSpec, Command, Report, Slots
from lora_plugins.settings import Settings
from lora_plugins.store.layout import is_digest
from lora_plugins.worker import loading
from lora_plugins.worker.agreement import agreement_of
from lora_plugins.worker.jobs import Jobs
from lora_plugins.worker.loaded_adapter import LoadedAdapter, build, rank_of, take_scalings
from lora_plugins.worker.materialise import Materialiser, Resolver
from lora_plugins.worker.metrics import WorkerMetrics, metrics_of
from lora_plugins.worker.model_manager import PlannedModelManager
from lora_plugins.worker.model_modules import describe
from lora_plugins.worker.slot_copy import forget
from lora_plugins.worker.slot_stream import SlotStream


class PlannedWorkerLoRAManager(LRUCacheWorkerLoRAManager):  # type: ignore[misc]
    """Holds what the scheduler had loaded, and computes with what it had put into slots.

    An adapter that was not planned (warm-up, dummy batches, `add_adapter` by others) is treated as in vLLM; once there
    is a plan, dummies are computed without an adapter.
    """

    _manager_cls = PlannedModelManager
    _adapter_manager: PlannedModelManager

    def __init__(
        self,
        vllm_config: Any,
        *args: Any,
        settings: Settings,
        make_resolver: Callable[[str, ModelModules | None], Resolver | None] = lambda *_: None,
        **kwargs: Any,
    ) -> None:
        """As vLLM's; `make_resolver` makes what finds adapters whose files are not on this machine.

        It is given the model's path, and its modules where they are known here, by which adapters are converted.
        """
        self._settings = settings
        self._make_resolver = make_resolver
        super().__init__(vllm_config, *args, **kwargs)
        self._is_planned = False
        self.has_told_slots = False
        self.whole_model: ModelModules | None = None
        self._dummies: set[LoRARequest] = set()

    def create_lora_manager(self, model: torch.nn.Module, vllm_config: Any) -> Any:
        """As vLLM's, with the threads that load beside it."""
        result = super().create_lora_manager(model, vllm_config)
        self._modules = describe(self._adapter_manager)
        # With pipeline parallelism a worker has only some of the model's modules.
        self._is_whole_model = vllm_config.parallel_config.pipeline_parallel_size == 1
        path = vllm_config.model_config.model
        self.jobs = Jobs(
            self._read,
            Materialiser(path, lambda: self._make_resolver(path, self._modules_of_model())),
            self._adapter_manager,
            SlotStream(torch.device(self.device)),
            agreement_of(vllm_config),
        )
        self._adapter_manager.empty()
        if torch.device(self.device).type == "cpu":
            _freeze_heap()
        return result

    def _modules_of_model(self) -> ModelModules | None:
        """The whole model's, which with pipeline parallelism only the API server knows: it says so (`whole_model`)."""
        return self._modules if self._is_whole_model else self.whole_model

    @property
    def slots(self) -> Slots:
        """What this worker has slots of; the same in every worker of an engine."""
        return self._adapter_manager.slots

    # --- the scheduler's commands, in the engine loop ---

    def begin_step(self, commands: Sequence[Command], *, has_batch: bool = False) -> None:
        """Carry out what comes before this step's batch, if it has one."""
        self._is_planned = self._is_planned or bool(commands)
        self.jobs.begin_step(commands, has_batch=has_batch)

    def reports(self, wait_s: float = 0.0) -> list[Report]:
        """What has been done since the last call; waits for something for so long, while a job runs."""
        return self.jobs.reports(wait_s)

    def rewrite_slots(self) -> None:
        """Write every slot again from host memory, after the device's may have been lost."""
        for module in self._adapter_manager.modules.values():
            forget(module)
        self._adapter_manager.empty()
        self.jobs.rewrite_slots()

    def lora_metrics(self) -> WorkerMetrics:
        """Adapters, memory and performance of this worker."""
        return metrics_of(self.jobs.entries, self._adapter_manager, self.device)

    # --- in the background ---

    def _read(self, spec: AdapterSpec, path: str) -> LoadedAdapter:
        """Parse, check against the model, pack, and copy off the file: nothing is left that would be read later.

        Raises:
            LoRAPluginsError, or whatever vLLM raises.
        """
        request = LoRARequest(lora_name=spec.name, lora_int_id=spec.engine_id, lora_path=path)
        if spec.is_3d:  # Unsloth's requests, which may stand in the place of vLLM's, have no such field
            request.is_3d_lora_weight = True
        manager = self._adapter_manager
        with describing(adapter=spec.name):
            model = self._load_adapter(request)
            if hasattr(manager, "_validate_moe_lora_format"):  # from 0.32
                manager._validate_moe_lora_format(model)  # noqa: SLF001 - as vLLM does when it registers an adapter
            loading.check_described(model, manager, self._modules)
            scalings, pairs, rank = take_scalings(model), len(model.loras), rank_of(model)
            manager._create_merged_loras_inplace(model)  # noqa: SLF001 - as vLLM does when it registers an adapter
            self._check_matched(model, pairs, spec.name)
            if self._settings.check_finite and not is_digest(Path(path).name):  # else the store has looked
                loading.check_finite(spec.name, model)
            is_pinned = torch.device(self.device).type == "cuda"
            return build(spec.name, path, manager, model, scalings, is_pinned=is_pinned, rank=rank)

    def _check_matched(self, model: Any, pairs: int, adapter: str) -> None:
        manager = self._adapter_manager
        matched = {
            name: weights
            for name in manager.modules
            if (weights := manager._get_lora_layer_weights(model, name)) is not None  # noqa: SLF001 - as vLLM looks up
        }
        for name, weights in matched.items():
            loading.check_fits(adapter, name, manager.modules[name], weights)
        unmatched = loading.unmatched_modules(model, matched)
        if not unmatched or (matched and not self._is_whole_model):
            return
        error = mismatch(unmatched, pairs, self._modules, adapter=adapter)
        if self._settings.refuse_unmatched or not matched:
            raise error
        logger.warning("Served without what does not match: %s", error)

    # --- vLLM's manager API, in the engine loop ---

    def set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:
        """As vLLM's; rows of dummies that are in no slot are computed without an adapter."""
        self._apply_adapters(requests)
        if mapping is None:
            return
        if self._dummies:
            mapping = _without(mapping, self._adapter_manager.lora_index_to_id)
        self._adapter_manager.set_adapter_mapping(mapping)

    def _apply_adapters(self, lora_requests: set[LoRARequest]) -> None:
        wanted = [request for request in lora_requests if request]
        for request in wanted:
            self._adapter_manager.touch(request.lora_int_id)  # those that are here stay when others are added
        for request in wanted:
            if request.lora_int_id in self._adapter_manager.lora_index_to_id:
                continue
            if request in self._dummies:
                continue
            if request.lora_int_id in self.jobs.entries:
                raise RuntimeError(f"a batch with adapter '{request.lora_name}', which is in no slot")
            self.add_adapter(request)

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:
        """As vLLM's before there is a plan; later, slots are not its to write."""
        if not self._is_planned:
            return bool(super().add_dummy_lora(lora_request, rank))
        self._dummies.add(lora_request)
        return True

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """As vLLM's: load and activate here and now what was not planned, in a slot that is free.

        Raises:
            LoRAPluginsError: it cannot be loaded. ValueError: no slot is left.
        """
        if self._is_planned_id(lora_request.lora_int_id):
            return True
        try:
            return bool(super().add_adapter(lora_request))
        except Exception as error:
            self._adapter_manager.remove_adapter(lora_request.lora_int_id)  # with what has been written of its slot
            raise loading.explained(error, lora_request.lora_name) from error

    def remove_adapter(self, adapter_id: int) -> bool:
        """Remove what was not planned; what is planned, the scheduler evicts."""
        return not self._is_planned_id(adapter_id) and bool(super().remove_adapter(adapter_id))

    def _is_planned_id(self, engine_id: int) -> bool:
        return any(engine_id in (entry.key, entry.spec.engine_id) for entry in self.jobs.entries.values())

    def remove_all_adapters(self) -> None:
        """Remove what was not planned, such as vLLM's dummies."""
        self._dummies.clear()
        super().remove_all_adapters()

    def list_adapters(self) -> set[int]:
        """VLLM's ids of the adapters that are in host memory."""
        loaded = {entry.spec.engine_id for entry in self.jobs.entries.values() if entry.adapter is not None}
        return loaded | set(super().list_adapters())


def _without(mapping: LoRAMapping, owners: Sequence[int | None]) -> LoRAMapping:
    """The mapping with 0, for no adapter, in the place of ids that are in no slot."""
    known = {owner for owner in owners if owner is not None}
    changed = copy.copy(mapping)
    changed.index_mapping = tuple(owner if owner in known else 0 for owner in mapping.index_mapping)
    changed.prompt_mapping = tuple(owner if owner in known else 0 for owner in mapping.prompt_mapping)
    return changed


@functools.cache  # once in a process
def _freeze_heap() -> None:
    """Keep the garbage collector from what is there by now: model, vLLM, torch.

    Its first full pass over them stops every thread, and so the engine, for most of a second, sometime after the start.
    vLLM's GPU worker does the same once it is warm (vllm/v1/worker/gpu_worker.py, 0.32); its CPU worker does not.
    """
    freeze_gc_heap()


LEDGER = (
    Patch(
        """
        vllm.lora.worker_manager:
            LRUCacheWorkerLoRAManager{_manager_cls}
            LRUCacheWorkerLoRAManager.create_lora_manager(self, model, vllm_config)
            LRUCacheWorkerLoRAManager.add_adapter(self, lora_request)
            LRUCacheWorkerLoRAManager._apply_adapters(self, lora_requests)
            WorkerLoRAManager.set_active_adapters(self, requests, mapping)
            WorkerLoRAManager.add_dummy_lora(self, lora_request, rank)
            WorkerLoRAManager.remove_adapter(self, adapter_id)
            WorkerLoRAManager.remove_all_adapters(self)
            WorkerLoRAManager.list_adapters(self)
        vllm.lora.layers.utils:
            LoRAMapping{index_mapping, prompt_mapping}
        vllm.lora.request:
            LoRARequest{lora_name, lora_int_id, lora_path, is_3d_lora_weight}
        """,
        what="subclassed: what is planned is not read again, no step reads a disk, and once there is a plan a dummy "
        "takes no slot",
        why="adapters come and go as the scheduler says",
    ),
    Patch(
        """
        vllm.lora.worker_manager:
            WorkerLoRAManager._load_adapter(self, lora_request)
        vllm.lora.model_manager:
            LoRAModelManager._validate_moe_lora_format(self, lora_model)  # since 0.32
            LoRAModelManager._create_merged_loras_inplace(self, lora_model)
            LoRAModelManager._restrict_to_local_experts(self, module_name, new_module_names)
            LoRAModelManager._get_lora_layer_weights(self, lora_model, module_name)
            LoRAModelManager._get_module_to_save_weights(self, lora_model, module_name)  # since 0.31
        vllm.lora.lora_model:
            LoRAModel{loras}
        vllm.lora.lora_weights:
            LoRALayerWeights{lora_a, lora_b, scaling, rank}
        vllm.lora.layers.fused_moe:
            FusedMoEWithLoRA{fully_sharded, tp_size, moe_config}
            FusedMoEWithLoRA{_tp_shard_size}  # since 0.33
        vllm.lora.layers.base_linear:
            BaseLinearLayerWithLoRA{lora_a_stacked, lora_b_stacked, output_slices, tp_size}
        vllm.lora.layers.classifier:
            ClassificationHeadWithLoRA  # since 0.31
        """,
        what="called and read in the loading thread, as vLLM does to register and activate an adapter; a scaling that "
        "is multiplied in with the copy is set to 1 (worker/loading.py, worker/loaded_adapter.py)",
        why="weights are matched, checked and packed in a background thread, while the engine goes on",
    ),
    Patch(
        "vllm.utils.gc_utils: freeze_gc_heap()",
        what="called once, on the CPU, after the LoRA manager was made",
        why="a full garbage collection in the worker stops the engine for most of a second",
        remove="vLLM's CPU worker freezes its heap, as its GPU worker does",
    ),
)
