"""One generation of an adapter as the planner knows it: where its weights are, which requests wait and run.

Lives in the engine core process, in the planner's state, from the first request or call until nobody needs the
generation and the workers have evicted the generation. `state.py` sets the fields, and has the words. The properties
follow from the fields.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.scheduler.ranking import Ranking
from lora_plugins.scheduler.request_queue import LAST, Order
from lora_plugins.scheduler.stats import FoundIn

# After this time a leaving adapter takes no parts. Clients choose the names of their requests: a client that gives all
# requests one name must not keep a slot for ever.
LONGEST_DRAIN_S = 60.0


class HostState(StrEnum):
    """Whether the workers have an adapter in host memory."""

    ABSENT = "absent"
    LOADING = "loading"
    LOADED = "loaded"


ABSENT, LOADING, LOADED = HostState  # the members as globals: an attribute of the enum takes 15 times as long to find
_SLOT, _HOST, _STORE = FoundIn


@dataclass(eq=False, slots=True)
class Held:
    """A request that waits in vLLM's queue.

    Attributes:
        request: the scheduler's own object; the planner reads none of its attributes.
        arrived_at: since when the request waits; after a pause, since the pause's end.
        found: where the weights were when the request arrived.
        order: the request's place in vLLM's queue.
        client: the name of the client's request that this request, a beam or a choice, is a part of; empty where
            vLLM divides nothing.
        is_bound: the request named this generation, so no earlier generation may answer.
        has_run: the request has run with this generation before: vLLM preempted the request, or a pause stopped it.
        runs_on: runs even while the adapter leaves: has run before, is a part of a client's request that runs, or has a
            better priority than the request that the adapter leaves for.
    """

    request: Any
    arrived_at: float
    found: FoundIn
    order: Order
    client: str = ""
    is_bound: bool = False
    has_run: bool = False
    runs_on: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A request that runs: since when, as a part of which client's request, and its vLLM priority."""

    began_at: float
    client: str
    priority: int


@dataclass(eq=False, slots=True)
class LoadCall:
    """A caller that waits for an adapter to be in host memory, or in a slot, without a request.

    Attributes:
        order: the call's place among waiting requests.
        wants_slot: take a slot if a slot is idle. needs_slot: the call ends only once the adapter is in a slot.
    """

    future: Future[None]
    order: Order
    wants_slot: bool = False
    needs_slot: bool = False


class RunningOn:
    """The group, in vLLM's queue, of an adapter's waiting requests that run even while the adapter leaves."""


@dataclass(eq=False, slots=True)
class Adapter:
    """One generation of an adapter.

    Attributes:
        spec: name, engine id and path. key: the number by which workers and batches know this generation.
        is_instant: whether an activation costs no copy.
        job: the number of the workers' present background job; None without.
        slot: the number of its slot, from the activation's begin; None without. is_active: whether the weights are in
            the slot, too.
        held: requests that wait in vLLM's queue, by id.
        stopped: requests that a pause has stopped, by id: they wait for its end, and for neither slot nor room.
        running: the running requests, by id.
        expected: by a client's request without a running part, the time until which its next part is expected.
        calls: callers that wait without a request.
        waits_since: since when vLLM passes over the first request for want of the adapter, or calls wait; None where
            the adapter runs requests.
        leaving_since: since when other clients' requests do not run, so that slot or room passes on; None: all requests
            run.
        leaves_for: the priority of the request that waits for its place: requests of a better priority still run.
        takes_parts: whether parts of clients' running requests run while the adapter leaves.
        running_on: the group of held requests that run even while the adapter leaves.
        is_pinned: keeps host memory and slot without any request.
        is_retired: evicted once unused; the eviction answers `retirements`.
        replaces: the generation before: goes once this generation is loaded, and is current again if the load fails.
        moves: whether requests that run with `replaces` go on with this generation's weights.
        weights_key: the key of the generation that brought the weights; after a move, another than `key`.
        load_s: the duration of the last load. rank: as workers report it; 0 before.
    """

    spec: AdapterSpec
    key: int
    residency: HostState = ABSENT
    is_instant: bool = False
    job: int | None = None
    slot: int | None = None
    is_active: bool = False
    held: dict[str, Held] = field(default_factory=dict)
    stopped: dict[str, Held] = field(default_factory=dict)
    running: dict[str, Run] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)
    calls: list[LoadCall] = field(default_factory=list)
    waits_since: float | None = None
    leaving_since: float | None = None
    leaves_for: int = 0
    takes_parts: bool = True
    running_on: RunningOn = field(default_factory=RunningOn)
    is_pinned: bool = False
    is_retired: bool = False
    replaces: Adapter | None = None
    moves: bool = False
    weights_key: int = 0
    retirements: list[Future[None]] = field(default_factory=list)
    load_s: float = 0.0
    rank: int = 0
    _orders: Ranking[str] = field(default_factory=Ranking)  # the places of held requests

    @property
    def is_loaded(self) -> bool:
        """Whether the workers have the weights in host memory."""
        return self.residency is LOADED

    @property
    def is_activating(self) -> bool:
        """Whether the workers write the slot now."""
        return self.slot is not None and not self.is_active

    @property
    def is_in_flight(self) -> bool:
        """Whether requests run, or the next part of a client's request is expected."""
        return bool(self.running or self.expected)

    @property
    def goes_on(self) -> bool:
        """Whether requests run, or have run before and wait."""
        return self.is_in_flight or any(held.has_run for held in self.held.values())

    @property
    def clients(self) -> set[str]:
        """The clients' requests with a running or an expected part."""
        # The empty name stands for requests that vLLM does not divide.
        return (self.expected.keys() | {run.client for run in self.running.values()}) - {""}

    @property
    def is_wanted(self) -> bool:
        return bool(self.held or self.calls)

    @property
    def is_unevictable(self) -> bool:
        """Whether the adapter must stay in host memory: pinned, or not retired and without files to load again."""
        return self.is_pinned or (self.spec.given > 0 and not self.is_retired)

    @property
    def is_used(self) -> bool:
        return self.is_in_flight or self.is_wanted or self.is_activating

    @property
    def can_be_displaced(self) -> bool:
        """Whether slot or host memory may be taken: requests wait at most, and none runs."""
        return self.is_loaded and not self.is_in_flight and not self.is_activating and not self.is_pinned

    @property
    def needs_slot(self) -> bool:
        """Whether a call waits for a slot, and only the slot is missing."""
        return self.is_loaded and self.slot is None and any(call.needs_slot for call in self.calls)

    @property
    def order(self) -> Order:
        """The place among waiting adapters: the place of the first waiting request, or of the first call."""
        first = entry[0] if (entry := self._orders.first()) is not None else LAST
        return min(first, self.calls[0].order) if self.calls else first

    @property
    def best_priority(self) -> int:
        """The best priority of a running request, 0 where none runs; smaller is better, as in vLLM."""
        return min((run.priority for run in self.running.values()), default=0)

    @property
    def found(self) -> FoundIn:
        """How near the weights are now."""
        if self.is_active:
            return _SLOT
        return _HOST if self.residency is LOADED else _STORE

    def hold(self, request_id: str, held: Held) -> None:
        self.held[request_id] = held
        self._orders.put(request_id, held.order)

    def unhold(self, request_id: str) -> Held:
        self._orders.remove(request_id)
        return self.held.pop(request_id)
