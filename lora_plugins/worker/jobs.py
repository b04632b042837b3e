"""Carrying out the scheduler's commands: loads and slot writes in background threads, reports when they are done.

`begin_step` and `reports` are called in the engine loop; the jobs run in threads of this module. On CUDA a slot is
written on a side stream, which waits until everything that was launched before the command is done with the slot; the
loop's stream waits for the copies before it computes with them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from lora_plugins.errors import NoFreeSlot
from lora_plugins.log import logger
from lora_plugins.scheduler.early_load_reports import send_early
from lora_plugins.scheduler.messages import (
    Activate,
    Activated,
    AdapterSpec,
    Command,
    Evict,
    Failed,
    Load,
    Loaded,
    Report,
    ReportAddress,
)
from lora_plugins.worker.agreement import Agreement
from lora_plugins.worker.background import BackgroundThread
from lora_plugins.worker.loaded_adapter import LoadedAdapter
from lora_plugins.worker.loading import explained
from lora_plugins.worker.materialise import Materialiser
from lora_plugins.worker.slot_stream import SlotStream

_POLL_INTERVAL_S = 0.0005
_FINISH_INTERVAL_S = 0.05


class SlotOwners(Protocol):
    """Which adapter each slot belongs to, for the batches that follow (`PlannedModelManager`)."""

    def own(self, slot: int, engine_id: int | None) -> None: ...
    def reserve(self, slot: int) -> None: ...


@dataclass(eq=False, slots=True)
class Entry:
    """One adapter that the scheduler had this worker load.

    Attributes:
        adapter: None until it is loaded. slot: the one that is or will be its own.
        is_evicted: the scheduler has evicted it; jobs that still run for it change nothing.
        writing: held while its slot is written.
        early_report_to: who waits for the end of its load.
    """

    spec: AdapterSpec
    adapter: LoadedAdapter | None = None
    slot: int | None = None
    is_evicted: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)
    early_report_to: ReportAddress | None = None


@dataclass(frozen=True, slots=True)
class _Done:
    """The end of a job, or of its first phase: `is_last` says which. `spare_slot` was reserved and is not needed."""

    entry: Entry
    report: Report
    is_last: bool = True
    spare_slot: int | None = None
    written_event: Any = None


@dataclass(frozen=True, slots=True)
class _LoadJob:
    job: int
    entry: Entry
    slot: int | None
    idle_event: Any


class Jobs:
    """Everything that this worker holds, by engine id, and what it is doing.

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
        self.entries: dict[int, Entry] = {}
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

    def begin_step(self, commands: Sequence[Command]) -> None:
        """Take over what was done in the background, then carry out what the scheduler says for this step."""
        self._take_over()
        for command in commands:
            match command:
                case Load():
                    self._load(command)
                case Activate():
                    self._activate(command)
                case Evict():
                    self._evict(command.engine_id)

    def reports(self, wait_s: float = 0.0) -> list[Report]:
        """What has been done everywhere since the last call; waits for something for so long, while a job runs."""
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
        entry = self.entries[command.spec.engine_id] = Entry(
            command.spec, slot=command.slot, early_report_to=command.early_report_to
        )
        idle_event = None if command.slot is None else self._reserve(command.slot, entry)
        self._running.add(command.job)
        self._loader.submit(partial(self._run_load, command.job, entry, command.slot, idle_event))

    def _activate(self, command: Activate) -> None:
        entry = self.entries.get(command.engine_id)
        if entry is None or entry.adapter is None:
            raise RuntimeError(f"no loaded adapter {command.engine_id} to activate")
        if command.job is None:
            self._displace(command.slot, entry)
            entry.adapter.write(command.slot)
            self._own(command.slot, entry)
            return
        idle_event = self._reserve(command.slot, entry)
        self._running.add(command.job)
        self._loader.submit(partial(self._write, command.job, entry, command.slot, idle_event))

    def _evict(self, engine_id: int) -> None:
        entry = self.entries.pop(engine_id, None)
        if entry is None:
            return
        entry.is_evicted = True
        with entry.writing:  # a job that is writing its slot ends first
            adapter, entry.adapter = entry.adapter, None
        if entry.slot is not None:
            self._owners.own(entry.slot, None)
            if adapter is not None:
                adapter.leave(entry.slot)

    def _reserve(self, slot: int, entry: Entry) -> Any:
        self._displace(slot, entry)
        self._owners.reserve(slot)
        return self._stream.idle_event()

    def _displace(self, slot: int, entry: Entry) -> None:
        for other in self.entries.values():
            if other.slot == slot:
                other.slot = None
        entry.slot = slot

    def _own(self, slot: int, entry: Entry) -> None:
        self._owners.own(slot, entry.spec.engine_id)

    def _take_over(self) -> None:
        self._something_done.clear()
        while self._done:
            done = self._done.popleft()
            entry, report = done.entry, done.report
            if done.is_last:
                self._running.discard(report.job)
            self._agreement.done_here(report, is_last=done.is_last, is_wanted=not entry.is_evicted)
            if entry.is_evicted:
                continue
            if done.spare_slot is not None and entry.slot == done.spare_slot:
                entry.slot = None
                self._owners.own(done.spare_slot, None)
            if isinstance(report, Activated) and entry.slot is not None:
                self._stream.wait_for(done.written_event)
                self._own(entry.slot, entry)
        self._reports += self._agreement.reports()

    # --- in the background ---

    def _run_load(self, job: int, entry: Entry, slot: int | None, idle_event: Any) -> None:
        path, load = entry.spec.path, partial(self._read_from, _LoadJob(job, entry, slot, idle_event))
        if self._files.is_here(path):
            load(path)
        elif os.path.isabs(path):
            self._fetcher.submit(partial(self._fetch, job, entry, load))  # others need not wait for it
        else:
            self._fetcher.submit(partial(load, path))  # vLLM expands ~, and fetches from the Hub

    def _fetch(self, job: int, entry: Entry, load: Callable[[str], None]) -> None:
        spec = entry.spec
        try:
            path = self._files.fetch(spec.name, spec.path, spec.uri)
        except BaseException as error:  # noqa: BLE001 - its requests are answered with it
            self._fail(job, entry, error)
            return
        self._loader.submit(partial(load, path))

    def _read_from(self, load: _LoadJob, path: str) -> None:
        entry, began_at = load.entry, time.perf_counter()
        try:
            try:
                if entry.is_evicted:
                    raise _evicted(entry.spec)
                adapter = self._read(entry.spec, path)
            finally:
                self._files.release(path)  # before the end of the job is known
        except BaseException as error:  # noqa: BLE001 - whatever vLLM raises, the engine and all others go on
            self._fail(load.job, entry, error)
            return
        with entry.writing:
            if not entry.is_evicted:  # else its slot may be another's by now
                entry.adapter = adapter
        load_s = time.perf_counter() - began_at
        loaded = Loaded(load.job, adapter.size_bytes, adapter.is_instant, load_s, adapter.rank)
        if load.slot is None or adapter.is_instant:
            self._finish(_Done(entry, loaded, spare_slot=load.slot))
            return
        self._finish(_Done(entry, loaded, is_last=False))
        self._write(load.job, entry, load.slot, load.idle_event)

    def _write(self, job: int, entry: Entry, slot: int, idle_event: Any) -> None:
        began_at = time.perf_counter()
        try:
            with entry.writing:
                if entry.adapter is None:
                    self._finish(_Done(entry, Failed(job, _evicted(entry.spec))))
                    return
                event = self._stream.write(idle_event, partial(entry.adapter.write, slot))
        except BaseException as error:  # noqa: BLE001 - its requests are answered with it, all others go on
            logger.exception("Writing a slot for adapter '%s' failed", entry.spec.name)
            self._fail(job, entry, error)
            return
        self._finish(_Done(entry, Activated(job, time.perf_counter() - began_at), written_event=event))

    def _fail(self, job: int, entry: Entry, error: BaseException) -> None:
        self._finish(_Done(entry, Failed(job, explained(error, entry.spec.name))))

    def _finish(self, done: _Done) -> None:
        self._done.append(done)  # first: who hears of it from the others finds it here
        self._agreement.publish(done.report, is_last=done.is_last)
        self._something_done.set()
        if done.entry.early_report_to is not None and isinstance(done.report, Loaded | Failed):
            send_early(done.entry.early_report_to, done.report)


def _evicted(spec: AdapterSpec) -> NoFreeSlot:
    return NoFreeSlot(
        "an adapter that was evicted while it was loaded",
        expected="one that is wanted",
        remedy="ask again",
        adapter=spec.name,
    )
