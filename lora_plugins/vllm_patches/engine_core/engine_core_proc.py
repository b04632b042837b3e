"""vLLM's own pause, and so its sleep, ends its wait while workers still load adapters into host memory.

vLLM answers a pause once the engine has no work (`EngineCoreProc._pause_complete` where there is none already,
`_process_input_queue` later; vllm/v1/engine/core.py, 0.30 to 0.33). The scheduler has work while workers load, so that
the engine makes steps, and calls are answered in the pause. A pause waits for requests, and for slots that are being
written: the next call may be a sleep, which frees the slots' memory.

Pauses are answered, and the memory of the KV cache is released, while an engine makes steps for the workers' loads
alone.

Touches:
    vllm.v1.engine.core:
        EngineCoreProc{_pause_complete(self), _process_input_queue(self), _notify_idle_state_callbacks(self),
            has_work(self)}
        EngineCore{_idle_state_callbacks} EngineCore.release_kv_cache_memory(self) # since 0.31
Why: a load from a slow source takes minutes, and has no part in a pause.
Until: vLLM asks the scheduler whether requests are left, and apart from that whether to make a step.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.vllm_patches.engine_core.engine_core import has_planner
from lora_plugins.vllm_patches.wrapping import where, wrap


def patch() -> None:
    """Have every engine core of this process answer pauses beside loads."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    for method in (_pause_complete, _process_input_queue):
        wrap(EngineCoreProc, method.__name__, where(has_planner, method))
    if hasattr(EngineCore, "release_kv_cache_memory"):  # since 0.31
        wrap(EngineCore, "release_kv_cache_memory", where(has_planner, _release_kv_cache_memory))


# `self` is an engine core; `original` is vLLM's own method.


def _pause_complete(original: Any, self: Any) -> Any:
    with self.scheduler.without_loads():
        return original(self)


def _process_input_queue(original: Any, self: Any) -> Any:
    if self._idle_state_callbacks:
        with self.scheduler.without_loads():
            is_idle = not self.has_work()
        if is_idle:
            self._notify_idle_state_callbacks()
    return original(self)


def _release_kv_cache_memory(original: Any, self: Any) -> Any:
    with self.scheduler.without_loads():  # vLLM refuses where the pause is not complete
        return original(self)
