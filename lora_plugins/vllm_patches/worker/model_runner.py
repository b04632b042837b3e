"""vLLM's model runners zero new KV blocks before use, and count rows of logits with NaN or infinity.

`patch` runs as plugins are loaded. An engine core then marks its KV configuration, whose copies have the workers zero
blocks. `patch_runners` runs in each worker once the model runner is made. vLLM has two model runners, the first (V1)
and the second (V2), in different modules.

Why blocks are zeroed: a block is filled token by token, and attention reads the whole block, with weight 0 behind the
last token. If keys or values of the block's last user, with an adapter, overflowed, the product is 0 * NaN: NaN for the
next user, which may be a request of the base model. vLLM zeroes blocks where a model has Mamba layers, if
`KVCacheConfig.needs_kv_cache_zeroing` says so (vllm/v1/kv_cache_interface.py, 0.30 to 0.33): here for every engine
with LoRA.

While a runner computes logits of prompts, our wrapper of `compute_logits` (`worker/prompt_rows.py`) is told the rows
of the batch.
"""

from __future__ import annotations

import sys
from typing import Any

from lora_plugins.settings import default_for_children
from lora_plugins.vllm_patches.wrapping import wrap

VARIABLE = "VLLM_COMPUTE_NANS_IN_LOGITS"
# The functions that count NaN, in the first model runner and in the second, by the module that calls the function.
_COUNTING = (
    ("vllm.v1.worker.gpu_model_runner", "count_nans_per_row"),
    ("vllm.v1.worker.gpu.sample.sampler", "get_num_nans"),
    ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "get_num_nans"),
)
# The methods that compute logits of prompts, in the first model runner and in the second.
_OF_PROMPTS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_get_prompt_logprobs_dict"),
    ("vllm.v1.worker.gpu.sample.prompt_logprob", "PromptLogprobsWorker", "compute_prompt_logprobs"),
    ("vllm.v1.worker.gpu.sample.prompt_logprob", "PromptLogprobsWorker", "compute_prompt_token_id_logprobs"),
)
_RUNS_ADAPTERS = "lora_plugins_runs_adapters"  # an attribute of KVCacheConfig, copied and pickled along


def patch() -> None:
    """Have every engine and worker of this process zero blocks and count NaN.

    An operator's `VLLM_COMPUTE_NANS_IN_LOGITS` stands; vLLM reads the variable when it makes workers.
    """
    from vllm.v1.engine import core
    from vllm.v1.kv_cache_interface import KVCacheConfig

    wrap(core, "get_kv_cache_configs", _get_kv_cache_configs)
    needs_zeroing = getattr(KVCacheConfig, "needs_kv_cache_zeroing", None)
    if isinstance(needs_zeroing, property) and not isinstance(needs_zeroing, _OrRunsAdapters):
        KVCacheConfig.needs_kv_cache_zeroing = _OrRunsAdapters(needs_zeroing)
    default_for_children(VARIABLE, "1")


def patch_runners(vllm_config: Any) -> None:
    """Patch the runner of a worker's process, once the runner is made; a second call changes nothing.

    vLLM's own counting leaves out infinity, and in the first runner makes a tensor of the logits' size and adds it up.
    Where vLLM ends requests with NaN itself, of the base model too, vLLM's counting stays.
    On the CPU vLLM's runner leaves out groups of sliding windows, and of layers with specs of their own.

    Touches:
        vllm.v1.worker.gpu_model_runner: count_nans_per_row(logits)
        vllm.v1.worker.gpu.sample.sampler: get_num_nans
        vllm.v1.worker.gpu.spec_decode.rejection_sampler: get_num_nans
    Why: an answer of such logits would be that of no weights; the scheduler ends its request.
    Until: vLLM ends requests whose logits are NaN.
    """
    # Patch only modules that this process has imported: an import here would load the runner that is not used.
    for module, function in () if _ends_requests_with_nan(vllm_config) else _COUNTING:
        if (loaded := sys.modules.get(module)) is not None:
            setattr(loaded, function, not_finite_in_rows)
    for module, owner, method in _OF_PROMPTS:
        # `compute_prompt_token_id_logprobs` is 0.31's.
        if hasattr(computes := getattr(sys.modules.get(module), owner, None), method):
            wrap(computes, method, _compute_prompt_logprobs)
    cpu: Any = sys.modules.get("vllm.v1.worker.cpu_model_runner")
    if cpu is not None:
        wrap(cpu.CPUModelRunner, "_zero_block_ids", _zero_block_ids)


def _ends_requests_with_nan(vllm_config: Any) -> bool:
    """Return whether the operator has set `--enable-nan-fault-tolerance`, which vllm-project/vllm#50283 brings."""
    tolerance = getattr(vllm_config, "fault_tolerance_config", None)
    return bool(getattr(tolerance, "enable_nan_fault_tolerance", False))


class _OrRunsAdapters(property):
    """A property that is true for marked configurations, and vLLM's own property for any other."""

    def __init__(self, vllms: property) -> None:
        super().__init__(lambda config: getattr(config, _RUNS_ADAPTERS, False) or vllms.__get__(config))


def _get_kv_cache_configs(original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Mark the configurations of an engine with LoRA: workers zero each KV block before a request has the block.

    On the CPU the blocks of sliding windows too (`_zero_block_ids`).

    Touches:
        vllm.v1.kv_cache_interface: KVCacheConfig.needs_kv_cache_zeroing UniformTypeKVCacheSpecs{kv_cache_specs}
        vllm.v1.engine.core: get_kv_cache_configs
        vllm.v1.worker.cpu_model_runner: CPUModelRunner._zero_block_ids(self, block_ids)
    Why: 0 * NaN: an adapter whose values overflow would reach whoever gets its blocks.
    Until: vLLM zeroes blocks, or its kernels do not read behind the last token.
    """
    configs = original(vllm_config, *args, **kwargs)
    runs_adapters = vllm_config.lora_config is not None and not _loads_while_zeroing(vllm_config)
    for config in configs:
        setattr(config, _RUNS_ADAPTERS, runs_adapters)
        if runs_adapters and not config.needs_kv_cache_zeroing:
            config.needs_kv_cache_zeroing = True  # a release in which the name is a field
    return configs


def _loads_while_zeroing(vllm_config: Any) -> bool:
    """Return whether a connector loads blocks in the step that zeroes them, without waiting for the zeroing.

    MoRIIO's READ mode does (ROCm), and keeps such blocks from being zeroed only for models with Mamba layers. Other
    connectors load later, and vLLM does not zero their blocks.
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return transfer is not None and transfer.kv_connector == "MoRIIOConnector"


def not_finite_in_rows(logits: Any) -> Any:
    """Return for each row 1 if the row holds NaN or infinity, else 0 (int32, on the device).

    The largest of values with NaN is NaN, which is not below infinity. Minus infinity is no fault: vLLM masks values
    so, sometimes all of a row.
    """
    import torch

    # A reduction by rows: no tensor of the logits' size is made.
    return (logits.amax(dim=-1) < torch.inf).logical_not().to(torch.int32)


def _compute_prompt_logprobs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Name the hidden states of the whole batch, some consecutive rows of which the model is given at a time.

    Touches:
        vllm.v1.worker.gpu_model_runner:
            GPUModelRunner._get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens)
        vllm.v1.worker.gpu.sample.prompt_logprob:
            PromptLogprobsWorker.compute_prompt_logprobs(self, logits_fn, hidden_states, ...)
            PromptLogprobsWorker.compute_prompt_token_id_logprobs(self, logits_fn, hidden_states, ...) # since 0.31
    Why: vLLM names no request with rows of a prompt, which would get the heads of other requests' adapters.
    Until: vLLM names the adapter of each row of the head.
    """
    import torch

    from lora_plugins.worker.prompt_rows import rows_of_batch

    # The only tensor among the arguments is the hidden states, whatever their place is in a release.
    token = rows_of_batch.set(next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)))
    try:
        return original(self, *args, **kwargs)
    finally:
        rows_of_batch.reset(token)


def _zero_block_ids(original: Any, self: Any, block_ids: list[int]) -> None:
    """Zero the blocks of all groups of attention, on the CPU; see `_get_kv_cache_configs`."""
    from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

    original(self, block_ids)
    layers = self.compilation_config.static_forward_context
    for group in self.kv_cache_config.kv_cache_groups:
        # vLLM's own function has zeroed groups of full attention.
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            continue
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs
        for name in group.layer_names:
            spec = of_layers[name] if of_layers is not None else group.kv_cache_spec
            blocks: Any = getattr(layers.get(name), "kv_cache", None)
            if isinstance(spec, AttentionSpec) and hasattr(blocks, "index_fill_"):  # a tensor
                blocks[block_ids] = 0
