"""The planner of vLLM's scheduler, and held requests in what the scheduler counts: they wait, and are unfinished.

Source: `SchedulerInterface` in vllm/v1/core/sched/interface.py, 0.30 to 0.33. vLLM knows these requests (`requests`),
but has them in no queue; 0.30 counts its queues in several places, later releases by `get_request_counts`.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.errors import InvalidSettings
from lora_plugins.ledger import Patch
from lora_plugins.process import this_process
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import Slots
from lora_plugins.scheduler.planner import Planner
from lora_plugins.scheduler.policies import make_policy


def make_planner(vllm_config: Any) -> Planner | None:
    """The planner for an engine of this configuration; None where LoRA is off.

    Raises:
        InvalidSettings: a setting, or an executor whose workers would not see the commands.
    """
    lora = vllm_config.lora_config
    if lora is None:
        return None
    _refuse_executor(vllm_config)
    settings = this_process().settings
    cache = HostCache(settings.host_max_bytes, lora.max_cpu_loras, make_policy(settings.host_policy))
    return Planner(Slots(lora.max_loras), cache)


def _refuse_executor(vllm_config: Any) -> None:
    """Ray's executor before 0.33 calls the model runner past the worker, where commands are read.

    With an external launcher every rank has a scheduler of its own, and only one rank's outputs would reach its own.
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


class HeldCounts:
    """Of a scheduler class of vLLM's that follows in a subclass; `planner` is None where LoRA is off."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.planner = make_planner(vllm_config)
        self._counts_held = True
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    @property
    def _held(self) -> int:
        return 0 if self.planner is None else self.planner.state.held_count

    @property
    def _is_paused(self) -> bool:
        return bool(self.pause_state != 0)  # type: ignore[attr-defined]

    @property
    def is_stopped(self) -> bool:
        """Whether a pause lets no request go on: nothing comes free. Where none is in flight, any pause does."""
        return self._is_paused and self.get_num_unfinished_requests() <= 0

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests, the held ones among the latter; while vLLM schedules, those of its own queues.

        From 0.31 on vLLM cuts long prompts, and spreads prefills, by how many requests there are.
        """
        running, waiting = super().get_request_counts()  # type: ignore[misc]
        return running, waiting + (self._held if self._counts_held else 0)

    def get_num_unfinished_requests(self) -> int:
        """As vLLM's, with held requests, unless new ones are paused."""
        if not self._held or self._is_paused:
            return int(super().get_num_unfinished_requests())  # type: ignore[misc]
        return sum(self.get_request_counts()) - int(self.num_waiting_for_streaming_input)  # type: ignore[attr-defined]

    def has_finished_requests(self) -> bool:
        """As vLLM's, which compares what is queued with what it knows."""
        if not super().has_finished_requests():  # type: ignore[misc]
            return False
        is_any_more = len(self.requests) > sum(self.get_request_counts())  # type: ignore[attr-defined]
        return not self._held or bool(self.finished_req_ids) or is_any_more  # type: ignore[attr-defined]

    def has_requests(self) -> bool:
        """Whether to go on with steps: also for what the workers do, or are to do, without any request."""
        return bool(super().has_requests()) or (  # type: ignore[misc]
            self.planner is not None and (self._has_work or bool(self.planner.state.refused))
        )

    @property
    def _has_work(self) -> bool:
        planner: Planner = self.planner  # type: ignore[assignment]
        return planner.has_work(is_paused=self._is_paused, is_stopped=self.is_stopped)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, where held requests wait."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None and self.planner is not None and self._held:
            stats.num_waiting_reqs = self.get_request_counts()[1] - stats.num_skipped_waiting_reqs
            stats.waiting_lora_adapters.update(self.planner.state.held_by_name)
        return stats


LEDGER = (
    Patch(
        """
        vllm.v1.core.sched.interface:
            SchedulerInterface.get_request_counts(self)
            SchedulerInterface.get_num_unfinished_requests(self)
            SchedulerInterface.has_finished_requests(self)
            SchedulerInterface.has_requests(self)
            SchedulerInterface.make_stats(self)
            SchedulerInterface.pause_state(self)
            PauseState{UNPAUSED}
        vllm.v1.core.sched.scheduler:
            Scheduler{requests, finished_req_ids, num_waiting_for_streaming_input}
        vllm.v1.metrics.stats:
            SchedulerStats{num_waiting_reqs, num_skipped_waiting_reqs, waiting_lora_adapters}
        """,
        what="extended: held requests wait and are unfinished; has_requests is also true while workers load",
        why="vLLM's metrics and load balancer know of held requests, and the engine's loop goes on for them",
    ),
    Patch(
        "vllm.v1.executor.abstract: Executor.get_class(vllm_config)",
        what="called, to refuse Ray's first executor and external launchers of several workers",
        why="the first calls model runners past the worker, which reads commands; the second has several schedulers",
    ),
)
