"""Ray Serve's request router with our policy: each request goes where its adapter is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from lora_plugins.routing.affinity import AffinityPolicy, Limits
from lora_plugins.routing.residency import Report, Tier

BUSY_REQUESTS = 16


class AdapterAffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes are Any here
    """Routes by the adapter, which a request has as `multiplexed_model_id`; without one, by load.

    Replicas are known by what `record_routing_stats` says of them (`lora_plugins.ray.replica`). A request counts from
    the moment that a replica is chosen for it, so that those that come at once do not all choose the same.
    """

    def initialize_state(
        self, busy_requests: int = BUSY_REQUESTS, overload: float = 1.25, cool_down_s: float = 60.0
    ) -> None:
        """Ray Serve's: from `request_router_kwargs`."""
        limits = Limits(max(1, busy_requests * 3 // 4), busy_requests, overload, cool_down_s)
        self._policy = AffinityPolicy(limits)
        self._by_name: dict[str, RunningReplica] = {}
        self._stats: dict[str, Any] = {}
        self._counted: dict[str, tuple[str, str]] = {}  # request id → its adapter and the replica that it counts for
        self._tried: dict[str, set[str]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ray Serve's: replicas in the order in which they are to be tried."""
        if pending_request is None:
            return [candidate_replicas]
        now_s = time.monotonic()
        request_id = pending_request.metadata.internal_request_id
        adapter = pending_request.metadata.multiplexed_model_id
        self._release(request_id, now_s)
        failed = set(_excluded(pending_request))
        # Asked again for one request: those that were named before are full.
        tried = self._tried.setdefault(request_id, set())
        names: Sequence[str] = ()
        for excluded in (failed | tried, failed, set[str]()):
            if names := self._policy.ranked(adapter, now_s, excluded):
                break
            tried.clear()
        if not names:
            return [candidate_replicas]
        tried.add(names[0])
        self._count(request_id, adapter, names[0], now_s)
        if len(tried) == 1:
            pending_request.future.add_done_callback(lambda future: self._decided(request_id, future))
        pending_request.routing_context.should_backoff = True
        return [[self._by_name[name]] for name in names if name in self._by_name]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """Ray Serve's: a replica has taken a request; it may be another than the first."""
        now_s = time.monotonic()
        request_id = pending_request.metadata.internal_request_id
        counted = self._counted.get(request_id)
        if counted is not None and counted[1] != replica_id.unique_id:
            self._release(request_id, now_s)
            self._count(request_id, pending_request.metadata.multiplexed_model_id, replica_id.unique_id, now_s)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray Serve's: a request has ended at a replica, or was not taken there."""
        counted = self._counted.get(internal_request_id)
        if counted is not None and counted[1] == replica_id.unique_id:
            self._release(internal_request_id, time.monotonic())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray Serve's: these are the replicas now, with what they say of themselves."""
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in self._stats.keys() - self._by_name.keys():
            del self._stats[name]
            self._policy.leave(name)
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
        name = replica_id.unique_id
        self._by_name.pop(name, None)
        self._stats.pop(name, None)
        self._policy.leave(name)

    def _count(self, request_id: str, adapter: str, name: str, now_s: float) -> None:
        self._counted[request_id] = adapter, name
        self._policy.routed(adapter, name, now_s)

    def _release(self, request_id: str, now_s: float) -> None:
        counted = self._counted.pop(request_id, None)
        if counted is not None:
            self._policy.completed(*counted, now_s)

    def _decided(self, request_id: str, future: asyncio.Future[Any]) -> None:
        """A replica was found for a request, or its client has gone before."""
        self._tried.pop(request_id, None)
        if future.cancelled():
            self._release(request_id, time.monotonic())


def _excluded(request: PendingRequest) -> Sequence[str]:
    """Replicas that failed at this request; the ingress writes them into the call."""
    call = request.args[0] if request.args else None
    return getattr(call, "excluded", ())


def _report(stats: dict[str, Any]) -> Report:
    adapters = {name: Tier(tier) for name, tier in stats.get("adapters", {}).items()}
    return Report(adapters, stats.get("capacity"), stats.get("requests"))
