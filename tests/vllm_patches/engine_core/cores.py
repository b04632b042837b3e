"""An engine core in a process of its own, over a bed's scheduler."""

from __future__ import annotations

import queue
from typing import Any

from vllm.v1.engine.core import EngineCoreProc


class Executor:
    """Workers that are asked for nothing but what they were given past the plan."""

    is_sleeping = False

    def collective_rpc(self, method: str, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return [[]]

    def sleep(self, level: int) -> None:
        self.is_sleeping = True


def core_of(scheduler: Any, batches: Any = None) -> Any:
    core = object.__new__(EngineCoreProc)
    core.scheduler, core.model_executor = scheduler, Executor()
    core.engines_running, core.batch_queue, core._idle_state_callbacks = False, batches, []
    core.output_queue, core.input_queue, core.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
    core._finish_pause = lambda clear_cache: None
    core._send_abort_outputs = lambda requests: None
    core.process_input_queue_block, core.is_running = False, lambda: True
    return core
