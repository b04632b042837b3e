"""Which adapters are loaded, which have slots, and which requests may run: one planner for each engine.

It is notified of requests, of what the workers report, and of the time, and answers with commands for the workers and
with the requests that are admitted. Its rules:

- An adapter with admitted requests keeps its slot until the last of them has finished. At most `max_running` adapters
  have any, so vLLM's own limit (`max_loras`) never binds. Pinned adapters have slots of their own among these.
- While more adapters wait than could run beside those that do, each takes further requests for a time slice only; then
  what runs finishes, and its slot passes on: vLLM's priorities first, then first come, first served.
- Adapters are loaded as soon as they are asked for, unless enough wait in host memory to take all places before them.
  Where activating one costs a copy, the next in order is activated ahead in a spare slot.
- What can never fit, for its size or for what is pinned, is refused at once, and delays no other.

No adapter starves. Let the time slice be Q, the longest request R, the longest load D and the longest activation A,
each with the steps that it takes to be noticed. Let an adapter begin to wait, and k others that came before it; for a
request whose adapter still runs, that is R later at most. None that came later is served before it, and those that
have a slot leave it within Q + R. So, among requests of one priority, while none is pinned or called into a slot,

- where the host cache has room for all, it has a slot within
  D * (1 + ceil((k + 1) / MAX_LOADS)) + (Q + R + A) * ceil((k + 1) / running), where `running` is `max_running` less
  the pinned ones;
- where it has not, adapters are drained for the first that does not fit (`Placement`), which takes them Q + R, and a
  slot is free R after that at most: it has one within (k + 1) * (D + A + Q + 2 * R), in the worst case of a cache that
  holds one adapter. One that turns out larger than its files said counts twice.

Times are seconds of a clock that never goes back. Not thread-safe: the engine's loop calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cachetools import LRUCache

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot
from lora_plugins.scheduler.adapter import Adapter, Held, LoadCall, Residency
from lora_plugins.scheduler.admission import Admission
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.loading import Loading
from lora_plugins.scheduler.messages import Activated, AdapterSpec, Command, Evict, Failed, Loaded, Report
from lora_plugins.scheduler.placement import Placement
from lora_plugins.scheduler.stats import Stats

TIME_SLICE_S = 1.0
_REMEMBERED = 10_000


@dataclass(slots=True)
class Plan:
    """What is to be done in one step: commands for the workers, requests to admit, and requests that are refused."""

    commands: list[Command] = field(default_factory=list)
    admitted: list[Any] = field(default_factory=list)
    refused: list[tuple[Any, LoRAPluginsError]] = field(default_factory=list)


class Planner:
    """See the module.

    Args:
        max_running: adapters that may have admitted requests at once.
        slots: places in the workers' device memory: `max_running`, and perhaps spare ones.
        cache: the budget of the host cache.
        time_slice_s: how long an adapter takes further requests while others wait for its slot.

    Attributes:
        adapters: all that are known by engine id: loaded, on their way, or asked for.
    """

    def __init__(self, max_running: int, slots: int, cache: HostCache, *, time_slice_s: float = TIME_SLICE_S) -> None:
        self.max_running = max_running
        self.stats = Stats()
        self.placement = Placement(slots, cache, self.stats, self._evicted)
        self.admission = Admission(self.placement, self.stats, max_running, time_slice_s)
        self.loading = Loading(self.placement, self.admission)
        self.adapters = self.placement.adapters
        self._retired: LRUCache[int, LoRAPluginsError | None] = LRUCache(_REMEMBERED)
        self._evicting: dict[int, list[Future[None]]] = {}  # by a command that is not carried out yet
        self._refused: list[tuple[Any, LoRAPluginsError]] = []
        self._is_changed = False
        self._was_paused = False

    @property
    def has_work(self) -> bool:
        """Whether a step without any request would do something.

        The end of a pause is the engine's to know: the first step after it does what waited for it.
        """
        return bool(self._is_changed or self.placement.jobs or self._evicting or self._refused)

    # --- requests ---

    def arrived(self, spec: AdapterSpec, request_id: str, request: Any, now: float, priority: int = 0) -> None:
        """A request came; a later `plan` admits or refuses it."""
        adapter = self._adapter(spec)
        error = self._retired.get(spec.engine_id) or self.placement.never_fits(adapter)
        if error is not None:
            self._refuse(request, error)
            self._forget_unused(adapter)
            return
        self.admission.hold(adapter, request_id, Held(request, now, adapter.found, priority))
        self._changed(adapter, now)

    def finished(self, request_ids: Iterable[str], now: float) -> None:
        """Admitted requests have left vLLM's scheduler, in whatever way; others are left alone."""
        for adapter in self.admission.finished(request_ids):
            self._changed(adapter, now)

    def cancel(self, request_ids: Iterable[str] | None) -> list[Any]:
        """Forget held requests, of these ids or all, and return them."""
        cancelled = self.admission.cancel(request_ids)
        for adapter, held in cancelled:
            self._changed(adapter, held.arrived_at)
        return [held.request for _, held in cancelled]

    # --- adapters ---

    def load(
        self,
        spec: AdapterSpec,
        now: float,
        *,
        wants_slot: bool = False,
        needs_slot: bool = False,
        is_urgent: bool = False,
    ) -> Future[None]:
        """Load an adapter into host memory without a request, and perhaps into a slot (`LoadCall`).

        The future raises a LoRAPluginsError where it cannot be.
        """
        adapter = self._adapter(spec)
        error = self._retired.get(spec.engine_id) or self.placement.never_fits(adapter)
        if error is not None:
            self._forget_unused(adapter)
            return _failed(error)
        future: Future[None] = Future()
        adapter.calls.append(LoadCall(future, wants_slot, needs_slot, is_urgent))
        self._changed(adapter, now)
        return future

    def pin(self, spec: AdapterSpec, now: float) -> Future[None]:
        """Keep an adapter in host memory and in a slot of its own; done when it is there.

        The future raises NoFreeSlot where nothing would be left for all others, AdapterNotFound for a retired one, or
        what `load` raises.
        """
        if spec.engine_id in self._retired:
            retired = AdapterNotFound("a version that is being removed", adapter=spec.name)
            return _failed(self._retired[spec.engine_id] or retired)
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
            self._changed(adapter, now)
            self._refuse_what_never_fits()
        return future

    def unpin(self, engine_id: int) -> bool:
        """Allow a pinned adapter to be evicted; returns whether it was pinned."""
        adapter = self.placement.pinned.pop(engine_id, None)
        if adapter is None:
            return False
        adapter.is_pinned = False
        self._changed(adapter, adapter.since)
        return True

    def retire(self, engine_id: int, refusal: LoRAPluginsError | None) -> Future[None]:
        """Evict an adapter as soon as it is not used; done when the workers have evicted it.

        With a `refusal`, requests that are held or still come are refused with it; without one they are served first.
        """
        future: Future[None] = Future()
        self._retired[engine_id] = refusal
        self.unpin(engine_id)
        adapter = self.adapters.get(engine_id)
        if adapter is None:
            if engine_id in self._evicting:
                self._evicting[engine_id].append(future)
            else:
                future.set_result(None)
            return future
        adapter.is_retired = True
        adapter.retirements.append(future)
        if refusal is not None:
            self._fail(adapter, refusal)
        self._changed(adapter, adapter.since)
        return future

    def evict_unused(self, engine_id: int) -> bool:
        """Evict an adapter, so that another can have its id; False where a request uses or awaits it."""
        adapter = self.adapters.get(engine_id)
        if adapter is not None and adapter.is_idle:
            self.placement.evict(adapter)
        return engine_id not in self.adapters

    # --- steps ---

    def plan(self, now: float, *, is_paused: bool = False) -> Plan:
        """What to do in the step that begins now; while paused, nothing is admitted and no slot is written."""
        plan = Plan()
        if self._is_changed or is_paused is not self._was_paused:
            self._was_paused = is_paused
            for adapter, futures in self.loading.answer_calls(is_paused=is_paused):
                _resolve(futures)
                self._changed(adapter, adapter.since)
            self.loading.load_wanted(is_paused=is_paused)  # before adapters that are to be evicted run again
            if not is_paused:
                plan.admitted = self.admission.admit(now, self.loading.waiting_count)
                self.admission.activate_ahead()
            self._is_changed = False
        plan.refused = self.take_refused()
        plan.commands, self.placement.commands = self.placement.commands, []
        return plan

    def reported(self, reports: Iterable[Report], now: float) -> None:
        """The workers have finished jobs."""
        for report in reports:
            adapter = self.placement.jobs.get(report.job)
            if adapter is None:
                continue  # evicted meanwhile
            match report:
                case Loaded():
                    self.stats.load_seconds.observe(report.load_s)
                    adapter.load_s, adapter.rank = report.load_s, report.rank
                    self.placement.loaded(adapter, report.size_bytes, report.load_s, is_instant=report.is_instant)
                    error = self.placement.never_fits(adapter)
                    if error is not None and adapter.residency is Residency.ABSENT:
                        self._fail(adapter, error)
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
                    self._fail(adapter, report.error)
            self._changed(adapter, now)

    def carried_out(self, commands: Sequence[Command]) -> None:
        """The step that these commands came with is over."""
        for command in commands:
            if isinstance(command, Evict):
                _resolve(self._evicting.pop(command.engine_id, ()))

    def take_refused(self) -> list[tuple[Any, LoRAPluginsError]]:
        """Requests that were refused since the last plan, which does not return them again."""
        refused, self._refused = self._refused, []
        return refused

    # --- after a change ---

    def _adapter(self, spec: AdapterSpec) -> Adapter:
        adapter = self.adapters.get(spec.engine_id)
        if adapter is None:
            adapter = self.adapters[spec.engine_id] = Adapter(spec, is_retired=spec.engine_id in self._retired)
        return adapter

    def _changed(self, adapter: Adapter, now: float) -> None:
        """See that an adapter waits where it has to, after anything about it has changed."""
        self._is_changed = True
        self.placement.note_use(adapter)
        if not adapter.is_wanted or adapter.running:
            adapter.waits_since = None
        elif adapter.waits_since is None:
            adapter.waits_since = now
        self.admission.requeue(adapter)
        self.loading.requeue(adapter)
        self._forget_unused(adapter)

    def _forget_unused(self, adapter: Adapter) -> None:
        """Evict what is retired and used no more, and forget what is neither loaded nor wanted."""
        if adapter.running or adapter.is_wanted or adapter.is_pinned or adapter.job is not None:
            return
        if adapter.is_retired and adapter.residency is Residency.LOADED:
            self.placement.evict(adapter)  # comes back here
        elif adapter.residency is Residency.ABSENT and self.adapters.pop(adapter.engine_id, None) is not None:
            if adapter.engine_id in self._evicting:
                self._evicting[adapter.engine_id] += adapter.retirements
            else:
                _resolve(adapter.retirements)

    def _evicted(self, adapter: Adapter) -> None:
        self._evicting.setdefault(adapter.engine_id, [])
        if adapter.is_wanted and (error := self.placement.never_fits(adapter)) is not None:
            self._fail(adapter, error)  # something was pinned since it was loaded
        self._changed(adapter, adapter.since)

    def _refuse_what_never_fits(self) -> None:
        for adapter in list(self.adapters.values()):
            if adapter.residency is Residency.ABSENT and (error := self.placement.never_fits(adapter)) is not None:
                self._fail(adapter, error)
                self._changed(adapter, 0.0)

    def _fail(self, adapter: Adapter, error: LoRAPluginsError) -> None:
        """Answer all requests and calls that wait for an adapter with an error."""
        for request in self.admission.cancel_all_of(adapter):
            self._refuse(request, error)
        if adapter.residency is Residency.ABSENT:
            self.unpin(adapter.engine_id)
        calls, adapter.calls = adapter.calls, []
        for call in calls:
            with suppress(InvalidStateError):
                call.future.set_exception(error)

    def _refuse(self, request: Any, error: LoRAPluginsError) -> None:
        self._refused.append((request, error))
        self.stats.refused[error.code] = self.stats.refused.get(error.code, 0) + 1


def _failed(error: LoRAPluginsError) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(error)
    return future


def _resolve(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        with suppress(InvalidStateError):  # the caller waits no more
            future.set_result(None)
