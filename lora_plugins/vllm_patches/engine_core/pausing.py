"""How a pause of one adapter stops the adapter's requests in vLLM's scheduler, for a resume to go on with.

A request stops as vLLM preempts a request: its KV cache is free for others, and is computed again, or found in the
prefix cache, after the resume. In the same way its adapter gives up its slot.
"""

from __future__ import annotations

import time
from typing import Any

from lora_plugins.ledger import Patch
from lora_plugins.scheduler.pauses import PauseMode


def pause(scheduler: Any, name: str, mode: PauseMode) -> list[str]:
    """Hold new requests of a name from here on; return the ids of all requests of the name.

    Requests that wait for a slot wait for the resume, too. Running requests that keep their place stop at once: an
    engine that vLLM's own pause holds has no next step.
    """
    request_ids = scheduler.pauses.pause(name, mode)
    for adapter in [it for it in scheduler.planner.state.adapters.values() if it.held and it.spec.name == name]:
        clients = adapter.clients if mode is PauseMode.WAIT else set()
        for request_id in [key for key, held in adapter.held.items() if held.client not in clients]:
            _stop(scheduler, scheduler.requests[request_id])
    stop_kept(scheduler)
    return request_ids  # type: ignore[no-any-return]


def stop_kept(scheduler: Any) -> None:
    """Stop running requests of names whose pause keeps the requests' places.

    A request whose KV cache another engine sends, or whose grammar is compiled, stops once cache or grammar arrive.
    """
    for adapter in scheduler.pauses.to_stop():
        # A copy: `_stop` takes requests out of `running`.
        for request_id in list(adapter.running):
            request = scheduler.requests[request_id]
            if _leave(scheduler, request):
                _stop(scheduler, request)


def _stop(scheduler: Any, request: Any) -> None:
    scheduler.planner.stop(request.request_id, request, time.monotonic(), priority=scheduler.priority_of(request))


def _leave(scheduler: Any, request: Any) -> bool:
    from vllm.v1.request import RequestStatus

    if request.status not in (RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.PREEMPTED):
        return False
    is_running = request.status == RequestStatus.RUNNING
    if is_running:
        scheduler.running = [other for other in scheduler.running if other is not request]
    else:
        leave_queues(scheduler, request)
    if is_running or request.num_computed_tokens:  # a session's next part waits with a KV cache
        # `_preempt_request` asserts RUNNING, and puts the request into `waiting`, where no paused request may be.
        request.status = RequestStatus.RUNNING
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery)  # noqa: SLF001
        scheduler.waiting.remove_request(request)
    return True


def leave_queues(scheduler: Any, request: Any) -> None:
    """Take a waiting request out of vLLM's queues."""
    for name in ("waiting", "kv_holding_waiting", "skipped_waiting"):  # not every release has both of the last
        if hasattr(scheduler, name):
            getattr(scheduler, name).remove_requests([request])
    getattr(scheduler, "deferred_waiting", set()).discard(request)


LEDGER = (
    Patch(
        """
        vllm.v1.core.sched.scheduler:
            Scheduler{running, waiting, requires_kv_delivery}
            Scheduler{skipped_waiting}  # until 0.30
            Scheduler{kv_holding_waiting, deferred_waiting}  # since 0.31
            Scheduler._preempt_request(self, request, timestamp, drop_stale_output)
        vllm.v1.core.sched.request_queue:
            RequestQueue.remove_request(self, request)
            RequestQueue.remove_requests(self, requests)
        vllm.v1.request:
            Request{status, num_computed_tokens}
            RequestStatus{RUNNING, WAITING, PREEMPTED}
        """,
        what="called: a request of a paused adapter is preempted and taken out of vLLM's queues until the resume",
        why="one adapter stops, and all others have its blocks and its slot meanwhile",
        remove="vLLM pauses the requests of one adapter",
    ),
)
