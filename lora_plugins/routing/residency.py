"""Which replica has which adapter: by replicas' reports, and by this router's requests since.

Runs in each router, for `affinity.py`. In go reports, each some seconds old, and this router's requests and their ends;
out come the replicas that have or load an adapter, and the replicas with room for one more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

# Seconds, longer than the time between two reports: an older report must not undo a request's effect.
GRACE_S = 15.0
# Adapters in a host cache, until a replica reports its own capacity.
UNKNOWN_CAPACITY = 64


class Tier(IntEnum):
    """Where a replica has an adapter; the lower, the sooner the first token.

    `LOADING`: a request for the adapter went to the replica, without an answer or a report since.
    """

    SLOT = 0
    HOST = 1
    LOADING = 2
    STORE = 3


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's report about itself.

    Attributes:
        adapters: the tier of each adapter; a missing name is on no tier.
        capacity: how many adapters the host cache takes; None where unknown.
        requests: the requests in flight from all routers, held requests included; None where unknown.
    """

    adapters: Mapping[str, Tier]
    capacity: int | None = None
    requests: int | None = None


@dataclass(slots=True)
class _Replica:
    """A replica's state.

    Attributes:
        used: adapters in memory or on the way, the least recently used first.
        sent_s: when this router last sent a request of an adapter.
        stored: adapters whose files the replica has, and which are not in memory.
    """

    capacity: int = UNKNOWN_CAPACITY
    used: OrderedDict[str, Tier] = field(default_factory=OrderedDict)
    sent_s: dict[str, float] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)


class Residency:
    """The replicas and the tier of each adapter.

    Between two reports a request changes `Residency` as the request changes the replica: the request's adapter comes
    into memory, and in a full memory the least recently used adapter leaves. An adapter of a request less than
    `GRACE_S` ago stays, even where a report lacks the adapter: the report may be older.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._where: dict[str, dict[str, Tier]] = {}
        self._stored: dict[str, set[str]] = {}

    def join(self, replica: str) -> None:
        self._replicas.setdefault(replica, _Replica())

    def leave(self, replica: str) -> None:
        """Forget a replica and its adapters."""
        state = self._replicas.pop(replica)
        for adapter in list(state.used):
            self._forget(adapter, replica, state)
        self._set_stored(replica, state, set())

    def of(self, adapter: str) -> Mapping[str, Tier]:
        """Return the replicas that have or load an adapter in memory, and the tiers."""
        return self._where.get(adapter, {})

    def stored(self, adapter: str) -> Collection[str]:
        """Return the replicas that have reported an adapter's files."""
        return self._stored.get(adapter, set())

    def has_room(self, replica: str) -> bool:
        """Whether another adapter fits into a replica's memory without an eviction."""
        state = self._replicas[replica]
        return len(state.used) < state.capacity

    def routed(self, adapter: str, replica: str, now_s: float) -> None:
        """Note a request for an adapter: unless the replica has the adapter in memory, the replica now loads it."""
        state = self._replicas[replica]
        state.sent_s[adapter] = now_s
        if adapter in state.used:
            state.used.move_to_end(adapter)
            return
        self._put(adapter, replica, state, Tier.LOADING)
        # The replica's own cache evicts in the same order, so the forecast mostly holds until the next report.
        while len(state.used) > state.capacity:
            self._forget(next(iter(state.used)), replica, state)

    def completed(self, adapter: str, replica: str) -> None:
        """Note the end of a request: an adapter that was loading is loaded, or the next report corrects the note."""
        state = self._replicas.get(replica)
        if state is not None and state.used.get(adapter) is Tier.LOADING:
            state.used[adapter] = self._where[adapter][replica] = Tier.HOST

    def reported(self, replica: str, report: Report, now_s: float) -> None:
        """Believe a replica's report."""
        state = self._replicas.get(replica)
        if state is None:
            return
        if report.capacity is not None:
            # At least 1: `routed` would otherwise forget the adapter that it has just noted.
            state.capacity = max(1, report.capacity)
        in_memory = {name: tier for name, tier in report.adapters.items() if tier <= Tier.HOST}
        self._set_stored(replica, state, {name for name, tier in report.adapters.items() if tier is Tier.STORE})
        for name in [name for name in state.used if name not in in_memory]:
            if now_s - state.sent_s.get(name, float("-inf")) >= GRACE_S:
                self._forget(name, replica, state)
        for name, tier in in_memory.items():
            self._put(name, replica, state, tier)

    def _set_stored(self, replica: str, state: _Replica, stored: set[str]) -> None:
        for name in stored - state.stored:
            self._stored.setdefault(name, set()).add(replica)
        for name in state.stored - stored:
            self._stored[name].discard(replica)
            if not self._stored[name]:
                del self._stored[name]
        state.stored = stored

    def _put(self, adapter: str, replica: str, state: _Replica, tier: Tier) -> None:
        state.used[adapter] = tier
        self._where.setdefault(adapter, {})[replica] = tier

    def _forget(self, adapter: str, replica: str, state: _Replica) -> None:
        del state.used[adapter]
        state.sent_s.pop(adapter, None)
        where = self._where[adapter]
        del where[replica]
        if not where:
            del self._where[adapter]
