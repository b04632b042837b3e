"""What is loaded into the host cache, and when: for held requests, and for calls that ask for an adapter."""

from __future__ import annotations

from concurrent.futures import Future

from lora_plugins.scheduler.adapter import Adapter, Residency
from lora_plugins.scheduler.admission import Admission
from lora_plugins.scheduler.placement import MAX_LOADS, Placement
from lora_plugins.scheduler.waiting import WaitingOrder

_MOST_PASSED_OVER = 4


class Loading:
    """Adapters that are wanted and not in host memory, and calls.

    Attributes:
        absent: adapters that are wanted, and not in host memory. calling: those with calls.
    """

    def __init__(self, placement: Placement, admission: Admission) -> None:
        self.absent = WaitingOrder()
        self.calling: dict[int, Adapter] = {}
        self._placement = placement
        self._admission = admission

    def requeue(self, adapter: Adapter) -> None:
        """See that an adapter is in order if it is to be loaded, and only then."""
        if adapter.calls:
            self.calling[adapter.engine_id] = adapter
        else:
            self.calling.pop(adapter.engine_id, None)
        if adapter.residency is Residency.ABSENT and adapter.is_wanted:
            self.absent.put(adapter.engine_id, adapter.since, adapter.priority)
        else:
            self.absent.remove(adapter.engine_id)

    @property
    def waiting_count(self) -> int:
        """How many adapters wait for a slot, and are not ready yet."""
        loading = sum(bool(job.held) and job.residency is Residency.LOADING for job in self._placement.jobs.values())
        return len(self.absent) + loading + sum(adapter.needs_slot for adapter in self.calling.values())

    def load_wanted(self, *, is_paused: bool) -> None:
        """Have the workers load what is next in order, as far as there is room."""
        placement, passed_over, too_large = self._placement, set[int](), float("inf")
        first = placement.reserved_for
        if first is not None and first.engine_id not in self.absent:
            placement.end_reservation()
        elif first is not None and not is_paused and placement.may_load:
            passed_over.add(first.engine_id)  # before all others, who have to fit beside it
            self._load(first, is_paused=False)
        while self.absent and placement.may_load and len(passed_over) < _MOST_PASSED_OVER:
            engine_id = self.absent.first(passed_over)
            if is_paused:  # held requests wait for its end, calls do not
                engine_id = next((key for key in self.calling if key in self.absent and key not in passed_over), None)
            if engine_id is None:
                break
            adapter = placement.adapters[engine_id]
            if not adapter.calls and not self._runs_soon(adapter):
                break
            size_bytes = placement.size_bytes(adapter)
            if size_bytes < too_large and self._load(adapter, is_paused=is_paused):
                continue
            if placement.is_full:
                break
            passed_over.add(engine_id)
            if placement.reserved_for is not adapter:  # beside it, there may be room for smaller ones
                too_large = min(too_large, size_bytes)

    def answer_calls(self, *, is_paused: bool) -> list[tuple[Adapter, list[Future[None]]]]:
        """Activate what calls need; returns the adapters of which a call can be answered, with these calls' futures."""
        answered = []
        for adapter in self.calling.values():
            if adapter.residency is not Residency.LOADED:
                continue
            done = []
            for call in list(adapter.calls):
                if not adapter.is_active and not is_paused and (call.wants_slot or call.needs_slot):
                    is_coming = self._placement.activate(adapter, displaces=call.needs_slot)
                    if is_coming and not adapter.is_active:
                        continue
                if adapter.is_active or not call.needs_slot:
                    adapter.calls.remove(call)
                    done.append(call.future)
            answered.append((adapter, done))
        return answered

    def _load(self, adapter: Adapter, *, is_paused: bool) -> bool:
        may_take_slot = not is_paused and self._may_take_slot(adapter)
        if not self._placement.load(adapter, may_drain=not is_paused, may_take_slot=may_take_slot):
            return False
        self.absent.remove(adapter.engine_id)
        return True

    def _runs_soon(self, adapter: Adapter) -> bool:
        """Whether an adapter will run soon once it is loaded: one that is loaded too early evicts others for nothing.

        It does where too few wait in host memory to take all places next, or where few of these come before it.
        """
        on_their_way = sum(job.residency is Residency.LOADING for job in self._placement.jobs.values())
        before = self._admission.ready.count_before(adapter.engine_id, adapter.since, adapter.priority)
        return before < self._admission.max_running + MAX_LOADS - on_their_way

    def _may_take_slot(self, adapter: Adapter) -> bool:
        """Whether an adapter that is about to be loaded gets a slot now: a spare one that no other could use."""
        spare = self._placement.slot_count - self._admission.max_running
        if self._admission.ready or self._placement.loading_slots >= spare:
            return False
        return bool(adapter.held) or any(call.wants_slot or call.needs_slot for call in adapter.calls)
