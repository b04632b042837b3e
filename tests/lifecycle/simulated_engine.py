"""An engine in virtual time: the real planner, reached as an API server reaches it, before a made-up worker.

One task takes the engine's steps. What a server asks for goes through the utilities of vLLM's engine core, so what is
tested is what comes and goes between the processes too.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.lifecycle.planner_client import Ask
from lora_plugins.scheduler.eviction_policies import make_policy
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.messages import (
    Activate,
    Activated,
    Command,
    Evict,
    Failed,
    Load,
    Loaded,
    Move,
    Report,
    Slots,
)
from lora_plugins.scheduler.pauses import Pauses
from lora_plugins.scheduler.planner import Planner
from lora_plugins.vllm_patches.engine_core import engine_core
from lora_plugins.vllm_patches.engine_core.engine_planner import AdapterSpecs
from lora_plugins.vllm_patches.engine_core.scheduler import AdmittingScheduler
from tests.scheduler.simulated import begin_next, held_count, place_at_end

STEP_S = 0.002
COPY_S = 0.003  # to write a slot, where that takes a copy


@dataclass
class Worker:
    """Brings what it is told to into host memory within `delay_s`, and finds some of it `broken`."""

    delay_s: float = 0.01
    size_bytes: int = 10
    is_instant: bool = True
    broken: LoRAPluginsError | None = None
    broken_paths: set[str] | None = None  # None for all
    paths: dict[int, str] = field(default_factory=dict)  # in host memory or on their way, by key
    loaded: set[int] = field(default_factory=set)
    slots: dict[int, int] = field(default_factory=dict)  # key by slot
    loads: Counter[str] = field(default_factory=Counter)  # by path
    uris: dict[str, str | None] = field(default_factory=dict)  # by path
    _jobs: list[tuple[float, int, Report]] = field(default_factory=list)  # when it is done, whose, and what it says

    def carry_out(self, commands: Sequence[Command]) -> None:
        now = time.monotonic()
        for command in commands:
            match command:
                case Load(spec, key, job):
                    assert key not in self.paths, "loaded twice"
                    self.paths[key] = spec.path
                    self.uris[spec.path] = spec.uri
                    self.loads[spec.path] += 1
                    done = Loaded(job, self.size_bytes, self.is_instant, self.delay_s)
                    self._jobs.append((now + self.delay_s, key, done))
                case Activate(key, slot, None):
                    assert key in self.loaded
                    self._own(slot, key)
                case Activate(key, slot, job):
                    assert key in self.loaded
                    self._own(slot, None)
                    self._write(key, slot, job, now)
                case Move(key, source):
                    assert source in self.loaded
                    self.loaded = self.loaded - {source} | {key}
                    self.paths[key] = self.paths.pop(source)
                    self.slots = {slot: owner for slot, owner in self.slots.items() if owner != source}
                case Evict(key):
                    self.paths.pop(key, None)
                    self.loaded.discard(key)
                    self.slots = {slot: owner for slot, owner in self.slots.items() if owner != key}
                    self._jobs = [job for job in self._jobs if job[1] != key]

    def reports(self) -> list[Report]:
        now = time.monotonic()
        due = sorted((job for job in self._jobs if job[0] <= now), key=lambda job: job[0])
        self._jobs = [job for job in self._jobs if job[0] > now]
        return [self._end(key, report) for _, key, report in due]

    def _end(self, key: int, report: Report) -> Report:
        if isinstance(report, Loaded):
            if self.broken is not None and (self.broken_paths is None or self.paths[key] in self.broken_paths):
                self._jobs = [job for job in self._jobs if job[1] != key]
                return Failed(report.job, self.broken)
            self.loaded.add(key)
            return replace(report, size_bytes=self.size_bytes)
        assert isinstance(report, Activated)
        self._own(self._writing.pop(report.job), key)
        return report

    def _write(self, key: int, slot: int, job: int, at: float) -> None:
        self._writing[job] = slot
        self._jobs.append((at + COPY_S, key, Activated(job, COPY_S)))

    def _own(self, slot: int, key: int | None) -> None:
        self.slots = {other: owner for other, owner in self.slots.items() if other != slot and owner != key}
        if key is not None:
            self.slots[slot] = key

    _writing: dict[int, int] = field(default_factory=dict)  # slot by job


class _Scheduler(AdmittingScheduler):
    """The planner, and nothing of vLLM's scheduler."""

    pause_state = 0

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        # vLLM's requests, none of which waits with a KV cache.
        self.requests: dict[str, Any] = defaultdict(lambda: SimpleNamespace(num_computed_tokens=0))
        self.specs = AdapterSpecs(planner.state)
        self.pauses = Pauses(planner)

    def regroup(self, *_: Any) -> None:
        """Nothing: no request waits in a queue of vLLM's."""


class SimulatedEngine:
    """See the module; `ask` is what a `PlannerClient` wants."""

    def __init__(self, *, slots: int = 99, places: int = 99, max_bytes: int | None = None, **worker: Any) -> None:
        from vllm.v1.engine.core import EngineCoreProc

        cache = HostCache(max_bytes, places, make_policy("lru"))
        self.planner = Planner(Slots(slots), cache)
        self.worker = Worker(**worker)
        self.asked: Counter[str] = Counter()
        self._core = EngineCoreProc.__new__(EngineCoreProc)
        self._core.scheduler = _Scheduler(self.planner)
        self._numbers = itertools.count(1)
        self._has_news = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None

    async def ask(self, utility: str, arguments: tuple[Any, ...]) -> Mapping[int, Any]:
        self.asked[utility] += 1
        function = getattr(engine_core, utility.removeprefix("lora_plugins"))
        await asyncio.sleep(0.0005)  # to another process
        answer = function(self._core, *pickle.loads(pickle.dumps(arguments)))
        self._go_on()
        if isinstance(answer, Future):
            # Whoever asked may go away: the engine does not learn of it.
            answer = await asyncio.shield(asyncio.wrap_future(answer))
        return {0: pickle.loads(pickle.dumps(answer))}

    async def run(self, request: Any, seconds: float = 0.0, request_id: str | None = None) -> str:
        """What becomes of a request: held, begun, and finished after some time; or refused, or ended.

        Returns the path of the weights that the request began with.
        """
        request_id = request_id or f"request-{next(self._numbers)}"
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        spec, is_other = self._core.scheduler.specs.adapter_for_request(request)
        now = time.monotonic()
        order = place_at_end(self.planner, now)
        self.planner.arrived(spec, request_id, began, now, is_other=is_other, order=order)
        self._go_on()
        try:
            await began
            path = self._weights_of(request_id)
            await asyncio.sleep(seconds)
            self._weights_of(request_id)
            return path
        finally:
            self.planner.ended([request_id], time.monotonic())
            self._go_on()

    @property
    def pinned(self) -> set[int]:
        return {adapter.spec.engine_id for adapter in self.planner.state.pinned}

    def is_held(self, request_id: str) -> bool:
        return any(request_id in adapter.held for adapter in self.planner.state.adapters.values())

    def is_running(self, request_id: str) -> bool:
        return any(request_id in adapter.running for adapter in self.planner.state.in_flight)

    def _weights_of(self, request_id: str) -> str:
        """What the planner is for: a batch never meets an adapter that is not in a slot, with its present weights."""
        adapter = self.planner.state.of_request[request_id]
        assert adapter.key in self.worker.slots.values()
        assert self.worker.paths[adapter.key] == adapter.spec.path
        return adapter.spec.path

    def _go_on(self) -> None:
        self._has_news.set()
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._steps())
        elif self._stepping.done():
            self._stepping.result()

    async def _steps(self) -> None:
        while True:
            state = self.planner.state
            has_requests = state.refused or held_count(self.planner) or state.in_flight
            if not (has_requests or self.planner.has_work(is_paused=False)):
                self._has_news.clear()
                await self._has_news.wait()
            plan = self.planner.plan(time.monotonic())
            self.worker.carry_out(plan.commands)
            for began in begin_next(self.planner, time.monotonic()):
                if not began.done():
                    began.set_result(None)
            self._refuse(self.planner.take_refused())
            self._core.scheduler.pauses.answer()
            await asyncio.sleep(STEP_S)
            self.planner.carried_out(plan.commands)
            self.planner.reported(self.worker.reports(), time.monotonic())
            self._core.scheduler.answer_calls()
            self._refuse(self.planner.take_refused())

    @staticmethod
    def _refuse(refused: list[tuple[Any, LoRAPluginsError]]) -> None:
        for began, error in refused:
            if not began.done():
                began.set_exception(error)


def ask_all(engines: Sequence[SimulatedEngine]) -> Ask:
    """What a `PlannerClient` wants of several engines, as with data parallelism."""

    async def ask(utility: str, arguments: tuple[Any, ...]) -> Mapping[int, Any]:
        answers = await asyncio.gather(*(engine.ask(utility, arguments) for engine in engines))
        return {number: answer[0] for number, answer in enumerate(answers)}

    return ask
