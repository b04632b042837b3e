"""What the planner knows of one engine, and every single change: hold, begin, end, load, activate, evict.

Runs in the engine core process, between two steps of vLLM. The planner and the functions of this folder decide; a
method here carries out one decision, appends commands for the workers, and notes the adapter in `touched`. `settle`
then updates the collections that are derived from adapters. `adapter.py` has the fields of one adapter.

Words of this folder:

- A *generation* is one version of an adapter under one engine id, with a key of its own; *retired* generations take no
  new requests, and are evicted once unused.
- A request is *held* while it waits in vLLM's queue for its adapter, and *stopped* while a pause keeps it from running.
  The next part of a client's request with several choices or beams is *expected*. A *call* is a caller, such as an
  operator's load, that waits for the adapter without a request.
- An adapter is *absent* or *loaded* in host memory, *active* in a slot, and *in flight* while requests run or parts
  are expected. *Staying* adapters may not be evicted: pinned, or given by a caller without files to load again.
- *Copied* slots are written at an activation; *pointed* slots point at weights in host memory, and cost no copy. A
  *pool* is all slots of one kind.
- A *leaving* adapter takes no further requests, so that its slot passes on. A *draining* adapter leaves too, and is
  evicted for the adapter that room in host memory is *reserved* for.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.scheduler.adapter import ABSENT, LOADED, LOADING, Adapter, Held, Run, RunningOn
from lora_plugins.scheduler.futures import resolve
from lora_plugins.scheduler.generations import Generations
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import Activate, Command, Evict, Load, Move, Slots
from lora_plugins.scheduler.request_queue import CLOSED, Order, QueueOrder, priority_of
from lora_plugins.scheduler.stats import Stats, StepTimes
from lora_plugins.scheduler.waiting_order import WaitingOrder

MAX_LOADS = 4
_AVERAGED = 20
_Adapters = dict[Adapter, None]  # a set that keeps the order in which adapters came, so that plans can be repeated


class SlotPool:
    """Slots of one kind: `copied` slots are written at an activation, `pointed` slots point at host memory.

    Attributes:
        owners: each adapter's slot, the least recently used first. running: adapters in flight that are not pinned.
        unused: adapters that can be displaced. passed_on_at: when a slot last went to an adapter that
            waited, or no adapter waited.
    """

    def __init__(self, first: int, size: int) -> None:
        self.size = size
        # Backwards, because `pop` takes the last: slots are used from the first on.
        self.free = list(range(first + size - 1, first - 1, -1))
        self.owners: dict[Adapter, int] = {}
        self.running = _Adapters()
        self.unused = _Adapters()
        self.passed_on_at = 0.0


class PlannerState:
    """The adapters of one engine; slots and host cache are shown as they will be once commands are carried out.

    Attributes:
        adapters: all generations, by key (`generations`). current: the generation that new requests get, by engine id.
        of_request: the adapter of each held or running request.
        absent: wanted and not in host memory. ready: in host memory, with held requests, and nothing in flight.
        newly_held: with held requests, nothing in flight, and not passed over by vLLM so far.
        open_groups: groups of waiting requests that may run now. An adapter has two: itself, of requests that have not
            run, and its `running_on`, of requests that go on and may run although the adapter takes no new ones.
        regrouped: held requests whose group has changed since the scheduler looked last, by id.
        calling: with calls. expecting: in flight, with more expected.
        staying: unevictable. moving: loaded, for requests that run with the generation before.
        leaving: in use, and taking no further requests.
        jobs: adapters that workers load, or activate in the background.
        reserved_for: the adapter that needs room. draining: adapters to evict for the reservation once unused.
        made_room_at: when an adapter that waited for room found room last, or none waited.
        mean_run_s: the mean of the last requests' times, from their beginning to their end.
        evicting: futures of callers who wait for an eviction, by key.
        waits_for: the option of vLLM, as `--max-loras`, whose value has made an adapter leave for others since the
            scheduler looked last; empty where none has.
        refused: requests to answer with an error; None for parts whose client's request was aborted.
    """

    def __init__(self, slots: Slots, cache: HostCache, stats: Stats, order: QueueOrder) -> None:
        self.queue_order = order
        self.cache, self.stats, self.times = cache, stats, StepTimes()
        self.slots = slots
        self.copied, self.pointed = SlotPool(0, slots.copied), SlotPool(slots.copied, slots.pointed)
        self.generations = Generations()
        self.adapters: dict[int, Adapter] = {}
        self.current: dict[int, Adapter] = {}
        self.of_request: dict[str, Adapter] = {}
        # Counted at each change: a sum over thousands of adapters in every step would be slow.
        self.stopped_count = 0
        self.absent, self.ready, self.newly_held = WaitingOrder(), WaitingOrder(), WaitingOrder()
        self.open_groups: dict[Hashable, None] = {}
        self.regrouped: dict[str, Any] = {}
        self.in_flight, self.expecting, self.calling = _Adapters(), _Adapters(), _Adapters()
        self.pinned, self.staying, self.moving, self.leaving = _Adapters(), _Adapters(), _Adapters(), _Adapters()
        self.jobs: dict[int, Adapter] = {}
        self.reserved_for: Adapter | None = None
        self.draining = _Adapters()
        self.made_room_at = 0.0
        self.mean_run_s = 0.0
        self.waits_for = ""
        self.evicting: dict[int, list[Future[None]]] = {}
        self.commands: list[Command] = []
        self.refused: list[tuple[Any, LoRAPluginsError | None]] = []
        self.touched = _Adapters()
        self._numbers = count(1)

    def known(self, engine_id: int) -> Adapter | None:
        """Return the current generation; None where no request or call needs it and workers have not loaded it."""
        adapter = self.adapters.get(self.generations.key_of(engine_id))
        # The key of an id whose requests have moved may be in use by the other id.
        return adapter if adapter is not None and adapter.spec.engine_id == engine_id else None

    def of_name(self, name: str) -> list[Adapter]:
        """Return all generations of a name."""
        return [adapter for adapter in self.adapters.values() if adapter.spec.name == name]

    @property
    def loads(self) -> int:
        return sum(it.residency is LOADING for it in self.jobs.values())

    @property
    def closed_count(self) -> int:
        """How many requests wait for the load of their adapter, or for a slot."""
        return sum(len(it.held) for it in self.adapters.values() if it not in self.open_groups)

    def settle(self, now: float) -> None:
        """Put every touched adapter into its collections; evict or forget adapters that nobody needs."""
        while self.touched:
            # Placing and forgetting may touch further adapters: the loop ends when nothing changes any more.
            adapter, _ = self.touched.popitem()
            in_flight, wanted = bool(adapter.running or adapter.expected), bool(adapter.held or adapter.calls)
            is_absent, is_pinned = adapter.residency is ABSENT, adapter.is_pinned
            if in_flight or not wanted:
                adapter.waits_since = None
            elif adapter.waits_since is None and adapter.calls:
                adapter.waits_since = now
            if adapter is self.reserved_for and not (is_absent and wanted):
                # Loaded, or not wanted any more: the adapters that drained for the room take requests again.
                self.reserved_for = None
                self.touched.update(self.draining)
                self.draining.clear()
            if is_pinned:
                # A pin that came after the reservation keeps the adapter.
                self.draining.pop(adapter, None)
            if adapter.leaving_since is not None and not in_flight and adapter not in self.draining:
                self.leave(adapter, None)
            self._place(adapter, in_flight=in_flight, wanted=wanted)
            if not (in_flight or wanted or is_pinned or adapter.job is not None):
                self._forget(adapter)

    def _place(self, adapter: Adapter, *, in_flight: bool, wanted: bool) -> None:
        is_loaded, is_absent = adapter.residency is LOADED, adapter.residency is ABSENT
        is_held, is_pinned, moves = bool(adapter.held), adapter.is_pinned, bool(adapter.replaces)
        stays = adapter.is_unevictable
        self.absent.keep(adapter, is_in=is_absent and wanted)
        self.ready.keep(adapter, is_in=is_loaded and is_held and not in_flight)
        self.newly_held.keep(adapter, is_in=is_held and not in_flight and adapter.waits_since is None)
        is_free = is_loaded and not (in_flight or adapter.is_activating)
        self.cache.set_idle(adapter.key, is_idle=is_free and not (wanted or stays or moves))
        if adapter.slot is not None:
            _keep(self.pool_of(adapter).unused, adapter, is_in=is_free and not is_pinned)
        _keep(self.in_flight, adapter, is_in=in_flight)
        _keep(self.expecting, adapter, is_in=bool(adapter.expected))
        _keep(self.calling, adapter, is_in=bool(adapter.calls))
        _keep(self.pinned, adapter, is_in=is_pinned)
        _keep(self.staying, adapter, is_in=stays and (wanted or is_pinned or not is_absent))
        _keep(self.moving, adapter, is_in=is_loaded and moves)
        _keep(self.open_groups, adapter, is_in=adapter.is_active and adapter.leaving_since is None)
        _keep(self.open_groups, adapter.running_on, is_in=adapter.is_active)
        _keep(self.pool_of(adapter).running, adapter, is_in=in_flight and not is_pinned)

    def leave(self, adapter: Adapter, since: float | None, priority: int = 0) -> None:
        """Have an adapter take no requests of other clients from a time on; None: the adapter takes any again.

        `priority` is of the request that waits: requests of a better priority still run.
        """
        adapter.leaving_since, adapter.leaves_for, adapter.takes_parts = since, priority, True
        _keep(self.leaving, adapter, is_in=since is not None)
        self.touched[adapter] = None
        if since is None:
            return
        clients = adapter.clients
        for request_id, held in adapter.held.items():
            if not held.runs_on and (held.client in clients or priority_of(held.order) < priority):
                held.runs_on = True
                self.regrouped[request_id] = held.request

    def take_no_parts(self, adapter: Adapter) -> None:
        """Have a leaving adapter take no parts of clients' running requests any more."""
        adapter.takes_parts = False
        for request_id, held in adapter.held.items():
            if held.runs_on and not (held.has_run or priority_of(held.order) < adapter.leaves_for):
                held.runs_on = False
                self.regrouped[request_id] = held.request

    def _forget(self, adapter: Adapter) -> None:
        if adapter.is_retired and adapter.is_loaded and not adapter.stopped:
            self.evict(adapter)
        elif adapter.residency is ABSENT and not adapter.stopped and self.adapters.pop(adapter.key, None) is not None:
            if self.current.get(adapter.spec.engine_id) is adapter:
                del self.current[adapter.spec.engine_id]
            if adapter.replaces is not None:
                self._restore(adapter, adapter.replaces)
            if adapter.key in self.evicting:
                # The workers still have an `Evict` to carry out: callers are answered after that step.
                self.evicting[adapter.key] += adapter.retirements
            else:
                resolve(adapter.retirements)

    def move(self, adapter: Adapter, before: Adapter) -> None:
        """Have requests that run or wait with `before` go on with the weights of `adapter`, the generation after."""
        if not before.is_in_flight and before.residency is not ABSENT:
            self.evict(before)  # only stopped requests go on with `before`, in whatever slot `before` has then
        self.commands.append(Move(before.key, adapter.key))
        self._release_slot(adapter)
        # The bytes count under the key of `before` from now on: batches go on naming that key.
        size_bytes = self.cache.remove(adapter.key)
        if before.residency is ABSENT:
            self.cache.reserve(before.key, size_bytes)
        self.cache.loaded(before.key, adapter.spec, size_bytes, adapter.load_s)
        before.spec, before.weights_key, before.is_retired = adapter.spec, adapter.key, adapter.is_retired
        before.load_s, before.rank, before.is_instant = adapter.load_s, adapter.rank, adapter.is_instant
        before.residency = LOADED
        before.calls, adapter.calls = [*before.calls, *adapter.calls], []
        before.is_pinned, adapter.is_pinned = before.is_pinned or adapter.is_pinned, False
        adapter.residency = ABSENT
        self.regrouped |= {request_id: held.request for request_id, held in before.held.items()}
        self._restore(adapter, before, has_same=True)
        self.touched[adapter] = None

    def _restore(self, adapter: Adapter, before: Adapter, *, has_same: bool = False) -> None:
        """Have `before` stand for its engine id again, in the place of `adapter`, which had replaced it.

        Requests that wait for `adapter` then wait for `before`: all where `before` `has_same` weights, else those that
        named the id of `before` and are not bound to `adapter`. Example: 1 was replaced by 2, and 2 by 3, which still
        loads. Where 2 is given up, 3 replaces 1.
        """
        engine_id, adapter.replaces = before.spec.engine_id, None
        self.adapters[before.key] = before
        # A third generation may replace the second already: the third then replaces the first.
        later = next((it for it in self.adapters.values() if it.replaces is adapter), None)
        if later is not None:
            later.replaces = before
        else:
            self.generations.restore(engine_id, before.key, before.weights_key)
            if not before.is_retired:
                self.current[engine_id] = before
                self.cache.known_bytes[engine_id] = before.spec, self.cache.expected_bytes(before.spec)
        may_wait = adapter.spec.engine_id == engine_id
        for request_id in [it for it, held in adapter.held.items() if has_same or (may_wait and not held.is_bound)]:
            self.hold_elsewhere(adapter, before, request_id)
        self.touched[before] = None

    # --- requests ---

    def group_of(self, request_id: str) -> Hashable:
        """Return the group of a waiting request."""
        adapter = self.of_request.get(request_id)
        held = None if adapter is None else adapter.held.get(request_id)
        if adapter is None or held is None:
            return CLOSED
        return adapter.running_on if held.runs_on else adapter

    def stop(self, adapter: Adapter, request_id: str) -> None:
        """Stop a held request for a pause: the request waits for no slot until `go_on`."""
        held = self.release(adapter, request_id)
        adapter.stopped[request_id] = held
        self.of_request[request_id] = adapter
        self.regrouped[request_id] = held.request
        self.stopped_count += 1
        self.touched[adapter] = None

    def unstop(self, adapter: Adapter, request_id: str) -> Held:
        """Forget a request that a pause has stopped; returns the request as held."""
        self.stopped_count -= 1
        del self.of_request[request_id]
        self.touched[adapter] = None
        return adapter.stopped.pop(request_id)

    def go_on(self, adapter: Adapter, now: float, clients: Collection[str] | None = None) -> None:
        """Have requests that a pause has stopped wait for their adapter again, each at its place."""
        stopped = [key for key, held in adapter.stopped.items() if clients is None or held.client in clients]
        for request_id in stopped:
            held = self.unstop(adapter, request_id)
            held.arrived_at = now
            self.hold(adapter, request_id, held)
            self.regrouped[request_id] = held.request

    def hold(self, adapter: Adapter, request_id: str, held: Held) -> None:
        held.runs_on = held.has_run
        if adapter.leaving_since is not None and not held.has_run:
            is_part = adapter.takes_parts and held.client in adapter.clients
            held.runs_on = is_part or priority_of(held.order) < adapter.leaves_for
        adapter.hold(request_id, held)
        self.of_request[request_id] = adapter

    def hold_elsewhere(self, adapter: Adapter, other: Adapter, request_id: str) -> None:
        held = self.release(adapter, request_id)
        self.hold(other, request_id, held)
        self.regrouped[request_id] = held.request

    def release(self, adapter: Adapter, request_id: str) -> Held:
        del self.of_request[request_id]
        self.touched[adapter] = None
        return adapter.unhold(request_id)

    def began(self, adapter: Adapter, request_id: str, now: float) -> None:
        """Note that a held request runs from now on, in the adapter's slot."""
        held = adapter.unhold(request_id)
        pool = self.pool_of(adapter)
        if not adapter.is_in_flight:
            pool.passed_on_at = now
        adapter.running[request_id] = Run(now, held.client, priority_of(held.order))
        if not held.has_run:
            self.stats.wait_seconds[held.found].observe(now - held.arrived_at)
        # To the end of the order: the least recently used owner comes first.
        pool.owners[adapter] = pool.owners.pop(adapter)
        pool.unused.pop(adapter, None)
        self.cache.used(adapter.key)
        self.touched[adapter] = None

    def waits_again(self, adapter: Adapter, request_id: str, request: object, order: Order, now: float) -> None:
        """Note that a running request waits in vLLM's queue again, for the same weights."""
        run = adapter.running.pop(request_id)
        held = Held(request, now, adapter.found, order, run.client, is_bound=True, has_run=True)
        self.hold(adapter, request_id, held)
        self.touched[adapter] = None

    def ended(self, adapter: Adapter, request_id: str, now: float) -> str:
        """Note that a running request has ended; return the client's request that the request was part of."""
        del self.of_request[request_id]
        run = adapter.running.pop(request_id)
        # A running mean: each run has a weight of one in `_AVERAGED`, and earlier runs fade.
        self.mean_run_s += (now - run.began_at - self.mean_run_s) / _AVERAGED
        self.touched[adapter] = None
        return run.client

    def fail(self, adapter: Adapter, error: LoRAPluginsError, *, spares_begun: bool = False) -> None:
        """Answer an adapter's requests and calls with an error, but requests that an earlier generation can serve.

        `spares_begun`: requests that have run before wait on, and end with the adapter's weights.
        """
        if adapter.replaces is not None:
            self._restore(adapter, adapter.replaces)
        for request_id in [it for it, held in adapter.held.items() if not (spares_begun and held.has_run)]:
            self.refuse(self.release(adapter, request_id).request, error)
        if not adapter.is_loaded:
            adapter.is_pinned = False
        calls, adapter.calls = adapter.calls, []
        for call in calls:
            with suppress(InvalidStateError):
                call.future.set_exception(error)
        self.touched[adapter] = None

    def refuse(self, request: object, error: LoRAPluginsError | None) -> None:
        """Have a request answered with an error, or without one as an aborted request."""
        self.refused.append((request, error))
        if error is not None:
            self.stats.refused[error.code] = self.stats.refused.get(error.code, 0) + 1

    # --- slots ---

    def pool_of(self, adapter: Adapter) -> SlotPool:
        """Return the pool that a loaded adapter gets its slot from."""
        return self.pointed if adapter.is_instant and self.pointed.size else self.copied

    def activate(self, adapter: Adapter, *, displaces: bool = False) -> bool:
        """Give a loaded adapter a slot, at once or after the copy; return False where no slot can be had now.

        The slot is free, or idle and the least recently used; with `displaces`, or of the last adapter that waits,
        where a call needs the slot or the adapter's own requests come before.
        """
        if adapter.slot is not None:
            return True
        pool = self.pool_of(adapter)
        if not adapter.is_loaded or not (pool.free or self._free_slot(pool, adapter if displaces else None)):
            return False
        adapter.slot = pool.owners[adapter] = pool.free.pop()
        size_bytes, running = self.cache.sizes_bytes[adapter.key], len(self.in_flight)
        # A slot that is written before the step's batch is active at once; a job reports its end by `Activated`.
        adapter.is_active = adapter.is_instant or self.times.is_short(size_bytes, running)
        self.stats.instant_activations += adapter.is_active
        self.commands.append(
            Activate(adapter.key, adapter.slot, None if adapter.is_active else self._begin_job(adapter))
        )
        self.touched[adapter] = None
        return True

    def _free_slot(self, pool: SlotPool, displacing: Adapter | None) -> bool:
        unused = [owner for owner in pool.owners if owner in pool.unused] if pool.unused else []
        victim = next((owner for owner in unused if not owner.is_wanted), None)
        if victim is None and displacing is not None:
            victim = max(unused, key=lambda it: it.order, default=None)
            if victim is not None and not displacing.needs_slot and victim.order <= displacing.order:
                victim = None
        if victim is None:
            return False
        self._release_slot(victim)
        self.stats.slot_evictions += 1
        return True

    def _release_slot(self, adapter: Adapter) -> None:
        if adapter.slot is not None:
            pool = self.copied if adapter in self.copied.owners else self.pointed
            pool.free.append(pool.owners.pop(adapter))
            pool.unused.pop(adapter, None)
        adapter.slot, adapter.is_active = None, False
        self.touched[adapter] = None

    def _begin_job(self, adapter: Adapter) -> int:
        adapter.job = next(self._numbers)
        self.jobs[adapter.job] = adapter
        return adapter.job

    def end_job(self, adapter: Adapter) -> None:
        if adapter.job is not None:
            del self.jobs[adapter.job]
        adapter.job = None
        self.touched[adapter] = None

    # --- the host cache ---

    def load(self, adapter: Adapter) -> None:
        """Have an adapter loaded; the caller has seen to room."""
        self.cache.reserve(adapter.key, self.cache.expected_bytes(adapter.spec))
        adapter.residency = LOADING
        self.commands.append(Load(adapter.spec, adapter.key, self._begin_job(adapter)))
        self.touched[adapter] = None

    def loaded(self, adapter: Adapter, size_bytes: int, cost_s: float) -> None:
        """Note that the workers have an adapter in host memory; an adapter that takes more than the room is evicted."""
        self.end_job(adapter)
        adapter.residency = LOADED
        is_current = self.generations.key_of(adapter.spec.engine_id) == adapter.key
        if not is_current:
            adapter.spec = replace(adapter.spec, size_bytes=size_bytes)
        self.cache.loaded(adapter.key, adapter.spec, size_bytes, cost_s, is_current=is_current)
        # Files may say less than the weights take: others are evicted for the rest, or else this adapter.
        victims = self.cache.victims(())
        for key in [adapter.key] if victims is None else victims:
            self.evict(self.adapters[key])

    def evict(self, adapter: Adapter) -> None:
        """Remove an adapter from the workers: from slot and host memory."""
        self.end_job(adapter)
        size_bytes = self.cache.remove(adapter.key)
        self._release_slot(adapter)
        if adapter.is_loaded and not adapter.is_retired:
            self.stats.host_evictions += 1
            self.stats.host_evicted_bytes += size_bytes
        adapter.residency = ABSENT
        self.draining.pop(adapter, None)
        self.commands.append(Evict(adapter.key))
        # Without a caller too: by the entry `_forget` sees that the workers still have the adapter.
        self.evicting.setdefault(adapter.key, [])
        if adapter.is_wanted and (error := self.cache.why_never_fits(adapter, self.staying)) is not None:
            self.fail(adapter, error)  # the adapter turned out too large, or another was pinned after the load


def _keep(some: dict[Any, None], member: Adapter | RunningOn, *, is_in: bool) -> None:
    if is_in:
        some[member] = None
    else:
        some.pop(member, None)
