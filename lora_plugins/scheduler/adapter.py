"""Generations of adapters as the planner knows them: key, place, waiting and running requests, order of service."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from cachetools import LRUCache

from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.scheduler.request_queue import LAST, Order
from lora_plugins.scheduler.stats import FoundIn

_REMEMBERED = 10_000
_MOST_GONE = 64
_LATER_KEYS = 1 << 30  # above the ids that API servers give; batches hold them as int32
LONGEST_DRAIN_S = 60.0  # clients choose their requests' names: a name for all requests must not keep a slot for ever


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
        order: the request's place in vLLM's queue.
        client: the client's request that a beam or a choice is a part of; empty where vLLM divides nothing.
        is_bound: the request named this generation, so no earlier generation may answer.
        has_run: the request has run with this generation before: vLLM preempted the request, or a pause stopped it.
        runs_on: runs even while the adapter leaves: has run before, or is a part of a client's request that runs.
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
        wants_slot: take a slot if one is idle. needs_slot: the call ends only once the adapter is in a slot.
    """

    future: Future[None]
    order: Order
    wants_slot: bool = False
    needs_slot: bool = False


class RunningOn:
    """The group of an adapter's waiting requests that run even while the adapter leaves."""


@dataclass(eq=False, slots=True)
class Adapter:
    """One generation of an adapter.

    Attributes:
        key: the number by which workers know this generation.
        is_instant: whether an activation costs no copy.
        job: the number of the workers' present background job.
        slot: the number of its slot, from the activation's begin. is_active: whether the weights are in the slot.
        held: requests that wait in vLLM's queue, by id.
        stopped: requests that a pause has stopped, by id: they wait for its end, and for neither slot nor room.
        running: the running requests, by id.
        expected: clients' requests without a running part, whose next part is expected until a time.
        waits_since: since when vLLM passes over the first request for want of the adapter, or calls wait; None where
            the adapter runs requests.
        leaving_since: since when other clients' requests do not run, so that slot or room passes on.
        leaves_for: the priority of who waits for its place: requests of a better priority still run.
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
    _orders: list[tuple[Order, str]] = field(default_factory=list)

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
        while self._orders:
            order, request_id = self._orders[0]
            if (held := self.held.get(request_id)) is not None and held.order == order:
                break
            heappop(self._orders)
        first = self._orders[0][0] if self._orders else LAST
        return min(first, self.calls[0].order) if self.calls else first

    @property
    def best_priority(self) -> int:
        """The best priority of a running request; smaller is better, as in vLLM."""
        return min((run.priority for run in self.running.values()), default=0)

    @property
    def found(self) -> FoundIn:
        """How near the weights are now."""
        if self.is_active:
            return _SLOT
        return _HOST if self.residency is LOADED else _STORE

    def hold(self, request_id: str, held: Held) -> None:
        self.held[request_id] = held
        heappush(self._orders, (held.order, request_id))
        if len(self._orders) > 2 * len(self.held) + _MOST_GONE:  # nobody asks for the order while requests run
            self._orders = [(it.order, key) for key, it in self.held.items()]
            heapify(self._orders)

    def unhold(self, request_id: str) -> Held:
        return self.held.pop(request_id)


class Generations:
    """The key of each engine id's current generation: the engine id itself, until another generation begins.

    No key comes again. An id whose requests have moved to another id stands for the other's generation.
    """

    def __init__(self) -> None:
        self._numbers = count(_LATER_KEYS)
        # Bounded: every version that is ever served has an id.
        # In one cache, so that no key is remembered without its weights. By engine id:
        self._keys: LRUCache[int, tuple[int, int]] = LRUCache(_REMEMBERED)  # the key, and the key that brought weights
        self._engine_ids: LRUCache[int, int] = LRUCache(_REMEMBERED)  # by key
        self._successors: LRUCache[int, AdapterSpec] = LRUCache(_REMEMBERED)  # by engine ids whose requests have moved

    def begin(self, engine_id: int) -> None:
        """Begin another generation, under a key that batches have never seen."""
        key = next(self._numbers)
        self.restore(engine_id, key, key)
        self._successors.pop(engine_id, None)

    def restore(self, engine_id: int, key: int, weights_key: int) -> None:
        """Make an earlier generation the current one again, after an eviction and another load too."""
        self._keys[engine_id], self._engine_ids[key] = (key, weights_key), engine_id

    def key_of(self, engine_id: int) -> int:
        """The key of the current generation."""
        return int(self._keys.get(engine_id, (engine_id, engine_id))[0])

    def weights_key_of(self, engine_id: int) -> int:
        """The key of the generation that brought the weights of the current generation."""
        return int(self._keys.get(engine_id, (engine_id, engine_id))[1])

    def follow(self, engine_id: int, successor: AdapterSpec) -> None:
        """Have an engine id stand for another id's adapter from now on."""
        self._successors[engine_id] = successor

    def successor_of(self, engine_id: int) -> AdapterSpec | None:
        """The adapter that an engine id stands for; None where the id stands for its own."""
        successor = None
        while (following := self._successors.get(engine_id)) is not None:
            successor, engine_id = following, following.engine_id
        return successor

    def engine_id_of(self, key: int) -> int:
        """The engine id of a generation, current or not."""
        return int(self._engine_ids.get(key, key))


class WaitingOrder:
    """Waiting adapters in the order in which vLLM would run their first requests."""

    def __init__(self) -> None:
        self._entries: dict[Adapter, tuple[Order, int, Adapter]] = {}
        self._sorted: list[tuple[Order, int, Adapter]] = []  # order and key: equal for no two

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, adapter: Adapter) -> bool:
        return adapter in self._entries

    def __iter__(self) -> Iterator[Adapter]:
        return (entry[2] for entry in self._sorted)

    def keep(self, adapter: Adapter, *, is_in: bool) -> None:
        """Put an adapter where its present order says, or take it out."""
        known = self._entries.get(adapter)
        if known is None and not is_in:
            return
        entry = (adapter.order, adapter.key, adapter) if is_in else None
        if known is not None and known != entry:
            del self._entries[adapter], self._sorted[bisect_left(self._sorted, known)]
        if entry is not None and known != entry:
            self._entries[adapter] = entry
            if self._sorted and self._sorted[-1] > entry:
                insort(self._sorted, entry)
            else:
                self._sorted.append(entry)  # most adapters came last

    def count_before(self, adapter: Adapter) -> int:
        return bisect_left(self._sorted, (adapter.order, adapter.key))
