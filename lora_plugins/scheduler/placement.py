"""Moving adapters between disk, host cache and slots: who is evicted for whom, and the commands that do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from lora_plugins.errors import LoRAPluginsError, NoFreeSlot, OutOfMemory
from lora_plugins.scheduler.adapter import Adapter, Residency
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import Activate, Command, Evict, Load
from lora_plugins.scheduler.stats import Stats

MAX_LOADS = 4


class Placement:
    """What is in which slot and in the host cache, as it will be once the commands have been carried out.

    Args:
        evicted: called with each adapter that leaves the host cache.

    Attributes:
        adapters: all that are known, by engine id. pinned: those that are pinned.
        in_slots: those that have a slot, least recently used first.
        idle: those that are loaded, and that nothing uses or waits for.
        jobs: adapters that are being loaded, or activated in the background.
        expects_copy: whether activating the adapter that was loaded last costs a copy.
        reserved_for: the adapter that room is made for. draining: those that are evicted for it once they are not used:
            they do not begin again, and what runs takes further requests for the rest of its time slice only.
    """

    def __init__(self, slots: int, cache: HostCache, stats: Stats, evicted: Callable[[Adapter], None]) -> None:
        self.slot_count = slots
        self.in_slots: dict[int, Adapter] = {}
        self._free_slots = list(range(slots - 1, -1, -1))
        self.cache = cache
        self.adapters: dict[int, Adapter] = {}
        self.pinned: dict[int, Adapter] = {}
        self.idle: set[int] = set()
        self.jobs: dict[int, Adapter] = {}
        self.expects_copy = True
        self.draining: set[int] = set()
        self.reserved_for: Adapter | None = None
        self.commands: list[Command] = []
        self._stats = stats
        self._evicted = evicted
        self._numbers = count(1)

    @property
    def may_load(self) -> bool:
        """Whether the workers have time to load one more; activations are not held up by loads."""
        return sum(job.residency is Residency.LOADING for job in self.jobs.values()) < MAX_LOADS

    @property
    def is_full(self) -> bool:
        """Whether there is no place in the host cache, nor an idle adapter that could be evicted."""
        return not self.idle and not self.cache.fits_without(0, 1, 0, 0)

    @property
    def loading_slots(self) -> int:
        """How many slots wait for an adapter that is being loaded."""
        return sum(job.residency is Residency.LOADING and job.slot is not None for job in self.jobs.values())

    def note_use(self, adapter: Adapter) -> None:
        """Note whether an adapter is idle, after anything about it has changed."""
        if adapter.is_idle:
            self.idle.add(adapter.engine_id)
        else:
            self.idle.discard(adapter.engine_id)

    def used(self, adapter: Adapter) -> None:
        """Requests begin to use an adapter, or further ones do."""
        self.note_use(adapter)
        self.in_slots[adapter.engine_id] = self.in_slots.pop(adapter.engine_id)
        self.cache.used(adapter.engine_id)

    def _job(self, adapter: Adapter) -> int:
        adapter.job = next(self._numbers)
        self.jobs[adapter.job] = adapter
        return adapter.job

    def job_done(self, adapter: Adapter) -> None:
        """The workers have nothing more to do for it."""
        if adapter.job is not None:
            del self.jobs[adapter.job]
            adapter.job = None

    # --- slots ---

    def activate(self, adapter: Adapter, *, displaces: bool = False) -> bool:
        """See that a loaded adapter has a slot, at once or once it is written; False where it cannot have one now."""
        if adapter.slot is not None:
            return True
        if adapter.residency is not Residency.LOADED or not self._free_slot(displaces=displaces):
            return False
        slot = self._acquire_slot(adapter)
        adapter.is_active = adapter.is_instant
        self.note_use(adapter)
        job = None if adapter.is_instant else self._job(adapter)
        self._stats.instant_activations += adapter.is_instant
        self.commands.append(Activate(adapter.engine_id, slot, job))
        return True

    def _free_slot(self, *, displaces: bool = False) -> bool:
        """See that a slot is free: the least recently used of the idle ones becomes free.

        Where there is none, the one that came last of those that wait loses its slot, if it may be displaced.
        """
        if self._free_slots:
            return True
        victim = next((owner for owner in self.in_slots.values() if owner.is_idle), None)
        if victim is None and displaces:
            waiting = (owner for owner in self.in_slots.values() if owner.can_be_displaced)
            victim = max(waiting, key=lambda owner: (owner.priority, owner.since), default=None)
        if victim is None:
            return False
        self._release_slot(victim)
        self._stats.slot_evictions += 1
        return True

    def _acquire_slot(self, adapter: Adapter) -> int:
        self.in_slots[adapter.engine_id] = adapter
        adapter.slot = slot = self._free_slots.pop()
        return slot

    def _release_slot(self, adapter: Adapter) -> None:
        if adapter.slot is not None:
            self._free_slots.append(adapter.slot)
            del self.in_slots[adapter.engine_id]
        adapter.slot, adapter.is_active = None, False

    # --- the host cache ---

    def size_bytes(self, adapter: Adapter) -> int:
        """What an adapter will take of the host cache, as far as is known."""
        return self.cache.expected_bytes(adapter.spec.path, adapter.spec.size_bytes)

    def never_fits(self, adapter: Adapter) -> LoRAPluginsError | None:
        """Why an adapter can have no place for as long as others are pinned; None where it can."""
        size_bytes, cache = self.size_bytes(adapter), self.cache
        if cache.max_bytes is not None and size_bytes > cache.max_bytes:
            return OutOfMemory(
                f"an adapter of {size_bytes} bytes in host memory",
                expected=f"at most {cache.max_bytes}",
                remedy="raise LORA_PLUGINS_HOST_MAX_BYTES",
                adapter=adapter.spec.name,
            )
        pinned = [other for other in self.pinned.values() if other is not adapter]
        pinned_bytes = sum(self.size_bytes(other) for other in pinned)
        is_too_large = cache.max_bytes is not None and pinned_bytes + size_bytes > cache.max_bytes
        if not is_too_large and len(pinned) < cache.max_adapters:
            return None
        return NoFreeSlot(
            f"{len(pinned)} pinned adapters with {pinned_bytes} bytes in host memory",
            expected=f"room for {size_bytes} more in {cache.max_bytes}" if is_too_large else "room for one more",
            remedy="unpin an adapter, or raise LORA_PLUGINS_HOST_MAX_BYTES or --max-cpu-loras",
            adapter=adapter.spec.name,
        )

    def load(self, adapter: Adapter, *, may_drain: bool, may_take_slot: bool) -> bool:
        """Have an adapter loaded, and activated at once where a slot is idle; False where there is no room for it.

        `may_drain`: room is made for it, then, by adapters that are in use.
        """
        if not self._make_room(adapter, may_drain=may_drain):
            return False
        self.cache.reserve(adapter.engine_id, self.size_bytes(adapter))
        adapter.residency = Residency.LOADING
        if self.reserved_for is adapter:
            self.end_reservation()
        if may_take_slot and self.expects_copy and self._free_slot():
            self._acquire_slot(adapter)
        self.commands.append(Load(adapter.spec, self._job(adapter), adapter.slot))
        return True

    def loaded(self, adapter: Adapter, size_bytes: int, cost_s: float, *, is_instant: bool) -> bool:
        """The workers have it in host memory; False where it takes more than there is room for, and is evicted."""
        adapter.residency, adapter.is_instant = Residency.LOADED, is_instant
        self.expects_copy = not is_instant
        self.cache.loaded(adapter.engine_id, adapter.spec.path, size_bytes, cost_s)
        if adapter.slot is not None and is_instant:
            self._release_slot(adapter)  # it was acquired for a copy that is not needed
        if adapter.slot is None:
            self.job_done(adapter)
        victims = self._idle_to_evict(0, 0, (), but=adapter)
        if victims is None:
            self.evict(adapter)
            return False
        self._evict_all(victims)
        return True

    def evict(self, adapter: Adapter) -> None:
        """Remove an adapter from the workers: from slot and host memory."""
        self.job_done(adapter)
        size_bytes = self.cache.remove(adapter.engine_id)
        self._release_slot(adapter)
        if adapter.residency is Residency.LOADED and not adapter.is_retired:
            self._stats.host_evictions += 1
            self._stats.host_evicted_bytes += size_bytes
        adapter.residency = Residency.ABSENT
        self.note_use(adapter)
        self.commands.append(Evict(adapter.engine_id))
        self._evicted(adapter)

    def _evict_all(self, victims: list[Adapter]) -> None:
        for victim in victims:
            self.evict(victim)

    def _make_room(self, adapter: Adapter, *, may_drain: bool) -> bool:
        """Evict what it takes for an adapter to fit; nothing, where all that may be evicted is not enough.

        Then adapters are drained for it: room is reserved from then on, and what is loaded meanwhile has to fit
        beside it.
        """
        size_bytes = self.size_bytes(adapter)
        if self.reserved_for not in (None, adapter):
            victims = self._idle_beside(self.reserved_for, size_bytes)
        else:
            victims = self._idle_to_evict(size_bytes, 1, ())
            if victims is None and may_drain:
                victims = self._drain_for(adapter, size_bytes)
        if victims is None:
            return False
        self._evict_all(victims)
        return True

    def end_reservation(self) -> None:
        """The adapter that room is reserved for is loaded, or not wanted any more."""
        self.reserved_for = None
        self.draining.clear()

    def _drain_for(self, adapter: Adapter, size_bytes: int) -> list[Adapter] | None:
        """Choose who is evicted for an adapter; all of them, once none of them is used, and None before.

        The choice stands until it is loaded. Else room that one leaves would be used again before the next has left.
        """
        chosen = self._drained()
        if self.reserved_for is None or not self._fits(size_bytes, 1, chosen):
            chosen = self._choose(adapter, size_bytes)
            self.reserved_for, self.draining = adapter, {other.engine_id for other in chosen}
        is_enough = self._fits(size_bytes, 1, chosen)
        return chosen if is_enough and all(other.can_be_displaced for other in chosen) else None

    def _drained(self) -> list[Adapter]:
        """Those that are draining, as far as they are still there and not pinned."""
        adapters = (self.adapters[engine_id] for engine_id in self.draining if engine_id in self.cache)
        return [adapter for adapter in adapters if not adapter.is_pinned]

    def _choose(self, newcomer: Adapter, size_bytes: int) -> list[Adapter]:
        """As few as make room: who is idle first, then who came later, then who has run longest."""
        idle, behind, running = [], [], []
        for adapter in (self.adapters[engine_id] for engine_id in self.cache):
            if adapter.is_idle:
                idle.append(adapter)
            elif adapter.can_be_displaced and adapter.since > newcomer.since:
                behind.append(adapter)
            elif adapter.running and not adapter.is_pinned:
                running.append(adapter)
        behind.sort(key=lambda adapter: adapter.since, reverse=True)
        running.sort(key=lambda adapter: adapter.slice_began_at)
        chosen: list[Adapter] = []
        for adapter in (*idle, *behind, *running):
            if self._fits(size_bytes, 1, chosen):
                break
            chosen.append(adapter)
        for adapter in list(chosen):
            without = [other for other in chosen if other is not adapter]
            if self._fits(size_bytes, 1, without):
                chosen = without
        return chosen

    def _idle_beside(self, other: Adapter, size_bytes: int) -> list[Adapter] | None:
        """Idle adapters to evict for a load now that leaves the room that is reserved for another."""
        chosen = self._idle_to_evict(size_bytes + self.size_bytes(other), 2, self._drained())
        return None if chosen is None or not self._fits(size_bytes, 1, chosen) else chosen

    def _idle_to_evict(
        self, size_bytes: int, more: int, leaving: Sequence[Adapter], *, but: Adapter | None = None
    ) -> list[Adapter] | None:
        """Idle adapters, in the policy's order, that leave room once they and those in `leaving` are evicted."""
        victims: list[Adapter] = []
        spared = {adapter.engine_id for adapter in leaving} | ({but.engine_id} if but is not None else set())
        while not self._fits(size_bytes, more, (*victims, *leaving)):
            candidates = self.idle - spared
            found = self.cache.victim(candidates) if candidates else None
            if found is None:
                return None
            spared.add(found)
            victims.append(self.adapters[found])
        return victims

    def _fits(self, size_bytes: int, more: int, evicted: Sequence[Adapter]) -> bool:
        evicted_bytes = sum(self.cache.size_bytes(adapter.engine_id) for adapter in evicted)
        return self.cache.fits_without(size_bytes, more, evicted_bytes, len(evicted))
