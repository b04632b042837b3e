"""Carrying out the scheduler's commands: loads and slot writes in background threads, reports when they are done.

`begin_step` and `reports` are called in the engine loop; the jobs run in threads of this module, but for a load that is
shorter than a step: that one is done before the batch, since in a thread beside the batch it would make several steps
slower. On CUDA a slot is written on a side stream, which waits until everything that was launched before the command is
done with the slot; the loop's stream waits for the copies before it computes with them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from lora_plugins.errors import AdapterNotFound, NoFreeSlot
from lora_plugins.log import logger
from lora_plugins.scheduler.messages import (
    Activate,
    Activated,
    AdapterSpec,
    Command,
    Evict,
    Failed,
    Load,
    Loaded,
    Move,
    Report,
)
from lora_plugins.worker.agreement import Agreement
from lora_plugins.worker.background import BackgroundThread
from lora_plugins.worker.load_times import LoadTimes
from lora_plugins.worker.loaded_adapter import LoadedAdapter
from lora_plugins.worker.loading import explained
from lora_plugins.worker.materialise import Materialiser
from lora_plugins.worker.slot_stream import SlotStream

_POLL_INTERVAL_S = 0.0005
_FINISH_INTERVAL_S = 0.05


class SlotOwners(Protocol):
    """Which adapter each slot belongs to, for the batches that follow (`PlannedModelManager`)."""

    def own(self, slot: int, key: int | None) -> None: ...
    def reserve(self, slot: int) -> None: ...


@dataclass(eq=False, slots=True)
class HeldAdapter:
    """One adapter that the scheduler had this worker load.

    Attributes:
        adapter: None until it is loaded. slot: the one that is or will be its own.
        is_evicted: the scheduler has evicted it; jobs that still run for it change nothing. is_removed: a caller has
            removed it, and the scheduler will evict it.
        writing: held while its slot is written.
    """

    key: int
    spec: AdapterSpec
    adapter: LoadedAdapter | None = None
    slot: int | None = None
    is_evicted: bool = False
    is_removed: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _Done:
    """The end of a job."""

    entry: HeldAdapter
    report: Report
    written_event: Any = None


class Jobs:
    """Everything that this worker holds, by key, and what it is doing.

    Attributes:
        given: what callers have added past the plan, with its engine id, by number, until it is planned.

    Args:
        read: parses and checks the adapter in a directory.
        files: where directories come from. owners: notified which adapter has which slot.
        stream: writes slots. agreement: with the other workers.
    """

    def __init__(
        self,
        read: Callable[[AdapterSpec, str], LoadedAdapter],
        files: Materialiser,
        owners: SlotOwners,
        stream: SlotStream,
        agreement: Agreement,
    ) -> None:
        self.entries: dict[int, HeldAdapter] = {}
        self.given: dict[int, tuple[int, LoadedAdapter]] = {}
        self.times = LoadTimes()
        self._read = read
        self._files = files
        self._owners = owners
        self._stream = stream
        self._agreement = agreement
        self._loader = BackgroundThread("lora-plugins-loading")
        self._fetcher = BackgroundThread("lora-plugins-fetching")
        self._done: deque[_Done] = deque()
        self._something_done = threading.Event()
        self._running: set[int] = set()  # jobs that the threads have not ended yet
        self._reports: list[Report] = []

    # --- in the engine loop ---

    def begin_step(self, commands: Sequence[Command], *, has_batch: bool = False) -> None:
        """Take over what was done in the background, then carry out what the scheduler says for this step."""
        self._take_over()
        self.times.begin_step(has_batch=has_batch)
        for command in commands:
            match command:
                case Load():
                    self._load(command)
                case Activate():
                    self._activate(command)
                case Evict():
                    self._evict(command.key)
                case Move():
                    self._move(command)
        if has_batch:
            self.times.begin_batch()

    def reports(self, wait_s: float = 0.0) -> list[Report]:
        """What has been done everywhere since the last call; waits for something for so long, while a job runs."""
        self.times.end_batch()
        deadline = time.monotonic() + wait_s
        while True:
            self._take_over()
            if self._reports or not self.is_busy or time.monotonic() >= deadline:
                reports, self._reports = self._reports, []
                return reports
            if self._agreement.is_waiting:
                time.sleep(_POLL_INTERVAL_S)  # for the other workers
            else:
                self._something_done.wait(max(0.0, deadline - time.monotonic()))

    def finish(self) -> None:
        """Wait until the threads have ended all jobs of this worker; the next call for reports returns theirs."""
        while self._running:
            self._take_over()
            self._something_done.wait(_FINISH_INTERVAL_S)

    def rewrite_slots(self) -> None:
        """Write the slot of every adapter that has one, here and now."""
        for entry in self.entries.values():
            with entry.writing:  # a job that is writing it ends first
                if entry.slot is not None and entry.adapter is not None:
                    entry.adapter.write(entry.slot)

    @property
    def is_busy(self) -> bool:
        """Whether any job is not reported yet."""
        return bool(self._running or self._done or self._agreement.is_waiting)

    def close(self) -> None:
        """End the threads after the jobs that wait."""
        self._loader.close()
        self._fetcher.close()

    def _load(self, command: Load) -> None:
        entry = self.entries[command.key] = HeldAdapter(command.key, command.spec)
        is_alone = not self._running
        self._running.add(command.job)
        spec = command.spec
        if spec.given:
            self._take_given(command.job, entry)
        elif is_alone and self._files.is_here(spec.path) and self.times.take(spec.size_bytes):
            self._read_from(command.job, entry, spec.path)
            self._take_over()
        else:
            self._loader.submit(partial(self._run_load, command.job, entry))

    def _take_given(self, job: int, entry: HeldAdapter) -> None:
        _, adapter = self.given.pop(entry.spec.given, (0, None))
        entry.adapter = adapter
        if adapter is None:
            error = AdapterNotFound("an adapter that workers were given, and have lost", remedy="add it again")
            self._fail(job, entry, error)
        else:
            self._finish(_Done(entry, Loaded(job, adapter.size_bytes, adapter.is_instant, 0.0, adapter.rank)))
        self._take_over()

    @property
    def engine_ids(self) -> set[int]:
        """Of all adapters that are here, and that nobody has removed."""
        here = (it for it in self.entries.values() if it.adapter is not None and not it.is_removed)
        return {entry.spec.engine_id for entry in here} | {engine_id for engine_id, _ in self.given.values()}

    def forget(self, engine_id: int) -> None:
        """A caller has removed an adapter: what is planned of it stays until it is evicted."""
        self.forget_given([number for number, (of, _) in self.given.items() if of == engine_id])
        for entry in self.entries.values():
            entry.is_removed = entry.is_removed or entry.spec.engine_id == engine_id

    def forget_given(self, numbers: Iterable[int]) -> None:
        """Drop what callers have added, and is not planned yet."""
        for number in numbers:
            self.given.pop(number, None)

    def _activate(self, command: Activate) -> None:
        entry = self.entries.get(command.key)
        if entry is None or entry.adapter is None:
            raise RuntimeError(f"no loaded adapter {command.key} to activate")
        self._leave(entry, entry.adapter)  # an adapter has one slot
        for other in self.entries.values():
            if other.slot == command.slot:
                other.slot = None
        entry.slot = command.slot
        if command.job is None:
            entry.adapter.write(command.slot)
            self._owners.own(command.slot, command.key)
            return
        self._owners.reserve(command.slot)
        self._running.add(command.job)
        self._loader.submit(partial(self._write, command.job, entry, command.slot, self._stream.idle_event()))

    def _evict(self, key: int) -> None:
        entry = self.entries.pop(key, None)
        if entry is None:
            return
        entry.is_evicted = True
        with entry.writing:  # a job that is writing its slot ends first
            adapter, entry.adapter = entry.adapter, None
        self._leave(entry, adapter)

    def _move(self, command: Move) -> None:
        source = self.entries.pop(command.source)
        entry = self.entries.setdefault(command.key, HeldAdapter(command.key, source.spec))  # it may have been evicted
        self._leave(source, source.adapter)
        with entry.writing:
            entry.spec, entry.adapter = source.spec, source.adapter
            if entry.slot is not None and entry.adapter is not None:
                entry.adapter.write(entry.slot)

    def _leave(self, entry: HeldAdapter, adapter: LoadedAdapter | None) -> None:
        if entry.slot is not None:
            self._owners.own(entry.slot, None)
            if adapter is not None:
                adapter.leave(entry.slot)
        entry.slot = None

    def _take_over(self) -> None:
        self._something_done.clear()
        while self._done:
            done = self._done.popleft()
            entry, report = done.entry, done.report
            self._running.discard(report.job)
            self._agreement.done_here(report, is_wanted=not entry.is_evicted)
            if isinstance(report, Activated) and not entry.is_evicted and entry.slot is not None:
                self._stream.wait_for(done.written_event)
                self._owners.own(entry.slot, entry.key)
        self._reports += self._agreement.reports()

    # --- in the background ---

    def _run_load(self, job: int, entry: HeldAdapter) -> None:
        path = entry.spec.path
        if entry.spec.lora_request is not None or self._files.is_here(path):
            self._read_from(job, entry, path)
        elif os.path.isabs(path):
            self._fetcher.submit(partial(self._fetch, job, entry))  # others need not wait for it
        else:
            self._fetcher.submit(partial(self._read_from, job, entry, path))  # vLLM expands ~, and fetches from the Hub

    def _fetch(self, job: int, entry: HeldAdapter) -> None:
        spec = entry.spec
        try:
            path = self._files.fetch(spec.name, spec.path, spec.uri)
        except BaseException as error:  # noqa: BLE001 - its requests are answered with it
            self._fail(job, entry, error)
            return
        self._loader.submit(partial(self._read_from, job, entry, path))

    def _read_from(self, job: int, entry: HeldAdapter, path: str) -> None:
        """Read the adapter in this directory, in the background or in the engine loop."""
        spec, began_at = entry.spec, time.perf_counter()
        try:
            try:
                if entry.is_evicted:
                    raise _evicted(spec)
                with self.times.of_load(spec.size_bytes):
                    adapter = self._read(spec, path)
            finally:
                self._files.release(path)  # before the end of the job is known
        except BaseException as error:  # whatever vLLM raises, the engine and all others go on
            self._fail(job, entry, error)
            if not isinstance(error, Exception):
                raise  # what ends a process, where this is the engine loop
            return
        with entry.writing:
            if not entry.is_evicted:
                entry.adapter = adapter
        load_s = time.perf_counter() - began_at
        self._finish(_Done(entry, Loaded(job, adapter.size_bytes, adapter.is_instant, load_s, adapter.rank)))

    def _write(self, job: int, entry: HeldAdapter, slot: int, idle_event: Any) -> None:
        began_at = time.perf_counter()
        try:
            with entry.writing:
                if entry.adapter is None:
                    raise _evicted(entry.spec)
                event = self._stream.write(idle_event, partial(entry.adapter.write, slot))
        except BaseException as error:  # noqa: BLE001 - its requests are answered with it, all others go on
            if not entry.is_evicted:
                logger.exception("Writing a slot for adapter '%s' failed", entry.spec.name)
            self._fail(job, entry, error)
            return
        self._finish(_Done(entry, Activated(job, time.perf_counter() - began_at), event))

    def _fail(self, job: int, entry: HeldAdapter, error: BaseException) -> None:
        self._finish(_Done(entry, Failed(job, explained(error, entry.spec.name))))

    def _finish(self, done: _Done) -> None:
        self._done.append(done)  # first: who hears of it from the others finds it here
        self._agreement.publish(done.report)
        self._something_done.set()


def _evicted(spec: AdapterSpec) -> NoFreeSlot:
    return NoFreeSlot(
        "an adapter that was evicted while it was loaded",
        expected="one that is wanted",
        remedy="ask again",
        adapter=spec.name,
    )
