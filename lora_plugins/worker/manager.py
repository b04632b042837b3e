"""vLLM's LoRA manager of a worker, with adapters that come and go by the scheduler's commands.

vLLM's model runner makes one `PlannedWorkerLoRAManager` in each worker. In each step
`vllm_patches/worker/worker_base.py` hands over the scheduler's commands (`begin_step`), the runner names the batch's
adapters (`set_active_adapters`), and the reports go back (`reports`). Loading threads call `_read`, which makes a
`LoadedAdapter` of an adapter's directory.

Source: `LRUCacheWorkerLoRAManager` in vllm/lora/worker_manager.py, 0.30 to 0.33; methods not overridden stay vLLM's.

As vLLM does to register and activate an adapter, the loading thread calls and reads what follows; a scaling that is
multiplied in with the copy is set to 1 (`worker/adapter_checks.py`, `worker/loaded_adapter.py`).

Touches:
    vllm.lora.worker_manager: WorkerLoRAManager._load_adapter(self, lora_request)
    vllm.lora.model_manager:
        LoRAModelManager{_create_merged_loras_inplace(self, lora_model),
            _restrict_to_local_experts(self, module_name, new_module_names),
            _get_lora_layer_weights(self, lora_model, module_name)}
        LoRAModelManager._get_module_to_save_weights(self, lora_model, module_name) # since 0.31
    vllm.lora.lora_model: LoRAModel{loras}
    vllm.lora.lora_weights: LoRALayerWeights{lora_a, lora_b, scaling, rank}
    vllm.lora.layers.fused_moe: FusedMoEWithLoRA{fully_sharded, tp_size, moe_config}
        FusedMoEWithLoRA{_tp_shard_size} # since 0.33
    vllm.lora.layers.base_linear: BaseLinearLayerWithLoRA{lora_a_stacked, lora_b_stacked, output_slices, tp_size}
    vllm.lora.layers.classifier: ClassificationHeadWithLoRA # since 0.31
Why: weights are matched, checked and packed in a background thread, while the engine goes on.
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

from lora_plugins.adapter.config import IA3
from lora_plugins.adapter.model_modules import ModelModules
from lora_plugins.errors import describing
from lora_plugins.log import logger
from lora_plugins.scheduler.messages import AdapterSpec, Command, Report
from lora_plugins.settings import Settings
from lora_plugins.store.layout import is_digest
from lora_plugins.worker import adapter_checks
from lora_plugins.worker.agreement import agreement_of
from lora_plugins.worker.beside import read_beside
from lora_plugins.worker.jobs import Jobs
from lora_plugins.worker.loaded_adapter import LoadedAdapter, build, take_scalings
from lora_plugins.worker.lora_metrics import metrics_of
from lora_plugins.worker.missing_files import MissingFilesFetcher, Resolver
from lora_plugins.worker.model_description import describe
from lora_plugins.worker.model_manager import PlannedModelManager
from lora_plugins.worker.request_types import is_inplace
from lora_plugins.worker.request_types import lora_request as request_of
from lora_plugins.worker.slot_copy import forget
from lora_plugins.worker.slot_stream import SlotStream
from lora_plugins.worker.vectors import vectors_of_adapter
from lora_plugins.worker.weights_file import with_opened


class PlannedWorkerLoRAManager(LRUCacheWorkerLoRAManager):  # type: ignore[misc]
    """Holds the adapters that the scheduler had loaded, and computes with the adapters in slots.

    Adapters that vLLM itself adds (warm-up, dummy batches) are treated as in vLLM. Once there is a plan, dummies are
    computed without an adapter. Adapters that callers add and remove in workers are planned from then on.

    What is planned is not read again, no step reads a disk, and once there is a plan a dummy takes no slot.

    Touches:
        vllm.lora.worker_manager:
            LRUCacheWorkerLoRAManager{_manager_cls, create_lora_manager(self, model, vllm_config),
                add_adapter(self, lora_request), _apply_adapters(self, lora_requests)}
            WorkerLoRAManager{set_active_adapters(self, requests, mapping), add_dummy_lora(self, lora_request, rank),
                remove_adapter(self, adapter_id), remove_all_adapters(self), list_adapters(self)}
        vllm.lora.layers.utils: LoRAMapping{index_mapping, prompt_mapping}
        vllm.lora.request: LoRARequest{lora_name, lora_int_id, lora_path}
    Why: adapters come and go as the scheduler says.
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
        """Take vLLM's arguments; `make_resolver` makes a resolver for adapters whose files are not on this machine.

        `make_resolver` gets the model's path, and the model's modules where this worker knows the modules: the resolver
        converts adapters by the modules.
        """
        self._settings = settings
        self._make_resolver = make_resolver
        super().__init__(vllm_config, *args, **kwargs)
        self._is_planned = False
        self.whole_model: ModelModules | None = None
        self._dummies: set[LoRARequest] = set()

    def create_lora_manager(self, model: torch.nn.Module, vllm_config: Any) -> Any:
        """Do as vLLM does, and start the loading threads."""
        result = super().create_lora_manager(model, vllm_config)
        self._modules = describe(self._adapter_manager)
        # With pipeline parallelism a worker has only a part of the model's modules.
        self._is_whole_model = vllm_config.parallel_config.pipeline_parallel_size == 1
        path = vllm_config.model_config.model
        self.jobs = Jobs(
            self._read,
            MissingFilesFetcher(path, lambda: self._make_resolver(path, self._modules_of_model())),
            self._adapter_manager,
            SlotStream(torch.device(self.device)),
            agreement_of(vllm_config),
        )
        self._adapter_manager.empty()
        if torch.device(self.device).type == "cpu":
            _freeze_heap()
        return result

    def _modules_of_model(self) -> ModelModules | None:
        """Return the whole model's modules; with pipeline parallelism the API server sends them (`whole_model`)."""
        return self._modules if self._is_whole_model else self.whole_model

    # --- the scheduler's commands, in the engine loop ---

    def begin_step(self, commands: Sequence[Command]) -> None:
        """Carry out the commands before this step's batch, if there is a batch."""
        self._is_planned = self._is_planned or bool(commands)
        self.jobs.begin_step(commands)

    def reports(self, wait_s: float = 0.0) -> list[Report]:
        """Return the jobs done since the last call; wait up to `wait_s` for a result while a job runs."""
        return self.jobs.reports(wait_s)

    def rewrite_slots(self) -> None:
        """Write every slot again from host memory, after the device's content may have been lost."""
        for module in self._adapter_manager.modules.values():
            forget(module)
        self._adapter_manager.empty()
        self.jobs.rewrite_slots()

    def lora_metrics(self) -> dict[str, dict[str, Any]]:
        """Return adapters, memory and performance of this worker."""
        return metrics_of(self.jobs.entries, self._adapter_manager, self.device)

    # --- in the background ---

    def _read(self, spec: AdapterSpec, path: str) -> LoadedAdapter:
        """Parse, check against the model, pack, and copy off the file: no byte is left to read later.

        Raises:
            LoRAPluginsError, or any error of vLLM's.
        """
        request = spec.lora_request or request_of(spec.name, spec.engine_id, path)
        manager = self._adapter_manager
        with describing(adapter=spec.name):
            model, opened = with_opened(lambda: self._load_adapter(request))
            read = read_beside(opened, manager.model)
            manager._validate_moe_lora_format(model)  # noqa: SLF001 - as vLLM does when it registers an adapter
            notes = adapter_checks.check_described(
                model, manager, self._modules,
                is_whole_model=self._is_whole_model, refuse_unmatched=self._settings.unmatched == "refuse",
            )  # fmt: skip
            for note in notes:
                logger.warning("Adapter '%s' is %s", spec.name, note)
            vectors = vectors_of_adapter(
                read, model, manager, self._modules, self.jobs.loop_work.run, is_whole_model=self._is_whole_model
            )
            # Before vLLM merges modules, which drops some.
            rank = max((int(weights.rank) for weights in model.loras.values()), default=0)
            scalings = take_scalings(model)
            # IA3 has no pairs, of which vLLM takes the first.
            if model.loras or read is None or IA3 not in read.config.beside:
                manager._create_merged_loras_inplace(model)  # noqa: SLF001 - as vLLM does when it registers an adapter
            adapter_checks.check_slots(model, manager, self._modules)
            # The store has checked a directory that is named by a digest.
            check_finite = self._settings.check_finite and not is_digest(Path(path).name)
            if check_finite:
                adapter_checks.check_finite(model)
            beside = manager.trained_tokens.writes(read, self._modules, check_finite=check_finite)
            is_pinned = torch.device(self.device).type == "cuda"
            return build(
                spec.name, manager, model, scalings,
                is_pinned=is_pinned, rank=rank, beside=beside, vectors=vectors,
            )  # fmt: skip

    # --- vLLM's manager API, in the engine loop ---

    def set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:
        """Do as vLLM does; rows of dummies without a slot, and of lost adapters, are computed without an adapter."""
        self._apply_adapters(requests)
        if mapping is None:
            return
        if self._dummies or self.jobs.lost:
            mapping = _without(mapping, self._adapter_manager.lora_index_to_id)
        self._adapter_manager.set_adapter_mapping(mapping)
        self._adapter_manager.prompt_rows.begin_batch(mapping)
        self._adapter_manager.trained_tokens.begin_batch(requests, self._adapter_manager.lora_index_to_id)

    def _apply_adapters(self, lora_requests: set[LoRARequest]) -> None:
        wanted = [request for request in lora_requests if request]
        for request in wanted:
            # Refreshed first: adding others must not evict the batch's own.
            self._adapter_manager.touch(request.lora_int_id)
        for request in wanted:
            if request.lora_int_id in self._adapter_manager.lora_index_to_id:
                continue
            if request in self._dummies or request.lora_int_id in self.jobs.lost:
                continue
            if request.lora_int_id not in super().list_adapters():  # vLLM's own, of a warm-up
                raise RuntimeError(f"a batch with adapter '{request.lora_name}', which is in no slot")
            self._adapter_manager.activate_adapter(request.lora_int_id)

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:
        """Do as vLLM does before there is a plan; later, dummies get no slot."""
        if not self._is_planned:
            return bool(super().add_dummy_lora(lora_request, rank))
        self._dummies.add(lora_request)
        return True

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Load an adapter that a caller adds past the plan, here and now; the scheduler then plans the adapter.

        As in vLLM, an adapter whose id is here stays unchanged, unless the request is to be loaded in place.

        Raises:
            LoRAPluginsError: the adapter cannot be loaded; earlier adapters are unchanged.
        """
        engine_id, name, path = lora_request.lora_int_id, lora_request.lora_name, lora_request.lora_path
        if engine_id in self.list_adapters() and not is_inplace(lora_request):
            return True
        try:
            # The caller's own request goes along: it may hold the weights themselves, which no path names.
            adapter = self._read(AdapterSpec(engine_id, name, path, lora_request=lora_request), path)
        except Exception as error:
            raise adapter_checks.explained(error, name) from error
        self.jobs.given.add(AdapterSpec(engine_id, name, path, size_bytes=adapter.size_bytes), adapter)
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        """Hide an adapter from later requests; the scheduler evicts the adapter after its last request."""
        if adapter_id not in self.list_adapters():
            return False
        super().remove_adapter(adapter_id)  # adapters of a warm-up, which vLLM has added
        self.jobs.hide(adapter_id)
        return True

    def remove_all_adapters(self) -> None:
        """Remove unplanned adapters, such as vLLM's dummies."""
        self._dummies.clear()
        super().remove_all_adapters()

    def list_adapters(self) -> set[int]:
        """Return the engine ids of the adapters in host memory."""
        return self.jobs.engine_ids | set(super().list_adapters())


def _without(mapping: LoRAMapping, owners: Sequence[int | None]) -> LoRAMapping:
    """Return the mapping with 0, for no adapter, in the place of ids without a slot."""
    known = {owner for owner in owners if owner is not None}
    changed = copy.copy(mapping)
    changed.index_mapping = tuple(owner if owner in known else 0 for owner in mapping.index_mapping)
    changed.prompt_mapping = tuple(owner if owner in known else 0 for owner in mapping.prompt_mapping)
    return changed


@functools.cache  # once in a process
def _freeze_heap() -> None:
    """Hide all present objects (model, vLLM, torch) from the garbage collector.

    The first full pass over these objects would stop every thread, and so the engine, for most of a second. vLLM's GPU
    worker freezes its heap once warm (vllm/v1/worker/gpu_worker.py, 0.32); vLLM's CPU worker does not.

    Touches: vllm.utils.gc_utils: freeze_gc_heap()
    Why: a full garbage collection in the worker stops the engine for most of a second.
    Until: vLLM's CPU worker freezes its heap, as its GPU worker does.
    """
    freeze_gc_heap()
