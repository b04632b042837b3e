"""The configuration of every engine: no KV connector that mixes adapters, and room for many adapters in host memory.

Runs as an API server or an offline program makes the configuration of an engine (`EngineArgs.create_engine_config`).
vLLM's default is one adapter in host memory. Where a slot takes no memory (`worker/slot_counts.py`), a command that
names no `--max-cpu-loras` gets as many as a batch has requests, within a budget of bytes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from lora_plugins.process import this_process
from lora_plugins.vllm_patches import kv_connectors
from lora_plugins.vllm_patches.wrapping import wrap
from lora_plugins.worker.slot_counts import slots_of

MAX_BYTES = "lora_plugins_host_max_bytes"  # an attribute of vLLM's LoRAConfig, where the settings name no budget
_SHARE = 4  # adapters may take one part in so many of the memory
_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")  # v2, v1


def patch() -> None:
    """Look at the configuration of every engine before the engine starts."""
    # vLLM loads plugins once it has the arguments of an engine; workers and engine cores never import the module.
    arguments: Any = sys.modules.get("vllm.engine.arg_utils")
    if arguments is not None:
        wrap(arguments.EngineArgs, "create_engine_config", _create_engine_config)


def _create_engine_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Judge KV connectors, and choose the places in host memory where the caller has not.

    Touches:
        vllm.engine.arg_utils: EngineArgs{max_cpu_loras, create_engine_config(self, usage_context, headless)}
        vllm.config.vllm: VllmConfig{lora_config, scheduler_config, parallel_config, cache_config}
        vllm.config.cache: CacheConfig{kv_cache_memory_bytes, gpu_memory_utilization}
        vllm.config.lora: LoRAConfig{max_loras, max_cpu_loras}
        vllm.config.scheduler: SchedulerConfig{max_num_seqs}
        vllm.config.parallel: ParallelConfig{world_size_across_dp}
    Why: with vLLM's default, adapters take turns although memory for many is there.
    """
    config = original(self, *args, **kwargs)
    kv_connectors.judge(config)
    lora, most, process = config.lora_config, config.scheduler_config.max_num_seqs, this_process()
    is_ours = lora is not None and not self.max_cpu_loras and process.is_manager_patched
    if is_ours and slots_of(lora, most).pointed:
        lora.max_cpu_loras = max(lora.max_loras, most)
        if process.settings.host_max_bytes is None:
            share = _free_bytes(config.cache_config) // config.parallel_config.world_size_across_dp
            setattr(lora, MAX_BYTES, share)
    return config


def _free_bytes(cache_config: Any) -> int:
    """Return the bytes that adapters may take: of what the KV cache leaves, or of what vLLM leaves of all memory."""
    memory, kv_bytes = memory_bytes(), cache_config.kv_cache_memory_bytes
    if kv_bytes is not None:
        return int(max(0, memory - kv_bytes) // _SHARE)  # the model's weights take the most of the rest
    return min(memory // _SHARE, int(memory * (1 - cache_config.gpu_memory_utilization)))


def memory_bytes() -> int:
    """Return the bytes of memory that this machine has, or that its container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [it.read_text().strip() for it in _LIMITS if it.is_file()]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])
