"""Held requests in what vLLM's scheduler counts: they wait, and are unfinished.

Source: `SchedulerInterface` in vllm/v1/core/sched/interface.py, 0.30 to 0.33. vLLM knows these requests (`requests`),
but has them in no queue; 0.30 counts its queues in several places, later releases by `get_request_counts`.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.scheduler.planner import Planner


class HeldCounts:
    """Of a scheduler class of vLLM's that follows in a subclass; `planner` is None where LoRA is off."""

    planner: Planner | None
    _refused: list[tuple[Any, LoRAPluginsError]]

    @property
    def _held(self) -> int:
        return 0 if self.planner is None else self.planner.state.held_count

    @property
    def _is_paused(self) -> bool:
        return bool(self.pause_state != 0)  # type: ignore[attr-defined]

    @property
    def is_stopped(self) -> bool:
        """Whether requests that run do not go on: nothing comes free."""
        return bool(self.pause_state == 2)  # type: ignore[attr-defined]

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests, the held ones among the latter."""
        running, waiting = super().get_request_counts()  # type: ignore[misc]
        return running, waiting + self._held

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
            self.planner is not None and (self.planner.has_work(is_paused=self._is_paused) or bool(self._refused))
        )

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
)
