"""How many slots each worker has, by configuration and kernels.

Workers ask when they make vLLM's manager, the engine core when it makes its planner, and the API server when it checks
its arguments: all get the same answer. Copied slots are vLLM's, `--max-loras`; pointed slots only point at an adapter's
packed weights in host memory, where our CPU kernels compute (`kernels/packing.py`).
"""

from __future__ import annotations

from typing import Any

from lora_plugins.kernels.dispatch import CPU_WRAPPER, are_pointed
from lora_plugins.scheduler.messages import Slots


def slots_of(lora_config: Any, max_num_seqs: int) -> Slots:
    """Return the slots of every worker with this configuration.

    Where slots can point at packed weights, each adapter in host memory has a slot.

    Touches:
        vllm.config.lora: LoRAConfig{max_loras, max_cpu_loras, lora_dtype, fully_sharded_loras}
        vllm.platforms.interface: Platform.get_punica_wrapper(cls)
    Why: how many adapters run in a step is known before the first step.

    Args:
        lora_config: vLLM's, with a dtype.
        max_num_seqs: the most requests, and so adapters, of a batch.
    """
    from vllm.platforms import current_platform

    is_pointed = current_platform.get_punica_wrapper() == CPU_WRAPPER and are_pointed(
        lora_config.lora_dtype, fully_sharded=lora_config.fully_sharded_loras
    )
    # A batch never has more adapters than requests; more pointed slots than requests would only cost rows of ranks.
    return Slots(lora_config.max_loras, min(lora_config.max_cpu_loras, max_num_seqs) if is_pointed else 0)
