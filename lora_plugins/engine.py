"""Every vLLM symbol that this package touches, as a ledger (`SEAMS`), and what every part of it needs of vLLM.

Reading it needs no vLLM, which is imported inside functions: `tools/check_seams.py` holds the ledger against any vLLM's
sources, and a test holds it against the installed one. What subclasses or wraps vLLM for one purpose stands with that
purpose (`manager/`, `server/doors.py`, `kernels/`, `access/doors.py`, `metrics/installation.py`), and its symbols here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError


@dataclass(frozen=True, slots=True)
class Seam:
    """One touched symbol of vLLM.

    Attributes:
        symbol: `module:qualified.name`.
        has: what must be there: parameter names of a function, in order, "..." for any further ones; attribute or field
            names of a class.
        what: what we do with it. why: what for. since: the first vLLM version with it in this form that we support.
        remove: what would have to change upstream for this entry to go.
    """

    symbol: str
    has: tuple[str, ...]
    what: str
    why: str
    since: str
    remove: str


SEAMS: tuple[Seam, ...] = (
    Seam(
        symbol="vllm.plugins.lora_resolvers.filesystem_resolver:register_filesystem_resolver",
        has=(),
        what="replaced by our function of the same entry-point name, when VLLM_PLUGINS names it",
        why="vLLM ships an entry point of this name; load_plugins_by_group keeps the last discovered one",
        since="0.30",
        remove="vLLM lets a user choose among entry points of one name",
    ),
    Seam(
        symbol="vllm.plugins.lora_resolvers.hf_hub_resolver:register_hf_hub_resolver",
        has=(),
        what="replaced by our function of the same entry-point name, when VLLM_PLUGINS names it",
        why="as for register_filesystem_resolver",
        since="0.30",
        remove="vLLM lets a user choose among entry points of one name",
    ),
    Seam(
        symbol="vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__",
        has=("self", "engine_client", "base_model_paths", "lora_modules"),
        what="wrapped: after it has run, its engine client and served names are read, and its attribute "
        "lora_resolver_lock is replaced",
        why="resolve_lora is told the model's path only; names, largest rank and shapes hang on these two. "
        "lora_resolver_lock keeps a lock for every name that was ever asked for",
        since="0.30",
        remove="LoRAResolver is handed the model and LoRA configuration, and unused locks are dropped",
    ),
    Seam(
        symbol="vllm.entrypoints.serve.exception_handling.register:http_exception_handler",
        has=(),
        what="wrapped: headers of the HTTPException are put on the response",
        why="vLLM drops them, and with them Retry-After on a 503",
        since="0.30",
        remove="vLLM's handler passes exc.headers on, as FastAPI's own does",
    ),
    Seam(
        symbol="vllm.entrypoints.serve.exception_handling.handlers.http:http_exception_handler",
        has=("req", "exc"),
        what="called from the wrapper",
        why="as above",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.lora.ops.torch_ops.lora_ops:bgmv_shrink",
        has=("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "scaling"),
        what="its source is read, to warn where it does not mask index -1",
        why="on the CPU, vLLM before 0.33 computes base-model rows with the last slot's adapter",
        since="0.30",
        remove="0.32 is no longer supported",
    ),
    Seam(
        symbol="vllm.platforms:current_platform",
        has=(),
        what="read",
        why="which device the server runs on",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.platforms.interface:Platform.is_cpu",
        has=("self",),
        what="called",
        why="the warning above is for the CPU only",
        since="0.30",
        remove="0.32 is no longer supported",
    ),
    Seam(
        symbol="vllm.platforms.interface:Platform.get_punica_wrapper",
        has=("cls",),
        what="replaced on the current platform's class by one that names our wrapper",
        why="vLLM makes every layer's kernels from this dotted name, in every process",
        since="0.30",
        remove="vLLM lets a plugin name its LoRA kernels",
    ),
    Seam(
        symbol="vllm.platforms.interface:Platform.device_type",
        has=(),
        what="read",
        why="which kernels can be had",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.lora.layers.base:BaseLayerWithLoRA.set_mapping",
        has=("self", "punica_wrapper"),
        what="wrapped: our punica wrapper is told of the layer",
        why="a wrapper is handed tensors only, padded to max_lora_rank; true ranks are known to the layer",
        since="0.30",
        remove="vLLM tells punica wrappers the true rank of each slot",
    ),
    Seam(
        symbol="vllm.lora.layers.base:BaseLayerWithLoRA.set_lora",
        has=("self", "index", "lora_a", "lora_b"),
        what="wrapped on each layer object: the rank of what is written is noted",
        why="as for set_mapping",
        since="0.30",
        remove="as for set_mapping",
    ),
    Seam(
        symbol="vllm.lora.layers.base:BaseLayerWithLoRA.reset_lora",
        has=("self", "index"),
        what="wrapped on each layer object",
        why="as for set_mapping",
        since="0.30",
        remove="as for set_mapping",
    ),
    Seam(
        symbol="vllm.lora.layers.column_parallel_linear:MergedColumnParallelLinearWithLoRA.expand_packed_lora",
        has=("self", "lora_a", "lora_b"),
        what="called, to know the ranks of slices that share one A, and to pack them",
        why="as for set_mapping",
        since="0.30",
        remove="as for set_mapping",
    ),
    Seam(
        symbol="vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        has=("add_shrink", "add_expand", "add_lora_embedding", "add_lora_linear", "add_lora_logits"),
        what="subclassed in lora_plugins.kernels.punica_cpu; these methods overridden",
        why="work follows max_lora_rank, and before 0.33 base rows get an adapter (vllm-project/vllm#48421)",
        since="0.30",
        remove="vLLM's CPU kernels group rows and know true ranks",
    ),
    Seam(
        symbol="vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase",
        has=("update_metadata", "token_lora_indices", "sampler_indices"),
        what="update_metadata extended; the indices read after it",
        why="rows are grouped once per batch, not once per layer",
        since="0.30",
        remove="as for PunicaWrapperCPU",
    ),
    Seam(
        symbol="vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_linear",
        has=("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices", "buffer", "**kwargs"),
        what="overridden",
        why="as for PunicaWrapperCPU",
        since="0.30",
        remove="as for PunicaWrapperCPU",
    ),
    Seam(
        symbol="vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits",
        has=("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "buffer", "**kwargs"),
        what="overridden",
        why="as for PunicaWrapperCPU",
        since="0.30",
        remove="as for PunicaWrapperCPU",
    ),
    Seam(
        symbol="vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU",
        has=("add_shrink", "add_expand", "add_lora_embedding", "add_lora_linear", "add_lora_logits", "update_metadata"),
        what="subclassed in lora_plugins.kernels.punica_triton; these methods overridden, max_loras read",
        why="work follows max_lora_rank, and rows are grouped with a wait for the device in every step",
        since="0.30",
        remove="vLLM's Triton kernels know true ranks and group rows on the device",
    ),
    Seam(
        symbol="vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.update_metadata",
        has=("self", "mapping", "lora_index_to_id", "max_loras", "vocab_size", "**kwargs"),
        what="overridden; called where a layer is computed by vLLM's own path",
        why="as for PunicaWrapperGPU",
        since="0.30",
        remove="as for PunicaWrapperGPU",
    ),
    Seam(
        symbol="vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase._update_base_metadata",
        has=("self", "mapping", "lora_index_to_id", "max_loras", "vocab_size"),
        what="called",
        why="slots of rows on the device, without vLLM's grouping",
        since="0.30",
        remove="as for PunicaWrapperGPU",
    ),
    Seam(
        symbol="vllm.lora.layers.utils:LoRAMapping",
        has=("index_mapping", "prompt_mapping", "is_prefill"),
        what="read",
        why="what the host knows of a batch without asking the device",
        since="0.30",
        remove="never: this is what vLLM hands to punica wrappers",
    ),
    Seam(
        symbol="vllm.config:get_current_vllm_config_or_none",
        has=(),
        what="called when the Triton wrapper is made, for compilation_config.max_cudagraph_capture_size",
        why="what the host decides must not be captured in a CUDA graph",
        since="0.30",
        remove="vLLM hands it to punica wrappers",
    ),
    Seam(
        symbol="vllm.envs:VLLM_BATCH_INVARIANT",
        has=(),
        what="read when the Triton wrapper is made",
        why="a row's result must then not depend on the rows beside it",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.entrypoints.serve.engine.serving:BaseServing._check_model",
        has=("self", "request"),
        what="wrapped where there is an access policy: a name that the request's key may not use is asked for as a "
        "decoy, which nobody has",
        why="it must look like one that does not exist",
        since="0.30",
        remove="vLLM asks a plugin which adapters a request may use",
    ),
    Seam(
        symbol="vllm.entrypoints.pooling.base.serving:PoolingBaseServing._check_model",
        has=("self", "request"),
        what="wrapped, as BaseServing._check_model",
        why="as above",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.entrypoints.serve.engine.serving:BaseServing._maybe_get_adapters",
        has=("self", "request", "supports_default_mm_loras"),
        what="wrapped, as BaseServing._check_model",
        why="as above; pooling routes refuse an unknown name here, and default multimodal adapters come from here",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.entrypoints.serve.engine.serving:BaseServing.create_error_response",
        has=("message", "err_type", "status_code", "param"),
        what="called with the text of its own error, in which the asked name is put back",
        why="as above",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.entrypoints.openai.models.serving:OpenAIServingModels.show_available_models",
        has=("self",),
        what="wrapped where there is an access policy: lists what the request's key may use",
        why="as above",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.entrypoints.openai.models.serving:OpenAIServingModels.unload_lora_adapter",
        has=("self", "request"),
        what="wrapped where there is an access policy, as load_lora_adapter: for administrators only",
        why="vLLM knows no rights",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.envs:VLLM_API_KEY",
        has=(),
        what="read, beside app.state.args.api_key",
        why="to warn where vLLM would not let the policy's keys in",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.lora.resolver:LoRAResolver.resolve_lora",
        has=("self", "base_model_name", "lora_name"),
        what="implemented by our resolver",
        why="vLLM asks it for unknown model names",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.lora.resolver:LoRAResolverRegistry",
        has=(),
        what="called once per process",
        why="public interface",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.lora.resolver:_LoRAResolverRegistry.register_resolver",
        has=("self", "resolver_name", "resolver"),
        what="called once per process",
        why="public interface",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.entrypoints.openai.models.serving:OpenAIServingModels",
        has=(
            *("engine_client", "model_config", "base_model_paths"),
            *("lora_requests", "lora_id_counter", "lora_resolver_lock"),
        ),
        what="read, with engine_client.vllm_config.lora_config; names are put into lora_requests",
        why="names, configuration and LoRA limits of the served model; the table of what is served",
        since="0.30",
        remove="LoRAResolver is handed the model and LoRA configuration",
    ),
    Seam(
        symbol="vllm.config.lora:LoRAConfig",
        has=("max_lora_rank", "fully_sharded_loras"),
        what="read",
        why="a larger rank is refused before the engine sees it; fully sharded layers are computed in their own way",
        since="0.30",
        remove="LoRAResolver is handed the model and LoRA configuration",
    ),
    Seam(
        symbol="vllm.lora.request:LoRARequest",
        has=("lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace"),
        what="built for each resolved adapter; one with load_inplace gets an id of its own instead",
        why="public interface; a swap must not change the weights under what runs",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.v1.worker.lora_model_runner_mixin:LRUCacheWorkerLoRAManager",
        has=(),
        what="replaced by StagedWorkerLoRAManager, when VLLM_PLUGINS names lora_lru_manager",
        why="the mixin makes its manager by this name",
        since="0.30",
        remove="vLLM lets a plugin choose the worker LoRA manager",
    ),
    Seam(
        symbol="vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model",
        has=("self", "model", "vllm_config", "device"),
        what="relied on: it puts the manager at model_runner.lora_manager",
        why="worker methods find the manager there",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.v1.worker.worker_base:WorkerBase",
        has=(),
        what="given the methods lora_plugins_stage, lora_plugins_stage_state, lora_plugins_release, get_lora_metrics",
        why="collective_rpc reaches methods of the worker by name",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.worker_manager:LRUCacheWorkerLoRAManager",
        has=("_manager_cls",),
        what="subclassed, with SlotModelManager as its _manager_cls",
        why="host tier, staging, slots filled beside the loop",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.create_lora_manager",
        has=("self", "model", "vllm_config"),
        what="extended",
        why="the host tier is made once the model is there",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter",
        has=("self", "lora_request"),
        what="overridden",
        why="served from the host tier instead of a disk",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._apply_adapters",
        has=("self", "lora_requests"),
        what="overridden",
        why="no step reads a disk",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",
        has=("self", "lora_request"),
        what="extended; called in the staging thread",
        why="packed, matched with the model and copied off the file while the engine goes on",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.worker_manager:WorkerLoRAManager.remove_adapter",
        has=("self", "adapter_id"),
        what="overridden",
        why="the host tier knows what is leased and pinned",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.worker_manager:WorkerLoRAManager.pin_adapter",
        has=("self", "adapter_id"),
        what="overridden",
        why="the host tier knows what is leased and pinned",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.worker_manager:WorkerLoRAManager.remove_all_adapters",
        has=("self",),
        what="overridden",
        why="the host tier knows what is leased and pinned",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.worker_manager:WorkerLoRAManager.list_adapters",
        has=("self",),
        what="overridden",
        why="the host tier knows what is leased and pinned",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.model_manager:LRUCacheLoRAModelManager",
        has=(),
        what="subclassed",
        why="an idle slot can be reserved, filled and flipped",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.model_manager:LoRAModelManager",
        has=(
            "lora_index_to_id",
            "modules",
            "_registered_adapters",
            "_active_adapters",
            "punica_wrapper_mapping",
            "device",
            "capacity",
            "lora_slots",
        ),
        what="read, and lora_index_to_id and _active_adapters written",
        why="which adapter is in which slot",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.model_manager:LRUCacheLoRAModelManager.activate_adapter",
        has=("self", "lora_id"),
        what="extended",
        why="a filled slot is flipped, not copied",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.model_manager:LoRAModelManager._add_adapter",
        has=("self", "lora"),
        what="extended",
        why="what was packed while staging is not packed again",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.model_manager:LoRAModelManager.remove_all_adapters",
        has=("self",),
        what="extended",
        why="reserved slots are given back first",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.model_manager:LoRAModelManager.deactivate_adapter",
        has=("self", "adapter_id"),
        what="called",
        why="empties a slot",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace",
        has=("self", "lora_model"),
        what="called in the staging thread",
        why="packs and folds the scaling in once",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.model_manager:LoRAModelManager.get_adapter",
        has=("self", "adapter_id"),
        what="called",
        why="whether what is registered is what the host tier has",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.model_manager:LoRAModelManager._get_lora_layer_weights",
        has=("self", "lora_model", "module_name"),
        what="called",
        why="the weights of a module, looked up as activation does",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.utils.cache:LRUCache",
        has=("cache", "pinned_items"),
        what="read",
        why="the order of use and the pinned adapters of vLLM's caches",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.utils.gc_utils:freeze_gc_heap",
        has=(),
        what="called once, on the CPU, after the LoRA manager was made",
        why="a full garbage collection in the worker stops the engine for most of a second",
        since="0.30",
        remove="vLLM's CPU worker freezes its heap, as its GPU worker does",
    ),
    Seam(
        symbol="vllm.lora.lora_model:safetensors",
        has=(),
        what="replaced in this module by one whose safe_open is lora_plugins.manager.weights_file.open_weights",
        why="safetensors' get_tensor for torch leaves 64 bytes for each tensor that is read, for ever",
        since="0.30",
        remove="every supported safetensors frees them (0.8.0 does not)",
    ),
    Seam(
        symbol="vllm.lora.lora_model:LoRAModel",
        has=("loras",),
        what="read, and its tensors replaced by copies",
        why="bytes, matching, and owning the memory",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.lora_weights:LoRALayerWeights",
        has=("lora_a", "lora_b"),
        what="read, and replaced by copies",
        why="as above",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.layers.base:BaseLayerWithLoRA.set_lora",
        has=("self", "index", "lora_a", "lora_b"),
        what="called in the staging thread",
        why="fills a reserved slot",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.layers.base:BaseLayerWithLoRA.reset_lora",
        has=("self", "index"),
        what="called in the staging thread",
        why="empties what an adapter has no weights for",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.layers.base:BaseLayerWithLoRA.slice_lora_a",
        has=("self", "lora_a"),
        what="called",
        why="shapes are compared as this worker's part, and packed",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.layers.base:BaseLayerWithLoRA.slice_lora_b",
        has=("self", "lora_b"),
        what="called",
        why="shapes are compared as this worker's part, and packed",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA",
        has=("lora_a_stacked", "lora_b_stacked", "output_slices", "tp_size", "n_slices", "lora_config"),
        what="read; lora_config for fully_sharded_loras",
        why="shapes of the slots, and whether they are read by fully sharded layers, which have no packer",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.set_lora",
        has=("self", "index", "lora_a", "lora_b"),
        what="replaced: writes the adapter's own rank, and zeros only where a larger one has been",
        why="vLLM zeroes the whole slot before every copy",
        since="0.30",
        remove="vLLM writes slots at the adapter's rank",
    ),
    Seam(
        symbol="vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.reset_lora",
        has=("self", "index"),
        what="replaced: zeros where something is",
        why="as for set_lora",
        since="0.30",
        remove="vLLM writes slots at the adapter's rank",
    ),
    Seam(
        symbol="vllm.lora.layers.column_parallel_linear:MergedColumnParallelLinearWithLoRA.set_lora",
        has=("self", "index", "lora_a", "lora_b"),
        what="replaced, as BaseLinearLayerWithLoRA.set_lora is",
        why="as for BaseLinearLayerWithLoRA.set_lora",
        since="0.30",
        remove="vLLM writes slots at the adapter's rank",
    ),
    Seam(
        symbol="vllm.v1.engine.async_llm:AsyncLLM.add_lora",
        has=("self", "lora_request"),
        what="wrapped: stages on every worker instead of loading in the engine loop",
        why="no running request waits for a cold adapter",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.v1.engine.async_llm:AsyncLLM.generate",
        has=("self", "prompt", "sampling_params", "request_id", "prompt_text", "lora_request", "..."),
        what="wrapped",
        why="waits at the gate, and leases the adapter while the request runs",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.v1.engine.async_llm:AsyncLLM.encode",
        has=("self", "prompt", "pooling_params", "request_id", "lora_request", "..."),
        what="wrapped",
        why="as generate",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.v1.engine.async_llm:AsyncLLM.collective_rpc",
        has=("self", "method", "timeout", "args", "kwargs"),
        what="called",
        why="reaches our methods of every worker",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.v1.engine.core_client:AsyncMPClient._call_utility_async",
        has=("self", "method", "*args", "engine"),
        what="called for each engine, where there are several",
        why="with data parallelism collective_rpc returns the first engine's answers only",
        since="0.30",
        remove="collective_rpc returns every engine's answers",
    ),
    Seam(
        symbol="vllm.v1.engine.core_client:MPClient",
        has=("core_engines",),
        what="read",
        why="as above",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.entrypoints.serve.engine.serving:BaseServing._check_model",
        has=("self", "request"),
        what="wrapped: a streaming request's adapter is staged before the first byte of the answer",
        why="a stream's status cannot be changed later",
        since="0.30",
        remove="vLLM stages adapters off its engine loop itself",
    ),
    Seam(
        symbol="vllm.entrypoints.openai.models.serving:OpenAIServingModels.resolve_lora",
        has=("self", "lora_name"),
        what="wrapped: answers with our status and text where an adapter cannot be staged",
        why="vLLM says that it could not be loaded, and no more",
        since="0.30",
        remove="vLLM passes on the text of what add_lora raises",
    ),
    Seam(
        symbol="vllm.entrypoints.openai.models.serving:OpenAIServingModels.load_lora_adapter",
        has=("self", "request", "base_model_name"),
        what="wrapped, as resolve_lora; and where the request has load_inplace, its add_lora is a swap",
        why="vLLM answers with a 500; and loads in place in its engine loop, under what runs",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.entrypoints.serve.lora.protocol:LoadLoRAAdapterRequest",
        has=("load_inplace",),
        what="read",
        why="as above",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.entrypoints.openai.models.serving:OpenAIServingModels.unload_lora_adapter",
        has=("self", "request"),
        what="wrapped: waits for running requests and frees slot, host memory and lease",
        why="vLLM's takes the name out of its table only",
        since="0.30",
        remove="vLLM frees what it unloads",
    ),
    Seam(
        symbol="vllm.entrypoints.openai.models.serving:OpenAIServingModels._check_unload_lora_adapter_request",
        has=("self", "request"),
        what="wrapped: notes what the name stands for while the name's lock is held",
        why="a load in place or a resolver that has the lock first puts another adapter there",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.entrypoints.openai.models.serving:OpenAIServingModels.is_base_model",
        has=("self", "model_name"),
        what="called",
        why="no adapter takes the base model's name",
        since="0.30",
        remove="vLLM has an admin API of its own",
    ),
    Seam(
        symbol="vllm.v1.engine.async_llm:AsyncLLM.abort",
        has=("self", "request_id", "internal"),
        what="called",
        why="ends requests that an unload has waited for long enough",
        since="0.30",
        remove="vLLM has an admin API of its own",
    ),
    Seam(
        symbol="vllm.lora.request:LoRARequest.__eq__",
        has=("self", "value"),
        what="replaced, with __hash__: compares names and ids",
        why="a batch with two versions under one name would hold only one of them",
        since="0.30",
        remove="vLLM compares ids too",
    ),
    Seam(
        symbol="vllm.lora.request:LoRARequest.__hash__",
        has=("self",),
        what="replaced, with __eq__",
        why="as for __eq__",
        since="0.30",
        remove="vLLM compares ids too",
    ),
    Seam(
        symbol="vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys",
        has=("request",),
        what="replaced up to 0.30, whose keys hold the adapter's name only",
        why="a new version must not read prefixes that the old one has computed",
        since="0.30",
        remove="vLLM 0.30 is no longer supported",
    ),
    Seam(
        symbol="vllm.plugins.endpoint_plugins.interface:EndpointPlugin.attach_router",
        has=("self", "app"),
        what="implemented",
        why="the routes of lora_admin",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.plugins.endpoint_plugins.interface:EndpointPlugin.init_state",
        has=("self", "engine_client", "state", "args"),
        what="implemented; state.openai_serving_models is read",
        why="what is served from the start",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.entrypoints.serve.instrumentator.metrics:attach_router",
        has=("app",),
        what="wrapped: metrics are made once it has run, and a middleware refreshes them before a scrape",
        why="it runs where /metrics is, which is in API servers only",
        since="0.30",
        remove="vLLM lets a plugin refresh its metrics before a scrape",
    ),
    Seam(
        symbol="vllm.v1.metrics.prometheus:get_prometheus_registry",
        has=(),
        what="called",
        why="which registry /metrics shows: with several API servers one that reads all processes' files",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.v1.metrics.prometheus:unregister_vllm_metrics",
        has=(),
        what="evaded: it removes every named collector of vllm:… metrics; ours has no name",
        why="vLLM calls it whenever it makes its own metrics",
        since="0.30",
        remove="vLLM removes only what it has registered",
    ),
    Seam(
        symbol="vllm.exceptions:VLLMNotFoundError",
        has=(),
        what="raised for L002",
        why="becomes a 404 with our text",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.exceptions:VLLMClientError",
        has=(),
        what="raised for L003 and L005",
        why="becomes a 400 with our text",
        since="0.30",
        remove="never: this is the public interface",
    ),
)


# --- vLLM's plugins ---

_builtins: dict[tuple[str, str], Callable[[], None]] = {}


def take_over(module_name: str, function_name: str, register: Callable[[], None]) -> None:
    """Put `register` in the place of vLLM's builtin of the same entry-point name.

    vLLM imports both entry points and keeps the one that it discovered last. If that is the builtin, it is read
    from its module after this has run; if it is ours, nothing else is needed. So ours runs in either order.
    """
    _builtins[module_name, function_name] = builtin(module_name, function_name)
    setattr(importlib.import_module(module_name), function_name, register)


def builtin(module_name: str, function_name: str) -> Callable[[], None]:
    """The function of vLLM behind an entry point, taken over or not."""
    known = _builtins.get((module_name, function_name))
    if known is not None:
        return known
    return getattr(importlib.import_module(module_name), function_name)  # type: ignore[no-any-return]


# --- vLLM's resolvers ---


def register_resolver(name: str, resolver: Any) -> None:
    """Have vLLM ask `resolver`, whose class has a `resolve_lora`, for unknown model names."""
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    LoRAResolver.register(type(resolver))
    LoRAResolverRegistry.register_resolver(name, resolver)


def lora_request(name: str, lora_id: int, path: str, base_model_name: str | None) -> Any:
    """VLLM's `LoRARequest`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=lora_id, lora_path=path, base_model_name=base_model_name)


def when_serving(before: Callable[[], None], after: Callable[[Any], None]) -> None:
    """Call `before` and `after` around the making of each `OpenAIServingModels`; what they raise ends the start."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    original = OpenAIServingModels.__init__

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        before()
        original(self, *args, **kwargs)
        after(self)

    OpenAIServingModels.__init__ = wrapped


# --- vLLM's answers ---


def http_error(error: LoRAPluginsError) -> Exception:
    """The exception that makes vLLM answer with our status and text (the one place where errors meet HTTP)."""
    from fastapi import HTTPException
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError

    if isinstance(error, AdapterNotFound):
        return VLLMNotFoundError(str(error))  # type: ignore[no-any-return]
    if error.http_status == 400:
        return VLLMClientError(str(error))  # type: ignore[no-any-return]
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return HTTPException(error.http_status, str(error), headers)


def keep_http_headers() -> None:
    """Have vLLM put an `HTTPException`'s headers on its response."""
    from vllm.entrypoints.serve.exception_handling import register as module

    original = module.http_exception_handler

    @functools.wraps(original)
    async def wrapped(req: Any, exc: Any) -> Any:
        response = await original(req, exc)
        for name, value in (exc.headers or {}).items():
            response.headers[name] = value
        return response

    module.http_exception_handler = wrapped


# --- vLLM's kernels ---


def cpu_kernels_mix_up_base_rows() -> bool:
    """Whether vLLM's own kernels run on the CPU and compute base-model rows with an adapter."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.platforms import current_platform

    # 0.33 masks index -1, which stands for "no adapter"; before, it selects the last slot.
    return bool(current_platform.is_cpu()) and "-1" not in inspect.getsource(lora_ops.bgmv_shrink)
