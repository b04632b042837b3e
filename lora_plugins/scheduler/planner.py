"""Which adapters are loaded, which have slots, and which requests may run: one planner for each engine.

It is notified of requests, of what the workers report, and of the time, and answers with commands for the workers and
with the requests that are admitted. Its rules:

- An adapter with admitted requests keeps its slot until the last of them has finished. At most `max_running` adapters
  have any, so vLLM's own limit (`max_loras`) never binds. Pinned adapters have slots of their own among these.
- While more adapters wait than could run beside those that do, each takes further requests for `quantum_s` only; then
  what runs finishes, and its slot passes on, in the order of `WaitingOrder`.
- Adapters are loaded as soon as they are asked for, unless enough wait in host memory to take all places next. Where
  activating one costs a copy, the next in order is activated in a spare slot before its turn.
- What can never fit, for its size or for what is pinned, is refused at once, and delays nobody.

Nobody starves. Let `max_wait_s` be W, the quantum Q, the longest request R, the longest load D and the longest
activation A, each with the steps that it takes to be noticed. Let an adapter begin to wait, and k others that came
before it; for a request whose adapter still runs, that is R later at most. From W on nobody who came later goes before
it, and whoever has a slot gives it up within Q + R. So, among requests of one priority, while nobody is pinned or
called into a slot,

- where the host cache has room for all, it has a slot within
  W + D * (1 + ceil((k + 1) / MAX_LOADS)) + (Q + R + A) * ceil((k + 1) / running), where `running` is `max_running` less
  the pinned ones;
- where it has not, adapters are chosen that get no further requests until one is loaded that has waited for W
  (`Placement`), which is over within R: it has a slot within W + (k + 1) * (D + A + Q + 2 * R), in the worst case of a
  cache that holds one adapter. One that turns out larger than its files said counts twice.

Times are seconds of a clock that never goes back. Not thread-safe: the engine's loop calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cachetools import LRUCache

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot
from lora_plugins.scheduler.adapter import Adapter, Held, LoadCall, Residency
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import Activated, AdapterSpec, Command, Evict, Failed, Loaded, Report
from lora_plugins.scheduler.placement import MAX_LOADS, Placement
from lora_plugins.scheduler.stats import Stats
from lora_plugins.scheduler.waiting import WaitingOrder

QUANTUM_S = 1.0
MAX_WAIT_S = 0.5
_REMEMBERED = 10_000
_MOST_PASSED_OVER = 4


@dataclass(slots=True)
class Plan:
    """What one step brings: commands for the workers, requests to admit, and requests that are refused."""

    commands: list[Command] = field(default_factory=list)
    admitted: list[Any] = field(default_factory=list)
    refused: list[tuple[Any, LoRAPluginsError]] = field(default_factory=list)


class Planner:
    """See the module.

    Args:
        max_running: adapters that may have admitted requests at once.
        slots: places in the workers' device memory: `max_running`, and perhaps spare ones.
        cache: the budget of the host cache.
        quantum_s: how long an adapter takes further requests while others wait for its slot.
        max_wait_s: how long an adapter may be overtaken by others that came later.

    Attributes:
        adapters: all that are known by engine id: loaded, on their way, or asked for.
        held_count: requests that are not admitted yet. held_by_name: how many for each adapter name.
    """

    def __init__(
        self,
        max_running: int,
        slots: int,
        cache: HostCache,
        *,
        quantum_s: float = QUANTUM_S,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self.max_running = max_running
        self.stats = Stats()
        self.held_count = 0
        self.held_by_name: Counter[str] = Counter()
        self.placement = Placement(slots, cache, self.stats, self._evicted)
        self.adapters = self.placement.adapters
        self._quantum_s = quantum_s
        self._of_request: dict[str, Adapter] = {}
        self._in_flight: dict[int, Adapter] = {}  # with admitted requests
        self._calling: dict[int, Adapter] = {}  # with calls
        self._ready = WaitingOrder(max_wait_s)  # loaded, with held requests, nothing admitted, and not pinned
        self._absent = WaitingOrder(max_wait_s)  # wanted, and not in host memory
        self._retired: LRUCache[int, LoRAPluginsError | None] = LRUCache(_REMEMBERED)
        self._leaving: dict[int, list[Future[None]]] = {}  # evicted by a command that is not carried out yet
        self._plan = Plan()
        self._is_changed = False
        self._look_again_at: float | None = None
        self._was_paused = False

    # --- what it is asked ---

    @property
    def has_work(self) -> bool:
        """Whether a step without any request would bring something forward.

        The end of a pause is the engine's to know: the first step after it brings what waited for it.
        """
        return bool(self._is_changed or self.placement.jobs or self._leaving or self._plan.refused)

    def is_held(self, request_id: str) -> bool:
        """Whether a request is here and not admitted yet."""
        adapter = self._of_request.get(request_id)
        return adapter is not None and request_id in adapter.held

    def running(self) -> Iterator[tuple[str, Any]]:
        """All admitted requests that have not finished, by their ids."""
        for adapter in self._in_flight.values():
            yield from adapter.running.items()

    # --- what it is notified of ---

    def arrived(self, spec: AdapterSpec, request_id: str, request: Any, now: float, priority: int = 0) -> None:
        """A request came; a later `plan` admits or refuses it."""
        adapter = self._adapter(spec)
        error = self._retired.get(spec.engine_id) or self.placement.never_fits(adapter)
        if error is not None:
            self._refuse(request, error)
            self._tidy(adapter)
            return
        adapter.hold(request_id, Held(request, now, adapter.found, priority))
        self._of_request[request_id] = adapter
        self._count_held(adapter, 1)
        self._enqueue(adapter, now)

    def finished(self, request_ids: Iterable[str], now: float) -> None:
        """Admitted requests have left vLLM's scheduler, in whatever way; others are left alone."""
        for request_id in request_ids:
            adapter = self._of_request.get(request_id)
            if adapter is None or request_id not in adapter.running:
                continue
            del self._of_request[request_id]
            del adapter.running[request_id]
            if not adapter.running:
                del self._in_flight[adapter.engine_id]
                self._enqueue(adapter, now)

    def take_back(self, request_ids: Iterable[str] | None) -> list[Any]:
        """Forget held requests, of these ids or all, and return them."""
        if not self.held_count:
            return []
        gone = []
        for request_id in list(self._of_request) if request_ids is None else request_ids:
            adapter = self._of_request.get(request_id)
            held = None if adapter is None else adapter.let_go(request_id)
            if adapter is not None and held is not None:
                del self._of_request[request_id]
                self._count_held(adapter, -1)
                gone.append(held.request)
                self._enqueue(adapter, held.arrived_at)
        return gone

    def load(
        self,
        spec: AdapterSpec,
        now: float,
        *,
        wants_slot: bool = False,
        needs_slot: bool = False,
        is_urgent: bool = False,
    ) -> Future[None]:
        """Bring an adapter into host memory without a request, and perhaps into a slot (`LoadCall`).

        The future raises a LoRAPluginsError where it cannot be.
        """
        adapter = self._adapter(spec)
        error = self._retired.get(spec.engine_id) or self.placement.never_fits(adapter)
        if error is not None:
            self._tidy(adapter)
            return _failed(error)
        future: Future[None] = Future()
        adapter.calls.append(LoadCall(future, wants_slot, needs_slot, is_urgent))
        self._enqueue(adapter, now)
        return future

    def pin(self, spec: AdapterSpec, now: float) -> Future[None]:
        """Keep an adapter in host memory and in a slot of its own; done when it is there.

        The future raises NoFreeSlot where nothing would be left for all others, AdapterNotFound for a retired one, or
        what `load` raises.
        """
        if spec.engine_id in self._retired:
            gone = AdapterNotFound("a version that is on its way out", adapter=spec.name)
            return _failed(self._retired[spec.engine_id] or gone)
        # Two versions of one name are pinned for as long as the old one drains.
        pinned = len({adapter.spec.name for adapter in self.placement.pinned.values()} - {spec.name})
        if pinned + 1 >= min(self.max_running, self.placement.cache.max_adapters):
            return _failed(
                NoFreeSlot(
                    f"{self.max_running} slots, of which {pinned} are pinned",
                    expected="one slot at least that is left for all others",
                    remedy="unpin an adapter, or raise --max-loras",
                    adapter=spec.name,
                )
            )
        future = self.load(spec, now, needs_slot=True)
        if not future.done():
            adapter = self._adapter(spec)
            adapter.is_pinned = True
            self.placement.pinned[spec.engine_id] = adapter
            self._enqueue(adapter, now)
            self._refuse_what_never_fits()
        return future

    def unpin(self, engine_id: int) -> bool:
        """Let a pinned adapter go when others need its place; returns whether it was pinned."""
        adapter = self.placement.pinned.pop(engine_id, None)
        if adapter is None:
            return False
        adapter.is_pinned = False
        self._enqueue(adapter, _waits_since(adapter))
        return True

    def retire(self, engine_id: int, refusal: LoRAPluginsError | None) -> Future[None]:
        """Evict an adapter as soon as nobody uses it; done when it is gone from the workers.

        With a `refusal`, requests that are held or still come are refused with it; without one they are served first.
        """
        future: Future[None] = Future()
        self._retired[engine_id] = refusal
        self.unpin(engine_id)
        adapter = self.adapters.get(engine_id)
        if adapter is None:
            if engine_id in self._leaving:
                self._leaving[engine_id].append(future)
            else:
                future.set_result(None)
            return future
        adapter.is_retired = True
        adapter.gone.append(future)
        if refusal is not None:
            self._give_up(adapter, refusal)
        self._enqueue(adapter, _waits_since(adapter))
        return future

    def evict_unused(self, engine_id: int) -> bool:
        """Evict an adapter, so that another can have its id; False where somebody uses or waits for it."""
        adapter = self.adapters.get(engine_id)
        if adapter is not None and adapter.is_idle:
            self.placement.evict(adapter)
        return engine_id not in self.adapters

    def reported(self, reports: Iterable[Report], now: float) -> None:
        """The workers have finished jobs."""
        for report in reports:
            adapter = self.placement.jobs.get(report.job)
            if adapter is None:
                continue  # evicted meanwhile
            match report:
                case Loaded():
                    self.stats.load_seconds.observe(report.load_s)
                    adapter.load_s = report.load_s
                    self.placement.loaded(adapter, report.size_bytes, report.load_s, is_instant=report.is_instant)
                    error = self.placement.never_fits(adapter)
                    if error is not None and adapter.residency is Residency.ABSENT:
                        self._give_up(adapter, error)
                    if adapter.is_pinned:
                        self._refuse_what_never_fits()
                case Activated():
                    self.stats.activate_seconds.observe(report.activate_s)
                    self.stats.background_activations += 1
                    adapter.is_active = True
                    self.placement.job_done(adapter)
                case Failed():
                    self.stats.load_failures += 1
                    self.placement.evict(adapter)
                    self._give_up(adapter, report.error)
            self._enqueue(adapter, now)

    def carried_out(self, commands: Sequence[Command]) -> None:
        """The step that these commands came with is over."""
        for command in commands:
            if isinstance(command, Evict):
                _resolve(self._leaving.pop(command.engine_id, ()))

    def take_refused(self) -> list[tuple[Any, LoRAPluginsError]]:
        """Requests that were refused since the last plan, which does not return them again."""
        refused, self._plan.refused = self._plan.refused, []
        return refused

    # --- the plan ---

    def plan(self, now: float, *, is_paused: bool = False) -> Plan:
        """What to do in the step that begins now; while paused, nothing is admitted and no slot is written."""
        is_due = self._look_again_at is not None and now >= self._look_again_at
        if self._is_changed or is_due or is_paused is not self._was_paused:
            self._look_again_at, self._was_paused = None, is_paused
            self._answer_calls(is_paused=is_paused)
            self._load_what_is_wanted(now, is_paused=is_paused)  # before what has given way runs again
            if not is_paused:
                self._admit(now)
                self._activate_ahead(now)
            self._is_changed = False
        plan, self._plan = self._plan, Plan()
        plan.commands, self.placement.commands = self.placement.commands, []
        return plan

    def _admit(self, now: float) -> None:
        for adapter in self.placement.pinned.values():
            if adapter.held and adapter.is_active and (adapter.running or len(self._in_flight) < self.max_running):
                self._admit_held(adapter, now)
        places = self._begin_in_order(now, self._free_places)
        if places > 0:
            self._begin_in_slots(now, places)
        is_contended = self._is_contended
        for adapter in list(self._in_flight.values()):
            if not is_contended:
                adapter.admits_since = now
            if adapter.held and self._takes_more(adapter, now):
                self._admit_held(adapter, now)

    def _begin_in_order(self, now: float, places: int) -> int:
        """Begin with who is next, as far as slots can be had; returns how many places others may take."""
        passed_over = set(self.placement.yielding)  # and those whose slots are being written
        while places > 0 and (engine_id := self._ready.first(now, passed_over)) is not None:
            adapter, is_overdue = self.adapters[engine_id], self._ready.is_overdue(engine_id, now)
            self.placement.activate(adapter, partial(_gives_way, adapter, is_overdue))
            if adapter.is_active:
                self._begin(adapter, now)
                places -= 1
            elif adapter.slot is not None:
                passed_over.add(engine_id)
                places -= is_overdue  # its place is kept for it
            else:
                break
        return places

    def _begin_in_slots(self, now: float, places: int) -> None:
        """Begin with those that wait in a slot, while the first in order has to wait for one."""
        owners = [self.adapters[engine_id] for engine_id in self.placement.slots.owners() if engine_id in self._ready]
        owners = [owner for owner in owners if owner.is_active and owner.engine_id not in self.placement.yielding]
        for adapter in sorted(owners, key=_waits_since)[:places]:
            self._begin(adapter, now)

    def _begin(self, adapter: Adapter, now: float) -> None:
        self._ready.remove(adapter.engine_id)
        self._admit_held(adapter, now)

    @property
    def _free_places(self) -> int:
        """How many more unpinned adapters may run."""
        unpinned = sum(not adapter.is_pinned for adapter in self._in_flight.values())
        pinned = len(self.placement.pinned)
        return min(self.max_running - len(self._in_flight), self.max_running - pinned - unpinned)

    @property
    def _is_contended(self) -> bool:
        """Whether more adapters wait than could run beside those that do."""
        jobs = self.placement.jobs.values()
        on_their_way = sum(bool(job.held) and job.residency is Residency.LOADING for job in jobs)
        calling = sum(adapter.needs_slot for adapter in self._calling.values())
        return len(self._ready) + len(self._absent) + on_their_way + calling > self._free_places

    def _takes_more(self, adapter: Adapter, now: float) -> bool:
        if adapter.is_pinned:
            return True
        return adapter.engine_id not in self.placement.yielding and now - adapter.admits_since < self._quantum_s

    def _admit_held(self, adapter: Adapter, now: float) -> None:
        if not adapter.running:
            adapter.admits_since, adapter.waits_since, adapter.had_turn = now, None, True
            self._in_flight[adapter.engine_id] = adapter
        self._count_held(adapter, -len(adapter.held))
        for request_id, held in adapter.let_all_go().items():
            adapter.running[request_id] = held.request
            self._plan.admitted.append(held.request)
            self.stats.waits[held.found].observe(now - held.arrived_at)
        self.placement.note_use(adapter)
        self.placement.slots.used(adapter.engine_id)
        self.placement.cache.used(adapter.engine_id)

    def _load_what_is_wanted(self, now: float, *, is_paused: bool) -> None:
        placement, passed_over, too_large = self.placement, set[int](), float("inf")
        kept = placement.room_is_for
        if kept is not None and kept.engine_id not in self._absent:
            placement.keep_no_room()
        elif kept is not None and not is_paused and placement.may_load:
            passed_over.add(kept.engine_id)  # before all others, who have to fit beside it
            self._load(kept, is_overdue=True, is_paused=False)
        while self._absent and placement.may_load and len(passed_over) < _MOST_PASSED_OVER:
            engine_id = self._absent.first(now, passed_over)
            if is_paused:  # held requests wait for its end, calls do not
                engine_id = next((key for key in self._calling if key in self._absent and key not in passed_over), None)
            if engine_id is None:
                break
            adapter = self.adapters[engine_id]
            if not adapter.calls and not self._runs_soon(engine_id):
                break
            is_overdue = not is_paused and self._absent.is_overdue(engine_id, now)
            size_bytes = placement.size_bytes(adapter)
            if size_bytes < too_large and self._load(adapter, is_overdue=is_overdue, is_paused=is_paused):
                continue
            if placement.is_full:
                break
            passed_over.add(engine_id)
            if placement.room_is_for is not adapter:  # beside it, there may be room for smaller ones
                too_large = min(too_large, size_bytes)
        self._look_again_at = self._absent.next_overdue_at(now)

    def _load(self, adapter: Adapter, *, is_overdue: bool, is_paused: bool) -> bool:
        may_take_slot = self._may_take_slot(adapter, is_paused)
        if not self.placement.load(adapter, is_overdue=is_overdue, may_take_slot=may_take_slot):
            return False
        self._absent.remove(adapter.engine_id)
        return True

    def _runs_soon(self, engine_id: int) -> bool:
        """Whether an adapter that is not loaded will run soon: what is loaded too early drives others out for nothing.

        It does where too few wait in host memory to take all places next, or where it is among the oldest.
        """
        on_their_way = sum(job.residency is Residency.LOADING for job in self.placement.jobs.values())
        most = self.max_running + MAX_LOADS - on_their_way
        since = self._absent.since(engine_id)
        return len(self._ready) < most or self._ready.is_among_oldest(engine_id, since, most)

    def _may_take_slot(self, adapter: Adapter, is_paused: bool) -> bool:
        """Whether an adapter that is about to be loaded gets a slot now: a spare one that no other could use."""
        spare = self.placement.slots.count - self.max_running
        if is_paused or self._ready or self.placement.loading_slots >= spare:
            return False
        return bool(adapter.held) or any(call.wants_slot or call.needs_slot for call in adapter.calls)

    def _activate_ahead(self, now: float) -> None:
        """Write slots that nobody needs at the moment for those that run next, where writing costs a copy."""
        ahead = set(self.placement.yielding)
        while (engine_id := self._ready.first(now, ahead)) is not None:
            adapter = self.adapters[engine_id]
            if adapter.is_instant or not self.placement.activate(adapter):
                return
            ahead.add(engine_id)

    def _answer_calls(self, *, is_paused: bool) -> None:
        for adapter in list(self._calling.values()):
            if adapter.residency is not Residency.LOADED:
                continue
            for call in list(adapter.calls):
                if not adapter.is_active and not is_paused and (call.wants_slot or call.needs_slot):
                    is_coming = self.placement.activate(adapter, _any_gives_way if call.needs_slot else None)
                    if is_coming and not adapter.is_active:
                        continue
                if adapter.is_active or not call.needs_slot:
                    adapter.calls.remove(call)
                    _resolve([call.future])
            self._enqueue(adapter, _waits_since(adapter))

    # --- refusals, and what is left ---

    def _refuse_what_never_fits(self) -> None:
        for adapter in list(self.adapters.values()):
            if adapter.residency is Residency.ABSENT and (error := self.placement.never_fits(adapter)) is not None:
                self._give_up(adapter, error)
                self._enqueue(adapter, 0.0)

    def _give_up(self, adapter: Adapter, error: LoRAPluginsError) -> None:
        """Answer everybody who waits for an adapter with an error."""
        self._count_held(adapter, -len(adapter.held))
        for request_id, held in adapter.let_all_go().items():
            del self._of_request[request_id]
            self._refuse(held.request, error)
        if adapter.residency is Residency.ABSENT:
            self.unpin(adapter.engine_id)
        calls, adapter.calls = adapter.calls, []
        for call in calls:
            with suppress(InvalidStateError):
                call.future.set_exception(error)

    def _refuse(self, request: Any, error: LoRAPluginsError) -> None:
        self._plan.refused.append((request, error))
        self.stats.refused[error.code] += 1

    def _count_held(self, adapter: Adapter, more: int) -> None:
        self.held_count += more
        self.held_by_name[adapter.spec.name] += more
        if not self.held_by_name[adapter.spec.name]:
            del self.held_by_name[adapter.spec.name]

    def _adapter(self, spec: AdapterSpec) -> Adapter:
        adapter = self.adapters.get(spec.engine_id)
        if adapter is None:
            adapter = self.adapters[spec.engine_id] = Adapter(spec, is_retired=spec.engine_id in self._retired)
        return adapter

    def _evicted(self, adapter: Adapter) -> None:
        self._leaving.setdefault(adapter.engine_id, [])
        if adapter.is_wanted and (error := self.placement.never_fits(adapter)) is not None:
            self._give_up(adapter, error)  # something was pinned since it was loaded
        self._enqueue(adapter, _waits_since(adapter))

    def _enqueue(self, adapter: Adapter, now: float) -> None:
        """See that an adapter waits where it has to, if it has to."""
        self._is_changed = True
        self.placement.note_use(adapter)
        if adapter.calls:
            self._calling[adapter.engine_id] = adapter
        else:
            self._calling.pop(adapter.engine_id, None)
        if not adapter.is_wanted or adapter.running:
            adapter.waits_since = None
        elif adapter.waits_since is None:
            adapter.waits_since = now
        is_loaded = adapter.residency is Residency.LOADED
        is_ready = is_loaded and bool(adapter.held) and not adapter.running and not adapter.is_pinned
        is_absent = adapter.residency is Residency.ABSENT and adapter.is_wanted
        for order, belongs in ((self._ready, is_ready), (self._absent, is_absent)):
            if belongs:
                order.put(adapter.engine_id, _waits_since(adapter), len(adapter.held), adapter.priority)
            else:
                order.remove(adapter.engine_id)
        self._tidy(adapter)

    def _tidy(self, adapter: Adapter) -> None:
        """Evict what is retired and used no more, and forget what is nowhere and wanted by nobody."""
        if adapter.running or adapter.is_wanted or adapter.is_pinned or adapter.job is not None:
            return
        if adapter.is_retired and adapter.residency is Residency.LOADED:
            self.placement.evict(adapter)  # comes back here
        elif adapter.residency is Residency.ABSENT and self.adapters.pop(adapter.engine_id, None) is not None:
            if adapter.engine_id in self._leaving:
                self._leaving[adapter.engine_id] += adapter.gone
            else:
                _resolve(adapter.gone)


def _waits_since(adapter: Adapter) -> float:
    return 0.0 if adapter.waits_since is None else adapter.waits_since


def _gives_way(newcomer: Adapter, is_overdue: bool, owner: Adapter) -> bool:
    """Whether an adapter that waits in a slot leaves it for the first in order."""
    return owner.had_turn or (is_overdue and _waits_since(owner) > _waits_since(newcomer))


def _any_gives_way(_: Adapter) -> bool:
    return True


def _failed(error: LoRAPluginsError) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(error)
    return future


def _resolve(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        with suppress(InvalidStateError):  # whoever asked has gone
            future.set_result(None)
