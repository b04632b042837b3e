"""One adapter as the planner knows it: where it is, who waits for it, and who runs with it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.scheduler.stats import Found


class Residency(StrEnum):
    """Whether the workers have an adapter in host memory."""

    ABSENT = "absent"
    LOADING = "loading"
    LOADED = "loaded"


@dataclass(eq=False, slots=True)
class Held:
    """A request that is not admitted yet; `request` is the scheduler's own object, of which nothing is read here."""

    request: Any
    arrived_at: float
    found: Found
    priority: int = 0


@dataclass(eq=False, slots=True)
class LoadCall:
    """A caller that waits for an adapter to be in host memory, or in a slot, without a request.

    Attributes:
        wants_slot: an idle slot is acquired, where there is one. needs_slot: it is done only once it is in a slot.
        is_urgent: the end of the load is enough, and is to be reported at once.
    """

    future: Future[None]
    wants_slot: bool = False
    needs_slot: bool = False
    is_urgent: bool = False


@dataclass(eq=False, slots=True)
class Adapter:
    """One version of an adapter.

    Attributes:
        is_instant: whether activating it costs no copy.
        job: the number of what the workers do for it in the background.
        slot: its own from the moment that it is asked for. is_active: whether the slot holds it.
        held, running: requests by id, not admitted and admitted. priorities: how many of the held ones have each.
        waits_since: since when it has held requests or calls, and nothing admitted.
        slice_began_at: when its time slice began, while it has requests that run.
        is_pinned: it keeps host memory and slot, whether it is asked for or not.
        is_retired: it is evicted once it is not used; then `retirements` are done.
        load_s: what loading it took the last time. rank: what the workers said; 0 before.
    """

    spec: AdapterSpec
    residency: Residency = Residency.ABSENT
    is_instant: bool = False
    job: int | None = None
    slot: int | None = None
    is_active: bool = False
    held: dict[str, Held] = field(default_factory=dict)
    priorities: dict[int, int] = field(default_factory=dict)
    running: dict[str, Any] = field(default_factory=dict)
    calls: list[LoadCall] = field(default_factory=list)
    waits_since: float | None = None
    slice_began_at: float = 0.0
    is_pinned: bool = False
    is_retired: bool = False
    retirements: list[Future[None]] = field(default_factory=list)
    load_s: float = 0.0
    rank: int = 0

    @property
    def engine_id(self) -> int:
        """VLLM's `lora_int_id`."""
        return self.spec.engine_id

    @property
    def is_activating(self) -> bool:
        """Whether its slot is being written."""
        return self.slot is not None and not self.is_active

    @property
    def is_wanted(self) -> bool:
        """Whether requests or calls wait for it."""
        return bool(self.held or self.calls)

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, and nothing uses it, waits for it, or moves it."""
        return self.can_be_displaced and not self.is_wanted

    @property
    def can_be_displaced(self) -> bool:
        """Whether it could lose slot or host memory: it waits, or nothing uses it."""
        return self.residency is Residency.LOADED and not self.running and not self.is_activating and not self.is_pinned

    @property
    def needs_slot(self) -> bool:
        """Whether it is loaded, and a call waits for its slot."""
        is_without = self.residency is Residency.LOADED and self.slot is None
        return is_without and any(call.needs_slot for call in self.calls)

    @property
    def since(self) -> float:
        """Since when it waits; 0 where it does not."""
        return self.waits_since or 0.0

    @property
    def priority(self) -> int:
        """The best of its held requests'."""
        return min(self.priorities, default=0)

    @property
    def found(self) -> Found:
        """Where it is now."""
        if self.is_active:
            return Found.SLOT
        return Found.HOST if self.residency is Residency.LOADED else Found.STORE

    def hold(self, request_id: str, held: Held) -> None:
        """A request waits for it."""
        self.held[request_id] = held
        self.priorities[held.priority] = self.priorities.get(held.priority, 0) + 1

    def release(self, request_id: str) -> Held | None:
        """A request waits for it no more; None where it did not."""
        held = self.held.pop(request_id, None)
        if held is not None:
            self.priorities[held.priority] -= 1
            if not self.priorities[held.priority]:
                del self.priorities[held.priority]
        return held

    def release_all(self) -> dict[str, Held]:
        """No request waits for it any more; those that did, the best priority first."""
        held, self.held = self.held, {}
        if len(self.priorities) > 1:
            held = dict(sorted(held.items(), key=lambda item: item[1].priority))
        self.priorities.clear()
        return held
