"""Every vLLM symbol that this package touches, as a ledger: `SEAMS`.

Reading it needs no vLLM: `tools/check_seams.py` holds it against any vLLM's sources, and a test holds it against the
installed one. What is changed in vLLM stands in `vllm_patches/`, what subclasses or wraps it for one purpose with that
purpose (`worker/`, `kernels/`, `access/doors.py`, `metrics/installation.py`), what everything needs of it in
`engine.py`, and the symbols of all of it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


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


def _at(symbol: str, has: str, what: str, since: str = "0.30") -> Seam:
    """`has` is a list with commas; `why` and `remove` are the group's."""
    return Seam(symbol, tuple(has.split(", ")) if has else (), what, why="", since=since, remove="")


def _group(why: str, remove: str, seams: Sequence[Seam]) -> Iterator[Seam]:
    """What serves one purpose, and goes with it."""
    return (replace(seam, why=why, remove=remove) for seam in seams)


_PUBLIC = "never: this is the public interface"
_VLLM_PLANS = "vLLM's scheduler plans adapters itself"

# A line or two for each symbol, by hand.
# fmt: off
SEAMS: tuple[Seam, ...] = (
    # --- plugins, resolvers and what they answer
    *_group(why="vLLM ships entry points of these names; load_plugins_by_group keeps the last discovered one of a name",
            remove="vLLM lets a user choose among entry points of one name", seams=[
        _at("vllm.plugins.lora_resolvers.filesystem_resolver:register_filesystem_resolver", "",
            "replaced by our function of the same entry-point name, when VLLM_PLUGINS names it"),
        _at("vllm.plugins.lora_resolvers.hf_hub_resolver:register_hf_hub_resolver", "",
            "replaced by our function of the same entry-point name, when VLLM_PLUGINS names it"),
    ]),
    *_group(why="how vLLM asks for unknown model names, what it is answered, and the routes of lora_admin",
            remove=_PUBLIC, seams=[
        _at("vllm.lora.resolver:LoRAResolver.resolve_lora", "self, base_model_name, lora_name",
            "implemented by our resolver"),
        _at("vllm.lora.resolver:LoRAResolverRegistry", "", "called once per process"),
        _at("vllm.lora.resolver:_LoRAResolverRegistry.register_resolver", "self, resolver_name, resolver",
            "called once per process"),
        _at("vllm.lora.request:LoRARequest", "lora_name, lora_int_id, lora_path, base_model_name, load_inplace",
            "built for each resolved adapter; one with load_inplace gets a new id, so what runs keeps its weights"),
        _at("vllm.exceptions:VLLMNotFoundError", "", "raised for L002: becomes a 404 with our text"),
        _at("vllm.exceptions:VLLMClientError", "", "raised for L003 and L005: becomes a 400 with our text"),
        _at("vllm.plugins.endpoint_plugins.interface:EndpointPlugin.attach_router", "self, app",
            "implemented: the routes of lora_admin"),
        _at("vllm.plugins.endpoint_plugins.interface:EndpointPlugin.init_state", "self, engine_client, state, args",
            "implemented; state.openai_serving_models is read for what is served from the start"),
    ]),
    *_group(why="public settings and facts of the server",
            remove=_PUBLIC, seams=[
        _at("vllm.platforms:current_platform", "", "read: which device the server runs on"),
        _at("vllm.platforms.interface:Platform.device_type", "", "read: which kernels can be had"),
        _at("vllm.envs:VLLM_BATCH_INVARIANT", "",
            "read when the Triton wrapper is made: a row's result must then not depend on the rows beside it"),
        _at("vllm.envs:VLLM_API_KEY", "",
            "read, beside app.state.args.api_key, to warn where vLLM would not let the policy's keys in"),
        _at("vllm.v1.metrics.prometheus:get_prometheus_registry", "",
            "called: the registry behind /metrics; with several API servers it reads all processes' files"),
    ]),
    *_group(why="resolve_lora is told the model's path only; names, configuration, largest rank and shapes hang on "
                "these. lora_resolver_lock keeps a lock for every name that was ever asked for",
            remove="LoRAResolver is handed the model and LoRA configuration, and unused locks are dropped", seams=[
        _at("vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__",
            "self, engine_client, base_model_paths, lora_modules",
            "wrapped: after it, engine client and served names are read, and lora_resolver_lock is replaced"),
        _at("vllm.entrypoints.openai.models.serving:OpenAIServingModels",
            "engine_client, model_config, base_model_paths, lora_requests, lora_id_counter, lora_resolver_lock",
            "read, with engine_client.vllm_config.lora_config; names are put into lora_requests (what is served)"),
        _at("vllm.config.lora:LoRAConfig", "max_lora_rank, fully_sharded_loras",
            "read: a larger rank is refused before the engine sees it; fully sharded layers are computed differently"),
    ]),
    *_group(why="vLLM drops the headers of an HTTPException, and with them Retry-After on a 503",
            remove="vLLM's handler passes exc.headers on, as FastAPI's own does", seams=[
        _at("vllm.entrypoints.serve.exception_handling.register:http_exception_handler", "",
            "wrapped: headers of the HTTPException are put on the response"),
        _at("vllm.entrypoints.serve.exception_handling.handlers.http:http_exception_handler", "req, exc",
            "called from the wrapper"),
    ]),
    # --- who may use what, and metrics
    *_group(why="an adapter that the key may not use must look like one that does not exist; vLLM knows no rights",
            remove="vLLM asks a plugin which adapters a request may use", seams=[
        _at("vllm.entrypoints.serve.engine.serving:BaseServing._check_model", "self, request",
            "wrapped where there is an access policy: a name that the key may not use becomes a decoy that nobody has"),
        _at("vllm.entrypoints.pooling.base.serving:PoolingBaseServing._check_model", "self, request",
            "wrapped, as BaseServing._check_model"),
        _at("vllm.entrypoints.serve.engine.serving:BaseServing._maybe_get_adapters",
            "self, request, supports_default_mm_loras",
            "wrapped, as _check_model: pooling refuses unknown names here; default multimodal adapters come from it"),
        _at("vllm.entrypoints.serve.engine.serving:BaseServing.create_error_response",
            "message, err_type, status_code, param",
            "called with the text of its own error, in which the asked name is put back"),
        _at("vllm.entrypoints.openai.models.serving:OpenAIServingModels.show_available_models", "self",
            "wrapped where there is an access policy: lists what the request's key may use"),
        _at("vllm.entrypoints.openai.models.serving:OpenAIServingModels.unload_lora_adapter", "self, request",
            "wrapped where there is an access policy, as load_lora_adapter: for administrators only"),
    ]),
    *_group(why="metrics are fresh at every scrape; this runs where /metrics is, which is in API servers only",
            remove="vLLM lets a plugin refresh its metrics before a scrape", seams=[
        _at("vllm.entrypoints.serve.instrumentator.metrics:attach_router", "app",
            "wrapped: metrics are made once it has run, and a middleware refreshes them before a scrape"),
    ]),
    *_group(why="vLLM calls it whenever it makes its own metrics",
            remove="vLLM removes only what it has registered", seams=[
        _at("vllm.v1.metrics.prometheus:unregister_vllm_metrics", "",
            "evaded: it removes every named collector of vllm:… metrics; ours has no name"),
    ]),
    # --- kernels
    *_group(why="on the CPU, vLLM before 0.33 computes base-model rows with the last slot's adapter",
            remove="0.32 is no longer supported", seams=[
        _at("vllm.lora.ops.torch_ops.lora_ops:bgmv_shrink",
            "inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling",
            "its source is read, to warn where it does not mask index -1"),
        _at("vllm.platforms.interface:Platform.is_cpu", "self", "called: the warning is for the CPU only"),
    ]),
    *_group(why="vLLM makes every layer's kernels from this dotted name, in every process",
            remove="vLLM lets a plugin name its LoRA kernels", seams=[
        _at("vllm.platforms.interface:Platform.get_punica_wrapper", "cls",
            "replaced on the current platform's class by one that names our wrapper"),
    ]),
    *_group(why="a punica wrapper is handed tensors only, padded to max_lora_rank; true ranks are known to the layer",
            remove="vLLM tells punica wrappers the true rank of each slot", seams=[
        _at("vllm.lora.layers.base:BaseLayerWithLoRA.set_mapping", "self, punica_wrapper",
            "wrapped: our punica wrapper is told of the layer"),
        _at("vllm.lora.layers.base:BaseLayerWithLoRA.set_lora", "self, index, lora_a, lora_b",
            "wrapped on each layer object: the rank of what is written is noted"),
        _at("vllm.lora.layers.base:BaseLayerWithLoRA.reset_lora", "self, index",
            "wrapped on each layer object: its slot's rank is 0 from then on"),
        _at("vllm.lora.layers.column_parallel_linear:MergedColumnParallelLinearWithLoRA.expand_packed_lora",
            "self, lora_a, lora_b", "called, to know the ranks of slices that share one A, and to pack them"),
    ]),
    *_group(why="work follows max_lora_rank, and before 0.33 base rows get an adapter (vllm-project/vllm#48421)",
            remove="vLLM's CPU kernels group rows and know true ranks", seams=[
        _at("vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
            "add_shrink, add_expand, add_lora_embedding, add_lora_linear, add_lora_logits",
            "subclassed in lora_plugins.kernels.punica_cpu; these methods overridden"),
        _at("vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_linear",
            "self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, buffer, **kwargs", "overridden"),
        _at("vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits",
            "self, y, x, lora_a_stacked, lora_b_stacked, scale, buffer, **kwargs", "overridden"),
        _at("vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase",
            "update_metadata, token_lora_indices, sampler_indices",
            "update_metadata extended, the indices read after it: rows are grouped once per batch, not per layer"),
    ]),
    *_group(why="work follows max_lora_rank, and rows are grouped with a wait for the device in every step",
            remove="vLLM's Triton kernels know true ranks and group rows on the device", seams=[
        _at("vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU",
            "add_shrink, add_expand, add_lora_embedding, add_lora_linear, add_lora_logits, update_metadata",
            "subclassed in lora_plugins.kernels.punica_triton; these methods overridden, max_loras read"),
        _at("vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.update_metadata",
            "self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs",
            "overridden; called where a layer is computed by vLLM's own path"),
        _at("vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase._update_base_metadata",
            "self, mapping, lora_index_to_id, max_loras, vocab_size",
            "called: slots of rows on the device, without vLLM's grouping"),
    ]),
    *_group(why="what the host knows of a batch without asking the device",
            remove="never: this is what vLLM hands to punica wrappers", seams=[
        _at("vllm.lora.layers.utils:LoRAMapping", "index_mapping, prompt_mapping, is_prefill", "read"),
    ]),
    *_group(why="what the host decides must not be captured in a CUDA graph",
            remove="vLLM hands its configuration to punica wrappers", seams=[
        _at("vllm.config:get_current_vllm_config_or_none", "",
            "called when the Triton wrapper is made, for compilation_config.max_cudagraph_capture_size"),
    ]),
    # --- the scheduler
    *_group(why="requests are held until their adapter is in its slot, and vLLM knows of them",
            remove=_VLLM_PLANS, seams=[
        _at("vllm.config.scheduler:SchedulerConfig.get_scheduler_cls", "self",
            "wrapped: a subclass (Admission) of whatever class it names is returned"),
        _at("vllm.v1.core.sched.scheduler:Scheduler", "requests, log_stats, finished_req_ids_dict",
            "read: which requests vLLM knows; whether events and finished ids are recorded"),
        _at("vllm.v1.core.sched.scheduler:Scheduler.__init__", "self, vllm_config, ...",
            "extended: the planner is made with the engine's configuration"),
        _at("vllm.v1.core.sched.interface:SchedulerInterface.add_request", "self, request",
            "extended: a request that names an adapter is held"),
        _at("vllm.v1.core.sched.interface:SchedulerInterface.finish_requests", "self, request_ids, finished_status",
            "extended: held ones are finished too, so that aborts reach them; a list of requests is returned"),
        _at("vllm.v1.core.sched.interface:SchedulerInterface.has_request", "self, request_id",
            "extended: a held request is known; where this is missing, nobody asks", since="0.33"),
        _at("vllm.v1.core.sched.interface:SchedulerInterface.schedule", "self, throttle_prefills",
            "extended: admits first, and puts commands on the output: they go down with the batch they are for"),
        _at("vllm.v1.core.sched.interface:SchedulerInterface.update_from_output",
            "self, scheduler_output, model_runner_output",
            "extended: takes reports, which come up with the batch, and answers refused requests"),
        _at("vllm.v1.core.sched.interface:SchedulerInterface.get_request_counts", "self",
            "extended: held requests wait, for vLLM's metrics and its load balancer"),
        _at("vllm.v1.core.sched.interface:SchedulerInterface.get_num_unfinished_requests", "self",
            "extended: held requests are unfinished, unless paused, so that the engine's loop goes on for them"),
        _at("vllm.v1.core.sched.interface:SchedulerInterface.has_finished_requests", "self",
            "extended: held requests are hidden from it, as it compares vLLM's queues with what vLLM knows"),
        _at("vllm.v1.core.sched.interface:SchedulerInterface.has_requests", "self",
            "extended: also while workers load or have something to be told, so that the engine's loop goes on"),
        _at("vllm.v1.core.sched.interface:SchedulerInterface.make_stats", "self",
            "extended: held requests and their adapters wait, for vLLM's metrics"),
        _at("vllm.v1.metrics.stats:SchedulerStats", "num_waiting_reqs, waiting_lora_adapters",
            "added to: what is held, for vLLM's metrics"),
        _at("vllm.v1.core.sched.interface:SchedulerInterface.pause_state", "self",
            "read: nothing is admitted while paused"),
        _at("vllm.v1.core.sched.interface:PauseState", "UNPAUSED", "compared with 0, which is UNPAUSED"),
        _at("vllm.v1.request:Request",
            "request_id, lora_request, client_index, priority, status, events, pooling_params, trace_headers, "
            "resumable", "read: what is held, and for whom; status set and events taken from"),
        _at("vllm.v1.request:Request.record_event", "self, event_type, timestamp",
            "called with QUEUED when a request is held, so that its wait counts in vLLM's metrics"),
        _at("vllm.v1.engine:EngineCoreEventType", "QUEUED", "recorded, with Request.record_event"),
        _at("vllm.v1.request:Request.take_events", "self", "called, with Request.record_event"),
        _at("vllm.v1.request:Request.is_finished", "self",
            "called: a session that waits for its next part is not finished"),
    ]),
    *_group(why="requests whose adapter cannot be loaded are answered, with our status and text",
            remove=_VLLM_PLANS, seams=[
        _at("vllm.v1.request:RequestStatus", "FINISHED_ERROR", "set on refused requests"),
        _at("vllm.v1.engine:EngineCoreOutputs", "outputs, finished_requests", "made, or added to"),
        _at("vllm.v1.engine:EngineCoreOutput",
            "request_id, new_token_ids, pooling_output, finish_reason, stop_reason, events, trace_headers",
            "made: the stop reason, or a tensor for pooling, carries the error"),
        _at("vllm.v1.engine:FinishReason", "ERROR", "the end of a refused request"),
        _at("vllm.v1.engine.async_llm:AsyncLLM.generate",
            "self, prompt, sampling_params, request_id, prompt_text, lora_request, ...",
            "wrapped: an output that carries an error raises it"),
        _at("vllm.v1.engine.async_llm:AsyncLLM.encode", "self, prompt, pooling_params, request_id, lora_request, ...",
            "wrapped, as generate"),
        _at("vllm.v1.engine.llm_engine:LLMEngine.step", "self",
            "wrapped: the error that a stop reason carries is put where users of the offline engine find it"),
        _at("vllm.outputs:RequestError", "code, message, retryable",
            "made for pooling outputs that have an error field", since="0.32"),
    ]),
    # --- between the API server, the engine core and the workers
    *_group(why="commands reach every worker, and reports the scheduler, whatever the executor",
            remove=_VLLM_PLANS, seams=[
        _at("vllm.v1.core.sched.output:SchedulerOutput", "total_num_scheduled_tokens",
            "read; it is a plain dataclass, given the attribute lora_plugins_commands"),
        _at("vllm.v1.outputs:ModelRunnerOutput", "", "a plain dataclass, given the attribute lora_plugins_reports"),
        _at("vllm.v1.outputs:EMPTY_MODEL_RUNNER_OUTPUT", "",
            "copied before it is given the attribute: it is everybody's"),
        _at("vllm.v1.outputs:AsyncModelRunnerOutput.get_output", "self",
            "wrapped on the object: what it returns is given the attribute"),
        _at("vllm.v1.executor.abstract:Executor.get_class", "vllm_config",
            "called, to refuse Ray's first executor: it calls model runners past the worker, which reads commands"),
        _at("vllm.v1.executor.abstract:Executor.collective_rpc", "self, method, timeout, args, ...",
            "called with lora_plugins_step where the engine is in the caller's process: nobody steps while it waits"),
        _at("vllm.v1.worker.worker_base:WorkerWrapperBase", "worker",
            "read, and given sample_tokens, which it leaves to the worker: reports ride on what is sampled"),
        _at("vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model", "self, scheduler_output",
            "wrapped: commands before, reports after; every executor but Ray's first calls it"),
        _at("vllm.v1.worker.worker_base:WorkerBase", "model_runner, sample_tokens",
            "given the methods lora_plugins_step, get_lora_metrics, which collective_rpc reaches by name"),
        _at("vllm.v1.worker.worker_base:WorkerBase.sample_tokens", "self, grammar_output",
            "called from WorkerWrapperBase's"),
        _at("vllm.distributed.parallel_state:get_inner_dp_world_group", "",
            "called; its rank_in_group, world_size and ranks are read: an engine's workers agree on what is done"),
    ]),
    *_group(why="adapters are loaded, pinned and evicted by the planner, on every engine; no running request waits "
                "for a cold one",
            remove=_VLLM_PLANS, seams=[
        _at("vllm.v1.engine.core:EngineCore", "scheduler, model_executor, vllm_config",
            "read, and given, by name for clients: lora_plugins_load, _pin, _unpin, _retire, _residency, _figures"),
        _at("vllm.v1.engine.core:EngineCore.add_lora", "self, lora_request",
            "wrapped: loaded by the planner; returns a Future"),
        _at("vllm.v1.engine.core:EngineCore.remove_lora", "self, lora_id", "wrapped: evicted once nobody uses it"),
        _at("vllm.v1.engine.core:EngineCore.pin_lora", "self, lora_id", "wrapped: pinned by the planner"),
        _at("vllm.v1.engine.core:EngineCoreProc._convert_msgspec_args", "method, args",
            "relied on: it reads the annotations of what is wrapped, and so hands add_lora a LoRARequest"),
        _at("vllm.v1.engine.core:EngineCoreProc._invoke_utility_method", "name, get_result, output, enqueue_output",
            "relied on: it answers a Future when that is done, so that utilities that wait do not stop the engine"),
        _at("vllm.v1.engine.async_llm:AsyncLLM", "engine_core, vllm_config",
            "read: utilities of every engine; whether LoRA is on"),
        _at("vllm.v1.engine.async_llm:AsyncLLM.add_lora", "self, lora_request",
            "wrapped: loaded on every engine; an error is answered with our status and text"),
        _at("vllm.v1.engine.core_client:AsyncMPClient.call_utility_async", "self, method, *args",
            "called, where there is one engine: reaches our utilities of the engine core"),
    ]),
    *_group(why="with data parallelism, call_utility_async returns the first engine's answer only",
            remove="call_utility_async returns every engine's answers", seams=[
        _at("vllm.v1.engine.core_client:AsyncMPClient._call_utility_async", "self, method, *args, engine",
            "called for each engine, where there are several"),
        _at("vllm.v1.engine.core_client:MPClient", "core_engines", "read"),
    ]),
    *_group(why="sleep may discard or unmap the memory that slots lie in",
            remove="vLLM has adapters loaded again after a sleep", seams=[
        _at("vllm.v1.engine.core:EngineCore.wake_up", "self, tags",
            "wrapped: once nothing sleeps, every worker writes its slots again"),
    ]),
    # --- the worker
    *_group(why="the mixin makes its manager by this name, and commands find it there",
            remove="vLLM lets a plugin choose the worker LoRA manager", seams=[
        _at("vllm.v1.worker.lora_model_runner_mixin:LRUCacheWorkerLoRAManager", "",
            "replaced by PlannedWorkerLoRAManager, when VLLM_PLUGINS names lora_lru_manager"),
        _at("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model",
            "self, model, vllm_config, device", "relied on: it puts the manager at model_runner.lora_manager"),
    ]),
    *_group(why="adapters come and go as the scheduler says, and no step reads a disk",
            remove=_VLLM_PLANS, seams=[
        _at("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager", "_manager_cls",
            "subclassed, with PlannedModelManager as its _manager_cls"),
        _at("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.create_lora_manager", "self, model, vllm_config",
            "extended: spare slots; the threads that load start once the model is there"),
        _at("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter", "self, lora_request",
            "extended: what is planned is not read again; errors are ours"),
        _at("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._apply_adapters", "self, lora_requests",
            "overridden: no step reads a disk"),
        _at("vllm.lora.worker_manager:WorkerLoRAManager.set_active_adapters", "self, requests, mapping",
            "overridden: dummies that are in no slot are computed without an adapter"),
        _at("vllm.lora.worker_manager:WorkerLoRAManager.add_dummy_lora", "self, lora_request, rank",
            "extended: once there is a plan, a dummy takes no slot"),
        _at("vllm.lora.worker_manager:WorkerLoRAManager._load_adapter", "self, lora_request",
            "called in the loading thread: parsed while the engine goes on"),
        _at("vllm.lora.worker_manager:WorkerLoRAManager.remove_adapter", "self, adapter_id",
            "extended: what is planned, the scheduler evicts"),
        _at("vllm.lora.worker_manager:WorkerLoRAManager.remove_all_adapters", "self", "extended, as remove_adapter"),
        _at("vllm.lora.worker_manager:WorkerLoRAManager.list_adapters", "self",
            "extended: what is planned is listed too"),
    ]),
    *_group(why="which adapter is in which slot: those that the scheduler has given away are nobody else's",
            remove=_VLLM_PLANS, seams=[
        _at("vllm.lora.model_manager:LRUCacheLoRAModelManager", "", "subclassed"),
        _at("vllm.lora.model_manager:LRUCacheLoRAModelManager.activate_adapter", "self, lora_id", "extended"),
        _at("vllm.lora.model_manager:LoRAModelManager",
            "lora_index_to_id, modules, _registered_adapters, _active_adapters, punica_wrapper_mapping, capacity, "
            "lora_slots", "read, and lora_index_to_id written"),
        _at("vllm.lora.model_manager:LoRAModelManager.remove_all_adapters", "self", "extended: planned slots stay"),
        _at("vllm.lora.model_manager:LoRAModelManager.remove_adapter", "self, adapter_id",
            "called: what others have added makes way"),
        _at("vllm.lora.model_manager:LoRAModelManager.deactivate_adapter", "self, adapter_id",
            "called, with remove_adapter"),
        _at("vllm.utils.cache:LRUCache", "touch, remove_oldest",
            "called on LRUCacheLoRAModelManager's caches: what others have added makes way in its order of use"),
        _at("vllm.lora.model_manager:LoRAModelManager.set_adapter_mapping", "self, mapping",
            "called; relied on: it reads lora_index_to_id each time, so a batch uses its adapters' slots"),
    ]),
    *_group(why="weights are matched, checked, packed and written to a slot that is nobody's, in the loading thread",
            remove=_VLLM_PLANS, seams=[
        _at("vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace", "self, lora_model",
            "called in the loading thread: packed modules are merged once"),
        _at("vllm.lora.model_manager:LoRAModelManager._validate_moe_lora_format", "self, lora_model",
            "called in the loading thread, where vLLM has it, as vLLM does to register an adapter", since="0.32"),
        _at("vllm.lora.model_manager:LoRAModelManager._get_lora_layer_weights", "self, lora_model, module_name",
            "called: the weights of a module, looked up as activation does"),
        _at("vllm.lora.model_manager:LoRAModelManager._get_module_to_save_weights", "self, lora_model, module_name",
            "called for classification heads, which vLLM has from 0.31", since="0.31"),
        _at("vllm.lora.lora_model:LoRAModel", "loras", "read: matching, and copies of its tensors"),
        _at("vllm.lora.lora_weights:LoRALayerWeights", "lora_a, lora_b, scaling",
            "read; scaling set to 1 where it is folded in with the copy"),
        _at("vllm.lora.layers.base:BaseLayerWithLoRA.set_lora", "self, index, lora_a, lora_b",
            "called in the loading thread: writes a slot that is nobody's"),
        _at("vllm.lora.layers.base:BaseLayerWithLoRA.reset_lora", "self, index",
            "called in the loading thread: empties what an adapter has no weights for"),
        _at("vllm.lora.layers.base:BaseLayerWithLoRA.slice_lora_a", "self, lora_a",
            "called: shapes are compared as this worker's part, and packed"),
        _at("vllm.lora.layers.base:BaseLayerWithLoRA.slice_lora_b", "self, lora_b", "called, as slice_lora_a"),
        _at("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA",
            "lora_a_stacked, lora_b_stacked, output_slices, tp_size, n_slices, lora_config",
            "read: shapes of the slots; lora_config for fully_sharded_loras, whose layers have no packer"),
    ]),
    *_group(why="vLLM zeroes the whole slot before every copy",
            remove="vLLM writes slots at the adapter's rank", seams=[
        _at("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.set_lora", "self, index, lora_a, lora_b",
            "replaced: writes the adapter's own rank, and zeros only where a larger one has been"),
        _at("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.reset_lora", "self, index",
            "replaced: zeros where something is"),
        _at("vllm.lora.layers.column_parallel_linear:MergedColumnParallelLinearWithLoRA.set_lora",
            "self, index, lora_a, lora_b", "replaced, as BaseLinearLayerWithLoRA.set_lora is"),
    ]),
    *_group(why="a full garbage collection in the worker stops the engine for most of a second",
            remove="vLLM's CPU worker freezes its heap, as its GPU worker does", seams=[
        _at("vllm.utils.gc_utils:freeze_gc_heap", "", "called once, on the CPU, after the LoRA manager was made"),
    ]),
    *_group(why="safetensors' get_tensor for torch leaves 64 bytes for each tensor that is read, for ever",
            remove="every supported safetensors frees them (0.8.0 does not)", seams=[
        _at("vllm.lora.lora_model:safetensors", "",
            "replaced in this module by one whose safe_open is lora_plugins.worker.weights_file.open_weights"),
    ]),
    # --- what is served, and its versions
    *_group(why="vLLM says that an adapter could not be loaded, and no more (load_lora_adapter: with a 500); and it "
                "loads in place in its engine loop, under what runs",
            remove="vLLM passes on the text of what add_lora raises, and loads in place beside what runs", seams=[
        _at("vllm.entrypoints.openai.models.serving:OpenAIServingModels.resolve_lora", "self, lora_name",
            "wrapped: answers with our status and text where an adapter cannot be loaded"),
        _at("vllm.entrypoints.openai.models.serving:OpenAIServingModels.load_lora_adapter",
            "self, request, base_model_name",
            "wrapped, as resolve_lora; and where the request has load_inplace, its add_lora is a swap"),
        _at("vllm.entrypoints.serve.lora.protocol:LoadLoRAAdapterRequest", "load_inplace", "read"),
    ]),
    *_group(why="vLLM's unload takes the name out of its table only",
            remove="vLLM frees what it unloads", seams=[
        _at("vllm.entrypoints.openai.models.serving:OpenAIServingModels.unload_lora_adapter", "self, request",
            "wrapped: waits for running requests and frees slot, host memory and lease"),
        _at("vllm.entrypoints.openai.models.serving:OpenAIServingModels._check_unload_lora_adapter_request",
            "self, request",
            "wrapped: notes under the name's lock what it stands for; a load in place or a resolver may come first"),
    ]),
    *_group(why="what lora_admin needs to know and to end",
            remove="vLLM has an admin API of its own", seams=[
        _at("vllm.entrypoints.openai.models.serving:OpenAIServingModels.is_base_model", "self, model_name",
            "called: no adapter takes the base model's name"),
        _at("vllm.v1.engine.async_llm:AsyncLLM.abort", "self, request_id, internal",
            "called: ends requests that an unload has waited for long enough"),
    ]),
    *_group(why="a batch with two versions under one name would hold only one of them",
            remove="vLLM compares ids too", seams=[
        _at("vllm.lora.request:LoRARequest.__eq__", "self, value", "replaced, with __hash__: compares names and ids"),
        _at("vllm.lora.request:LoRARequest.__hash__", "self", "replaced, with __eq__"),
    ]),
    *_group(why="a new version must not read prefixes that the old one has computed",
            remove="vLLM 0.30 is no longer supported", seams=[
        _at("vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys", "request",
            "replaced up to 0.30, whose keys hold the adapter's name only"),
    ]),
)
# fmt: on
