"""Pauses: how the pause of one adapter stops its requests, and what a pause of the whole engine waits for.

Runs in an engine core. `pause` answers our admin API's pause of one adapter, by a utility of `engine_core.py`. A
running request of the adapter stops as if vLLM preempted the request: the KV cache is free for others, and after the
resume its contents are computed again, or found in the prefix cache. The adapter gives up its slot. The request keeps
its place in vLLM's queue, which hides the request until the resume.

vLLM's own `/pause` and `/sleep` stop the whole engine, and vLLM answers them once the engine has no work
(`EngineCoreProc._pause_complete` where there is none at the call, `_process_input_queue` later;
vllm/v1/engine/core.py, 0.30 to 0.33). Ours has work as long as workers load adapters, so that steps go on and calls
are answered in a pause; the wrappers here have vLLM not count the loads. Slots that are being written do count: a
sleep may follow, which frees the slots' memory.
"""

from __future__ import annotations

import time
from typing import Any

from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.vllm_patches.engine_core.request import has_kv_cache
from lora_plugins.vllm_patches.engine_core.scheduler import has_planner
from lora_plugins.vllm_patches.wrapping import wrap


def patch() -> None:
    """Have every engine core of this process answer pauses beside loads, and release memory of the KV cache.

    Touches:
        vllm.v1.engine.core:
            EngineCoreProc{_pause_complete(self), _process_input_queue(self), _notify_idle_state_callbacks(self),
                has_work(self)}
            EngineCore{_idle_state_callbacks} EngineCore.release_kv_cache_memory(self) # since 0.31
    Why: a load from a slow source takes minutes, and has no part in a pause.
    Until: vLLM asks the scheduler whether requests are left, and apart from that whether to make a step.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    for method in (_pause_complete, _process_input_queue):
        wrap(EngineCoreProc, method.__name__, method, only=has_planner)
    if hasattr(EngineCore, "release_kv_cache_memory"):  # since 0.31
        wrap(EngineCore, "release_kv_cache_memory", _pause_complete, only=has_planner)


# `self` is an engine core; `original` is vLLM's own method.


def _pause_complete(original: Any, self: Any) -> Any:
    """Answer whether the engine has no work, or release memory, which vLLM refuses while the engine has work."""
    with self.scheduler.without_loads():
        return original(self)


def _process_input_queue(original: Any, self: Any) -> Any:
    """Answer the pauses that wait for an idle engine, before vLLM waits for the next call."""
    if self._idle_state_callbacks:
        with self.scheduler.without_loads():
            is_idle = not self.has_work()
        if is_idle:
            self._notify_idle_state_callbacks()
    return original(self)


def pause(scheduler: Any, name: str, mode: PauseMode) -> list[str]:
    """Stop new requests of a name from here on; return the ids of all requests of the name.

    Requests that have not run wait for the resume, too, and with `KEEP` all others.

    Touches:
        vllm.v1.core.sched.scheduler:
            Scheduler{running, requires_kv_delivery, _preempt_request(self, request, timestamp, drop_stale_output)}
    Why: one adapter stops, and all others have its blocks and its slot meanwhile.
    Until: vLLM pauses the requests of one adapter.
    """
    request_ids = scheduler.pauses.pause(name, mode)
    for adapter in scheduler.planner.state.of_name(name):
        if mode is PauseMode.KEEP:
            for request_id in list(adapter.running):
                _preempt(scheduler, scheduler.requests[request_id])
        clients = adapter.clients if mode is PauseMode.WAIT else set()
        for request_id, held in list(adapter.held.items()):
            if mode is not PauseMode.WAIT or not (held.has_run or held.client in clients):
                if has_kv_cache(request := scheduler.requests[request_id]):
                    scheduler.preempt_waiting(request)
                scheduler.planner.stop(request_id)
    scheduler.regroup()
    scheduler.answer_calls()
    return request_ids  # type: ignore[no-any-return]


def _preempt(scheduler: Any, request: Any) -> None:
    scheduler.running = [other for other in scheduler.running if other is not request]
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery)  # noqa: SLF001
