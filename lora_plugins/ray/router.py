"""Ray Serve's request router with our policy: each request goes to a replica with the request's adapter.

Ray makes one in each process with a handle to the replicas: our ingress, or Ray's own in direct streaming. Ray calls
the public methods: to choose replicas, as requests begin and end, and with replicas' reports. `routing/affinity.py`
decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from lora_plugins.ray.replica import Call
from lora_plugins.routing.affinity import AffinityPolicy, Limits
from lora_plugins.routing.residency import Report, Tier

BUSY_REQUESTS = 16
# Seconds that a request counts when Ray does not report its end; by then the replica's reports count the request.
COUNTED_S = 2.0


class AdapterAffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes are Any here
    """Routes by the adapter that a request names; without an adapter, by load.

    The name is `multiplexed_model_id`, which our ingress sets. Ray Serve LLM's direct streaming gives the body of the
    request instead; then the name is the body's `model`, unless `base_names` has the name.

    Replicas are known by the reports of `record_routing_stats` (`lora_plugins.ray.replica`). A request counts from the
    choice of its replica, so that simultaneous requests do not all choose the same replica. The request counts until
    its end. In direct streaming the router does not learn of the end, and the replica's reports count the request.
    """

    def initialize_state(self, busy_requests: int = BUSY_REQUESTS, base_names: Sequence[str] = ()) -> None:
        """Ray Serve's: take the values of `request_router_kwargs`."""
        # Three quarters: an adapter spreads to another replica before a replica is at its bound.
        self._policy = AffinityPolicy(Limits(max(1, busy_requests * 3 // 4), busy_requests))
        self._base_names = frozenset(base_names)
        self._by_name: dict[str, RunningReplica] = {}
        self._stats: dict[str, Any] = {}
        self._counted: dict[str, tuple[str, str]] = {}  # request id → its adapter, and the replica with the request

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ray Serve's: return groups of replicas in the order of attempts; all candidates, full ones too, come last."""
        if pending_request is None:
            return [candidate_replicas]
        request_id = pending_request.metadata.internal_request_id
        call = pending_request.args[0] if pending_request.args else None
        failed = call.excluded if isinstance(call, Call) else ()
        adapter, now_s = self._adapter(pending_request, call), time.monotonic()
        # Ray asks again for a request that no replica took; the earlier count must go first.
        is_asked_again = request_id in self._counted
        self._release(request_id)
        # Where each replica has failed at the request once, a second try is better than none.
        names = self._policy.ranked(adapter, now_s, failed) or self._policy.ranked(adapter, now_s)
        if not names:
            return [candidate_replicas]
        self._count(request_id, adapter, names[0])
        if not is_asked_again:
            self._watch_end(pending_request, is_said=isinstance(call, Call))
        pending_request.routing_context.should_backoff = True
        best = [[self._by_name[name]] for name in names if name in self._by_name]
        # Where all replicas of the policy are full, any replica may take the request.
        return [*best, candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """Ray Serve's: note the replica that has taken a request, perhaps not the first choice."""
        request_id = pending_request.metadata.internal_request_id
        counted = self._counted.get(request_id)
        if counted is not None and counted[1] != replica_id.unique_id:
            self._release(request_id)
            self._count(request_id, counted[0], replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray Serve's: note that a request has ended at a replica, or that the replica did not take the request."""
        counted = self._counted.get(internal_request_id)
        if counted is not None and counted[1] == replica_id.unique_id:
            self._release(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray Serve's: note the present replicas, and the replicas' reports."""
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in self._stats.keys() - self._by_name.keys():
            self._forget(name)
        for name, replica in self._by_name.items():
            self._policy.join(name)
            stats = replica.routing_stats
            # Ray repeats an unchanged report at each update: only a new report may change the policy's state.
            if self._stats.get(name) != stats:
                self._policy.reported(name, _report(stats), time.monotonic())
            self._stats[name] = stats
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Ray Serve's: note the death of a replica before the controller's word."""
        super().on_replica_actor_died(replica_id)
        self._by_name.pop(replica_id.unique_id, None)
        self._forget(replica_id.unique_id)

    def _adapter(self, request: PendingRequest, first_argument: Any) -> str:
        name = request.metadata.multiplexed_model_id
        if not name and not isinstance(first_argument, Call):
            name = getattr(first_argument, "model", "")
        return name if isinstance(name, str) and name not in self._base_names else ""

    def _watch_end(self, request: PendingRequest, *, is_said: bool) -> None:
        """Release a request whose client leaves before a replica is chosen, or whose end Ray never reports."""
        request_id = request.metadata.internal_request_id
        if is_said:
            request.future.add_done_callback(lambda future: self._release(request_id) if future.cancelled() else None)
        else:
            asyncio.get_running_loop().call_later(COUNTED_S, self._release, request_id)

    def _count(self, request_id: str, adapter: str, name: str) -> None:
        self._counted[request_id] = adapter, name
        self._policy.routed(adapter, name, time.monotonic())

    def _release(self, request_id: str) -> None:
        counted = self._counted.pop(request_id, None)
        if counted is not None:
            self._policy.completed(*counted, time.monotonic())

    def _forget(self, name: str) -> None:
        self._stats.pop(name, None)
        self._policy.leave(name)


def _report(stats: dict[str, Any]) -> Report:
    adapters = {name: Tier(tier) for name, tier in stats.get("adapters", {}).items()}
    return Report(adapters, stats.get("capacity"), stats.get("requests"))
