"""One generation of an adapter as the planner knows it: where it is, who waits for it, and who runs with it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.scheduler.stats import FoundIn

NOWHERE = (False,) * 7
LONGEST_LEAVE_S = 60.0  # clients choose what their requests are called: one name for all must not keep a slot for ever


class HostState(StrEnum):
    """Whether the workers have an adapter in host memory."""

    ABSENT = "absent"
    LOADING = "loading"
    LOADED = "loaded"


ABSENT, LOADING, LOADED = HostState  # as an attribute of its class a member takes 15 times as long to find
_SLOT, _HOST, _STORE = FoundIn


@dataclass(eq=False, slots=True)
class Held:
    """A request that is not admitted yet; `request` is the scheduler's own object, of which nothing is read here.

    `client`: the client's request that it is part of, as beams are; empty where it is all of it. `is_bound`: it named
    this generation, and no earlier one may answer it.
    """

    request: Any
    arrived_at: float
    found: FoundIn
    priority: int = 0
    client: str = ""
    is_bound: bool = False


@dataclass(eq=False, slots=True)
class LoadCall:
    """A caller that waits for an adapter to be in host memory, or in a slot, without a request.

    Attributes:
        wants_slot: an idle slot is acquired, where there is one. needs_slot: it is done only once it is in a slot.
    """

    future: Future[None]
    wants_slot: bool = False
    needs_slot: bool = False


@dataclass(eq=False, slots=True)
class Adapter:
    """One generation of an adapter.

    Attributes:
        key: what workers know it by.
        is_instant: whether activating it costs no copy.
        job: the number of what the workers do for it in the background.
        slot: its own from the moment that it is asked for. is_active: whether the slot holds it.
        held: requests by id that are not admitted. priorities: how many of them have each.
        running: when requests were admitted, and of which client's request they are part, by id.
        expected: until when more of a client's request is expected, of which nothing runs at the moment.
        waits_since: since when it has held requests or calls, and nothing admitted.
        leaves_since: since when it takes no requests of other clients, so that its slot or room passes on.
        is_pinned: it keeps host memory and slot, whether it is asked for or not.
        is_retired: it is evicted once it is not used; then `retirements` are done.
        replaces: the generation whose place it takes once it is loaded, and which has that again if it cannot be.
        moves: whether what runs with that one goes on with this one's weights. weights: the key of the generation that
            its weights were loaded as.
        load_s: what loading it took the last time. rank: what the workers said; 0 before.
        waits_in, kept_in: in which of the planner's orders and collections it is (`PlannerState.settle`).
    """

    spec: AdapterSpec
    key: int
    residency: HostState = ABSENT
    is_instant: bool = False
    job: int | None = None
    slot: int | None = None
    is_active: bool = False
    held: dict[str, Held] = field(default_factory=dict)
    priorities: dict[int, int] = field(default_factory=dict)
    running: dict[str, tuple[float, str]] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)
    calls: list[LoadCall] = field(default_factory=list)
    waits_since: float | None = None
    leaves_since: float | None = None
    is_pinned: bool = False
    is_retired: bool = False
    replaces: Adapter | None = None
    moves: bool = False
    weights: int = 0
    retirements: list[Future[None]] = field(default_factory=list)
    load_s: float = 0.0
    rank: int = 0
    waits_in: tuple[bool, bool] = (False, False)
    kept_in: tuple[bool, ...] = NOWHERE

    @property
    def is_loaded(self) -> bool:
        """Whether the workers have it in host memory."""
        return self.residency is LOADED

    @property
    def is_activating(self) -> bool:
        """Whether its slot is being written."""
        return self.slot is not None and not self.is_active

    @property
    def is_in_flight(self) -> bool:
        """Whether requests run with it, or the next part of one is expected."""
        return bool(self.running or self.expected)

    @property
    def is_wanted(self) -> bool:
        """Whether requests or calls wait for it."""
        return bool(self.held or self.calls)

    @property
    def stays(self) -> bool:
        """Whether it keeps its host memory: pinned, or nobody could load it again."""
        return self.is_pinned or (self.spec.given > 0 and not self.is_retired)

    @property
    def is_idle(self) -> bool:
        """Whether it could lose its host memory: it is loaded, and nothing uses it, waits for it, or moves it."""
        return self.is_loaded and not self.is_used and not self.stays and self.replaces is None

    @property
    def is_used(self) -> bool:
        """Whether something runs with it, waits for it, or moves it."""
        return self.is_in_flight or self.is_wanted or self.is_activating

    @property
    def can_be_displaced(self) -> bool:
        """Whether it could lose slot or host memory: it waits, or nothing uses it."""
        return self.is_loaded and not self.is_in_flight and not self.is_activating and not self.is_pinned

    @property
    def needs_slot(self) -> bool:
        """Whether it is loaded, and a call waits for its slot."""
        return self.is_loaded and self.slot is None and any(call.needs_slot for call in self.calls)

    @property
    def order(self) -> tuple[int, float]:
        """Its place among those that wait: the best priority of its requests, then since when it waits."""
        return min(self.priorities) if self.priorities else 0, self.waits_since or 0.0

    @property
    def found(self) -> FoundIn:
        """Where it is now."""
        if self.is_active:
            return _SLOT
        return _HOST if self.residency is LOADED else _STORE

    def hold(self, request_id: str, held: Held) -> None:
        """A request waits for it."""
        self.held[request_id] = held
        self.priorities[held.priority] = self.priorities.get(held.priority, 0) + 1

    def unhold(self, request_ids: Iterable[str]) -> None:
        """Requests wait for it no more."""
        for request_id in request_ids:
            held = self.held.pop(request_id)
            self.priorities[held.priority] -= 1
            if not self.priorities[held.priority]:
                del self.priorities[held.priority]

    def joining(self, now: float) -> list[tuple[str, Held]]:
        """The held requests that may run: any, until it leaves; then parts of what runs, for a while."""
        if self.leaves_since is None:
            return list(self.held.items())
        if now - self.leaves_since > LONGEST_LEAVE_S:
            return []
        clients = (self.expected.keys() | {client for _, client in self.running.values()}) - {""}
        return [item for item in self.held.items() if item[1].client in clients] if clients else []
