"""How a pause of one adapter stops the adapter's requests in vLLM's scheduler, for a resume to go on with.

A request stops as vLLM preempts a request: its KV cache is free for others, and is computed again, or found in the
prefix cache, after the resume. In the same way its adapter gives up its slot. The request keeps its place in vLLM's
queue, where vLLM does not see the request until the resume.

Touches:
    vllm.v1.core.sched.scheduler:
        Scheduler{running, requires_kv_delivery, _preempt_request(self, request, timestamp, drop_stale_output)}
Why: one adapter stops, and all others have its blocks and its slot meanwhile.
Until: vLLM pauses the requests of one adapter.
"""

from __future__ import annotations

import time
from typing import Any

from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.vllm_patches.engine_core.request import has_kv_cache


def pause(scheduler: Any, name: str, mode: PauseMode) -> list[str]:
    """Stop new requests of a name from here on; return the ids of all requests of the name.

    Requests that have not run wait for the resume, too, and with `KEEP` all others.
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
