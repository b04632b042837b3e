"""Held requests in what vLLM's scheduler counts: they wait, and are unfinished.

Source: `SchedulerInterface` in vllm/v1/core/sched/interface.py, 0.30 to 0.33.
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
    _hides_held = False

    @property
    def _held(self) -> int:
        return 0 if self.planner is None or self._hides_held else self.planner.admission.held_count

    @property
    def _is_paused(self) -> bool:
        return bool(self.pause_state != 0)  # type: ignore[attr-defined]

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests, the held ones among the latter."""
        running, waiting = super().get_request_counts()  # type: ignore[misc]
        return running, waiting + self._held

    def get_num_unfinished_requests(self) -> int:
        """As vLLM's, with held requests, unless all new ones are paused."""
        unfinished = int(self._without_held("get_num_unfinished_requests"))
        return unfinished if self._is_paused else unfinished + self._held

    def has_finished_requests(self) -> bool:
        """As vLLM's, which compares what is queued with what it knows: held requests are neither."""
        return bool(self._without_held("has_finished_requests"))

    def has_requests(self) -> bool:
        """Whether to go on with steps: also for what the workers do, or are to do, without any request."""
        return bool(super().has_requests()) or (  # type: ignore[misc]
            self.planner is not None and (self.planner.has_work or bool(self._refused))
        )

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, where held requests wait."""
        stats = self._without_held("make_stats", *args, **kwargs)
        if stats is not None and self.planner is not None and self.planner.admission.held_count:
            stats.num_waiting_reqs += self.planner.admission.held_count
            stats.waiting_lora_adapters.update(self.planner.admission.held_by_name)
        return stats

    def _without_held(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """VLLM's own method, which must not count what is held (0.30 counts its queues, others call each other)."""
        hid, self._hides_held = self._hides_held, True
        try:
            return getattr(super(), method)(*args, **kwargs)
        finally:
            self._hides_held = hid


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
        vllm.v1.metrics.stats:
            SchedulerStats{num_waiting_reqs, waiting_lora_adapters}
        """,
        what="extended: held requests wait and are unfinished; has_requests is also true while workers load",
        why="vLLM's metrics and load balancer know of held requests, and the engine's loop goes on for them",
    ),
)
