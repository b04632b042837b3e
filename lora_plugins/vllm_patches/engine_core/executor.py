"""The planner of an engine, which is refused with executors whose workers would not see the planner's commands."""

from __future__ import annotations

from typing import Any

from lora_plugins.errors import InvalidSettings
from lora_plugins.process import this_process
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import Slots
from lora_plugins.scheduler.planner import Planner
from lora_plugins.scheduler.policies import make_policy
from lora_plugins.scheduler.request_queue import QueueOrder


def make_planner(vllm_config: Any) -> Planner:
    """The planner for an engine of this configuration, which has LoRA on.

    Raises:
        InvalidSettings: a setting, or an executor whose workers would not see the commands.
    """
    _refuse_executor(vllm_config)
    lora, settings = vllm_config.lora_config, this_process().settings
    cache = HostCache(settings.host_max_bytes, lora.max_cpu_loras, make_policy(settings.host_policy))
    order = QueueOrder(is_by_priority=vllm_config.scheduler_config.policy == "priority")
    return Planner(Slots(lora.max_loras), cache, order=order)


def _refuse_executor(vllm_config: Any) -> None:
    """Refuse executors that miss commands: Ray's before 0.33 calls the model runner past the worker.

    With an external launcher every rank has a scheduler of its own, and only one rank's outputs would reach its own.

    Touches: vllm.v1.executor.abstract: Executor.get_class(vllm_config)
    Why: the first calls model runners past the worker, which reads commands; the second has several schedulers.
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
