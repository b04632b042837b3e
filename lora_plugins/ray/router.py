"""Ray Serve's request router with our policy: each request goes where its adapter is."""

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
# So long a request counts whose end Ray does not say: by then its replica's reports count it.
COUNTED_S = 2.0


class AdapterAffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes are Any here
    """Routes by the adapter that a request names; without one, by load.

    The name is `multiplexed_model_id`, which our ingress sets. Ray Serve LLM's direct streaming gives the body of the
    request instead, of which `model` is taken, where it is none of `base_names`.

    Replicas are known by what `record_routing_stats` says of them (`lora_plugins.ray.replica`). A request counts from
    the moment that a replica is chosen for it, so that those that come at once do not all choose the same. It counts
    until its end; in direct streaming the router does not learn of that, and the replica's reports have it.
    """

    def initialize_state(
        self,
        busy_requests: int = BUSY_REQUESTS,
        overload: float = 1.25,
        cool_down_s: float = 60.0,
        base_names: Sequence[str] = (),
    ) -> None:
        """Ray Serve's: from `request_router_kwargs`."""
        limits = Limits(max(1, busy_requests * 3 // 4), busy_requests, overload, cool_down_s)
        self._policy = AffinityPolicy(limits)
        self._base_names = frozenset(base_names)
        self._by_name: dict[str, RunningReplica] = {}
        self._stats: dict[str, Any] = {}
        self._counted: dict[str, tuple[str, str]] = {}  # request id → its adapter and the replica that it counts for

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ray Serve's: replicas in the order in which they are to be tried."""
        if pending_request is None:
            return [candidate_replicas]
        request_id = pending_request.metadata.internal_request_id
        call = pending_request.args[0] if pending_request.args else None
        failed = call.excluded if isinstance(call, Call) else ()
        adapter, now_s = self._adapter(pending_request, call), time.monotonic()
        is_asked_again = request_id in self._counted
        self._release(request_id)
        names = self._policy.ranked(adapter, now_s, failed) or self._policy.ranked(adapter, now_s)
        if not names:
            return [candidate_replicas]
        self._count(request_id, adapter, names[0])
        if not is_asked_again:
            self._watch_end(pending_request, is_said=isinstance(call, Call))
        pending_request.routing_context.should_backoff = True
        best = [[self._by_name[name]] for name in names if name in self._by_name]
        return [*best, candidate_replicas]  # where all that the policy names are full, any may take it

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """Ray Serve's: a replica has taken a request; it may be another than the first."""
        request_id = pending_request.metadata.internal_request_id
        counted = self._counted.get(request_id)
        if counted is not None and counted[1] != replica_id.unique_id:
            self._release(request_id)
            self._count(request_id, counted[0], replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray Serve's: a request has ended at a replica, or was not taken there."""
        counted = self._counted.get(internal_request_id)
        if counted is not None and counted[1] == replica_id.unique_id:
            self._release(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray Serve's: these are the replicas now, with what they say of themselves."""
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in self._stats.keys() - self._by_name.keys():
            self._forget(name)
        for name, replica in self._by_name.items():
            self._policy.join(name)
            stats = replica.routing_stats
            if self._stats.get(name) != stats:
                self._policy.reported(name, _report(stats), time.monotonic())
            self._stats[name] = stats
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Ray Serve's: a replica is gone, before the controller has said so."""
        super().on_replica_actor_died(replica_id)
        self._by_name.pop(replica_id.unique_id, None)
        self._forget(replica_id.unique_id)

    def _adapter(self, request: PendingRequest, first_argument: Any) -> str:
        name = request.metadata.multiplexed_model_id
        if not name and not isinstance(first_argument, Call):
            name = getattr(first_argument, "model", "")
        return name if isinstance(name, str) and name not in self._base_names else ""

    def _watch_end(self, request: PendingRequest, *, is_said: bool) -> None:
        """Release a request whose client leaves before a replica is found, or of whose end nothing `is_said`."""
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
