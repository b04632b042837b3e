"""Which requests may run: held until their adapter is in a slot, then admitted, adapters in a fair order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from lora_plugins.scheduler.adapter import Adapter, Held, Residency
from lora_plugins.scheduler.placement import Placement
from lora_plugins.scheduler.stats import Stats
from lora_plugins.scheduler.waiting import WaitingOrder


class Admission:
    """Requests that are held, and those that are in flight.

    Args:
        max_running: adapters that may have admitted requests at once.
        time_slice_s: how long an adapter takes further requests while others wait for its slot.

    Attributes:
        held_count: requests that are not admitted yet. held_by_name: how many for each adapter name.
        in_flight: adapters with admitted requests.
        ready: adapters that are loaded, with held requests, nothing admitted, and not pinned.
    """

    def __init__(self, placement: Placement, stats: Stats, max_running: int, time_slice_s: float) -> None:
        self.max_running = max_running
        self.held_count = 0
        self.held_by_name: Counter[str] = Counter()
        self.in_flight: dict[int, Adapter] = {}
        self.ready = WaitingOrder()
        self._placement = placement
        self._stats = stats
        self._time_slice_s = time_slice_s
        self._of_request: dict[str, Adapter] = {}
        self._admitted: list[Any] = []

    # --- requests ---

    def is_held(self, request_id: str) -> bool:
        """Whether a request is here and not admitted yet."""
        adapter = self._of_request.get(request_id)
        return adapter is not None and request_id in adapter.held

    def hold(self, adapter: Adapter, request_id: str, held: Held) -> None:
        """A request waits for an adapter."""
        adapter.hold(request_id, held)
        self._of_request[request_id] = adapter
        self._count_held(adapter, 1)

    def cancel(self, request_ids: Iterable[str] | None) -> list[tuple[Adapter, Held]]:
        """Forget held requests, of these ids or all, and return them."""
        if not self.held_count:
            return []
        cancelled = []
        for request_id in list(self._of_request) if request_ids is None else request_ids:
            adapter = self._of_request.get(request_id)
            held = None if adapter is None else adapter.release(request_id)
            if adapter is not None and held is not None:
                del self._of_request[request_id]
                self._count_held(adapter, -1)
                cancelled.append((adapter, held))
        return cancelled

    def cancel_all_of(self, adapter: Adapter) -> list[Any]:
        """Forget all requests that are held for an adapter, and return them."""
        self._count_held(adapter, -len(adapter.held))
        cancelled = adapter.release_all()
        for request_id in cancelled:
            del self._of_request[request_id]
        return [held.request for held in cancelled.values()]

    def finished(self, request_ids: Iterable[str]) -> list[Adapter]:
        """Admitted requests have finished, others are left alone; returns the adapters that none is left of."""
        unused = []
        for request_id in request_ids:
            adapter = self._of_request.get(request_id)
            if adapter is None or request_id not in adapter.running:
                continue
            del self._of_request[request_id]
            del adapter.running[request_id]
            if not adapter.running:
                del self.in_flight[adapter.engine_id]
                unused.append(adapter)
        return unused

    def _count_held(self, adapter: Adapter, more: int) -> None:
        self.held_count += more
        self.held_by_name[adapter.spec.name] += more
        if not self.held_by_name[adapter.spec.name]:
            del self.held_by_name[adapter.spec.name]

    # --- the plan ---

    def requeue(self, adapter: Adapter) -> None:
        """See that an adapter is in order if it is ready, and only then."""
        is_loaded = adapter.residency is Residency.LOADED
        if is_loaded and adapter.held and not adapter.running and not adapter.is_pinned:
            self.ready.put(adapter.engine_id, adapter.since, adapter.priority)
        else:
            self.ready.remove(adapter.engine_id)

    def admit(self, now: float, others_waiting: int) -> list[Any]:
        """Give slots to those that are next, and return the requests that run from now on.

        `others_waiting`: adapters that wait and are not ready yet.
        """
        for adapter in self._placement.pinned.values():
            if adapter.held and adapter.is_active and (adapter.running or len(self.in_flight) < self.max_running):
                self._admit_held(adapter, now)
        self._begin_in_order(now)
        is_contended = len(self.ready) + others_waiting > self._free_places
        for adapter in list(self.in_flight.values()):
            if not is_contended and adapter.engine_id not in self._placement.draining:
                adapter.slice_began_at = now
            if adapter.held and (adapter.is_pinned or now - adapter.slice_began_at < self._time_slice_s):
                self._admit_held(adapter, now)
        admitted, self._admitted = self._admitted, []
        return admitted

    def activate_ahead(self) -> None:
        """Write idle slots for those that run next, where writing costs a copy."""
        ahead = set(self._placement.draining)
        while (engine_id := self.ready.first(ahead)) is not None:
            adapter = self._placement.adapters[engine_id]
            if adapter.is_instant or not self._placement.activate(adapter):
                return
            ahead.add(engine_id)

    def _begin_in_order(self, now: float) -> None:
        """Begin with who is next, as far as slots can be had."""
        places = self._free_places
        passed_over = set(self._placement.draining)  # and those whose slots are being written
        while places > 0 and (engine_id := self.ready.first(passed_over)) is not None:
            adapter = self._placement.adapters[engine_id]
            if not self._placement.activate(adapter, displaces=True):
                break  # every slot is used or being written
            if adapter.is_active:
                self.ready.remove(engine_id)
                self._admit_held(adapter, now)
            else:
                passed_over.add(engine_id)
            places -= 1  # for one whose slot is being written too: it is next

    @property
    def _free_places(self) -> int:
        """How many more unpinned adapters may run."""
        unpinned = sum(not adapter.is_pinned for adapter in self.in_flight.values())
        pinned = len(self._placement.pinned)
        return min(self.max_running - len(self.in_flight), self.max_running - pinned - unpinned)

    def _admit_held(self, adapter: Adapter, now: float) -> None:
        if not adapter.running:
            adapter.slice_began_at, adapter.waits_since = now, None
            self.in_flight[adapter.engine_id] = adapter
        self._count_held(adapter, -len(adapter.held))
        for request_id, held in adapter.release_all().items():
            adapter.running[request_id] = held.request
            self._admitted.append(held.request)
            self._stats.wait_seconds[held.found].observe(now - held.arrived_at)
        self._placement.used(adapter)
