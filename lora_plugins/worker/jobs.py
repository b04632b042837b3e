"""Carries out the scheduler's commands in a worker: loads adapters and writes slots, and reports the results.

The worker's engine loop calls `begin_step` with the commands of a step before the step's batch, and `reports` after
the batch. A command with a job number is a job: a thread of `Jobs` does the work, and a `Report` of the same number
goes back to the scheduler once all workers of the engine have ended the job. A command without a number is carried out
at once, in the loop. The loop never reads a disk.

On CUDA a side stream writes a slot. The side stream waits until all work launched before the command has finished with
the slot; the loop's stream waits for the copies before a batch computes with the slot. The host waits for neither: a
job ends once the copies are launched, and an adapter's host memory is kept until the device has read it.
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
from lora_plugins.worker.adapter_checks import explained
from lora_plugins.worker.agreement import Agreement
from lora_plugins.worker.background_thread import BackgroundThread
from lora_plugins.worker.given_to_worker import GivenAdapters
from lora_plugins.worker.loaded_adapter import LoadedAdapter
from lora_plugins.worker.loop_work import LoopWork
from lora_plugins.worker.missing_files import MissingFilesFetcher
from lora_plugins.worker.slot_stream import SlotStream

_POLL_INTERVAL_S = 0.0005  # several workers' results come by a key-value store, which wakes nobody
_FINISH_INTERVAL_S = 0.05  # at most; the end of a job in this worker wakes `finish` at once


class SlotOwners(Protocol):
    """The owners of slots in the batches that follow (`PlannedModelManager`)."""

    def own(self, slot: int, key: int | None) -> None: ...
    def reserve(self, slot: int) -> None: ...


@dataclass(eq=False, slots=True)
class WorkerAdapter:
    """An adapter that this worker loads, or has loaded, for the scheduler.

    Attributes:
        adapter: None until the load has ended. slot: the present or coming slot.
        is_evicted: the scheduler has evicted the adapter; jobs that still run change nothing.
        is_removed: a caller has removed the adapter, and the scheduler will evict it.
        writing: held while the adapter's slot is written, on CUDA while the copies are launched.
        written_event: the device reaches the event after the copies of the last write in the background; None before
            such a write, and without CUDA.
    """

    key: int
    spec: AdapterSpec
    adapter: LoadedAdapter | None = None
    slot: int | None = None
    is_evicted: bool = False
    is_removed: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)
    written_event: Any = None


class Jobs:
    """Everything that this worker holds, by key, and its present jobs.

    Attributes:
        given: adapters that callers have added past the plan, until planned.
        lost: keys of adapters whose slot could not be written in a step. Batches may name a lost adapter until the
            scheduler evicts it; its rows are computed without an adapter, and answered with an error.
        loop_work: what threads ask of the engine loop.

    Args:
        read: parses and checks the adapter in a directory.
        files: fetches directories. owners: notified which adapter has which slot.
        stream: writes slots. agreement: with the other workers.
    """

    def __init__(
        self,
        read: Callable[[AdapterSpec, str], LoadedAdapter],
        files: MissingFilesFetcher,
        owners: SlotOwners,
        stream: SlotStream,
        agreement: Agreement,
    ) -> None:
        self.entries: dict[int, WorkerAdapter] = {}
        self.given = GivenAdapters()
        self.lost: set[int] = set()
        self._read = read
        self._files = files
        self._owners = owners
        self._stream = stream
        self._agreement = agreement
        self._loader = BackgroundThread("lora-plugins-loading", stream.begin_thread)
        self._fetcher = BackgroundThread("lora-plugins-fetching", stream.begin_thread)
        self._writer = BackgroundThread("lora-plugins-writing", stream.begin_thread)
        self._done: deque[tuple[WorkerAdapter, Report]] = deque()
        self._something_done = threading.Event()
        self.loop_work = LoopWork(self._something_done.set)
        self._running: set[int] = set()  # jobs that still run in a thread
        # Adapters that nothing refers to any more, and events after the last copies that read their host memory.
        self._dropped: deque[tuple[Any, LoadedAdapter | None]] = deque()
        self._reports: list[Report] = []
        self._is_unconfirmed = False  # whether a slot was written in the loop, which may have failed in other workers

    # --- in the engine loop ---

    def begin_step(self, commands: Sequence[Command]) -> None:
        """Take over results of the background, then carry out the scheduler's commands for this step."""
        self._take_over()
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

    def reports(self, wait_s: float = 0.0) -> list[Report]:
        """Return the jobs done by all workers since the last call; wait up to `wait_s` while a job runs."""
        deadline = time.monotonic() + wait_s
        while True:
            self._take_over()
            if self._reports or not self.is_busy or time.monotonic() >= deadline:
                reports, self._reports = self._reports, []
                return reports
            if self._agreement.is_waiting:
                time.sleep(_POLL_INTERVAL_S)
            else:
                self._something_done.wait(max(0.0, deadline - time.monotonic()))

    def take_unconfirmed(self) -> Callable[[], list[Report]] | None:
        """Return a function whose reports name the slots that other workers have lost, to call after the batch.

        None where this step wrote no slot in the loop, or where this worker reports for no others.
        """
        is_unconfirmed, self._is_unconfirmed = self._is_unconfirmed, False
        reports_for_others = self._agreement.world_size > 1 and self._agreement.is_reporting
        return self._agreement.lost_elsewhere if is_unconfirmed and reports_for_others else None

    def finish(self) -> None:
        """Wait until the threads have ended all jobs; the next call of `reports` returns the results."""
        while self._running:
            self._take_over()
            self._something_done.wait(_FINISH_INTERVAL_S)

    def rewrite_slots(self) -> None:
        """Write the slot of every adapter with a slot, here and now."""
        for entry in self.entries.values():
            with entry.writing:  # wait for the end of a job that writes the slot
                self._write_now(entry)

    @property
    def is_busy(self) -> bool:
        """Whether a job is still to be reported."""
        return bool(self._running or self._done or self._agreement.is_waiting)

    @property
    def engine_ids(self) -> set[int]:
        """The engine ids of adapters in this worker's host memory that no caller has removed."""
        here = (it for it in self.entries.values() if it.adapter is not None and not it.is_removed)
        return {entry.spec.engine_id for entry in here} | self.given.engine_ids

    def hide(self, engine_id: int) -> None:
        """Note that a caller has removed an adapter; its planned generations stay until the scheduler evicts them."""
        self.given.remove(engine_id)
        for entry in self.entries.values():
            entry.is_removed = entry.is_removed or entry.spec.engine_id == engine_id

    def close(self) -> None:
        """End the threads after the waiting jobs."""
        self.loop_work.close()
        self._loader.close()
        self._fetcher.close()
        self._writer.close()

    def _load(self, command: Load) -> None:
        entry = self.entries[command.key] = WorkerAdapter(command.key, command.spec)
        self._running.add(command.job)
        if command.spec.given:
            self._take_given(command.job, entry)
        else:
            self._start(self._loader, self._begin_load, command.job, entry)

    def _take_given(self, job: int, entry: WorkerAdapter) -> None:
        adapter = entry.adapter = self.given.take(entry.spec.given)
        if adapter is None:
            # No store has the adapters that callers gave: the error asks the caller for the adapter.
            error = AdapterNotFound("an adapter that workers were given, and have lost", remedy="add it again")
            self._fail(job, entry, error)
        else:
            self._finish(entry, Loaded(job, adapter.size_bytes, adapter.is_instant, load_s=0.0, rank=adapter.rank))
        self._take_over()

    def _activate(self, command: Activate) -> None:
        entry = self.entries.get(command.key)
        if entry is not None:
            self._settle(entry)
        if entry is not None and command.key in self.lost:
            if command.job is not None:  # without a job, `_lose` has reported the adapter already
                self._running.add(command.job)
                self._fail(command.job, entry, _evicted())
            return
        if entry is None or entry.adapter is None:
            raise RuntimeError(f"no loaded adapter {command.key} to activate")
        self._leave(entry)  # an adapter has a single slot
        for other in self.entries.values():
            if other.slot == command.slot:
                other.slot = None
        entry.slot = command.slot
        # Without a job the slot is written here, before this step's batch.
        if command.job is None:
            self._owners.own(command.slot, command.key)
            self._write_now(entry)
            return
        # Reserved first: the slot has no owner while the thread writes, so no batch reads half an adapter.
        self._owners.reserve(command.slot)
        self._running.add(command.job)
        self._start(self._writer, self._write, command.job, entry, command.slot, self._stream.idle_event())

    def _settle(self, entry: WorkerAdapter) -> None:
        """Settle an adapter before its slot is written, in all workers; an adapter that cannot be settled is lost."""
        try:
            if entry.adapter is not None:
                entry.adapter.settle()
        except Exception as error:  # noqa: BLE001 - as in `_write_now`
            self._is_unconfirmed = True
            self._lose(entry, error)

    def _write_now(self, entry: WorkerAdapter) -> None:
        """Write an adapter's slot, if it has one, in the engine loop; an adapter that cannot be written is lost."""
        self._is_unconfirmed = True
        if entry.slot is None or entry.adapter is None:
            return
        try:
            entry.adapter.write(entry.slot)
        except Exception as error:  # noqa: BLE001 - the error answers the adapter's requests, all others go on
            logger.exception("Writing a slot for adapter '%s' failed", entry.spec.name)
            self._lose(entry, error)

    def _lose(self, entry: WorkerAdapter, error: Exception) -> None:
        adapter, entry.adapter = entry.adapter, None
        self._leave(entry)
        self._drop(adapter)
        self.lost.add(entry.key)
        # Job 0 stands for no job: the key names the adapter.
        failed = Failed(0, explained(error, entry.spec.name), entry.key)
        self._reports.append(failed)
        self._agreement.publish_lost(failed)

    def _evict(self, key: int) -> None:
        self.lost.discard(key)
        entry = self.entries.pop(key, None)
        if entry is None:
            return
        entry.is_evicted = True
        with entry.writing:  # wait for the end of a job that writes the slot
            adapter, entry.adapter = entry.adapter, None
        self._stream.wait_for(entry.written_event)  # the slot's next write may be on this stream
        self._leave(entry)
        self._drop(adapter)

    def _drop(self, adapter: LoadedAdapter | None) -> None:
        """Let host memory go once the device has made all copies that are launched; at once without CUDA."""
        if (event := self._stream.idle_event()) is not None:
            self._dropped.append((event, adapter))

    def _move(self, command: Move) -> None:
        source = self.entries.pop(command.source)
        # Requests that run with `key` compute with `source`'s weights from this step's batch on. While an adapter is
        # paused, `key` may have been evicted.
        entry = self.entries.setdefault(command.key, WorkerAdapter(command.key, source.spec))
        self._leave(source)
        with entry.writing:
            self._drop(entry.adapter)
            entry.spec, entry.adapter = source.spec, source.adapter
            if command.source in self.lost:  # no worker computes with a lost adapter, under this key either
                self.lost.discard(command.source)
                self._lose(entry, _evicted())
            self._settle(entry)
            self._write_now(entry)

    def _leave(self, entry: WorkerAdapter) -> None:
        if entry.slot is not None:
            self._owners.own(entry.slot, None)
        entry.slot = None

    def _take_over(self) -> None:
        # Cleared before the queue is read: a job that ends in between sets the event again, and is not missed.
        self._something_done.clear()
        self.loop_work.do_some()
        # `query`: whether the device has reached the event, so that nothing reads the host memory any more.
        while self._dropped and self._dropped[0][0].query():
            self._dropped.popleft()
        while self._done:
            entry, report = self._done.popleft()
            self._running.discard(report.job)
            self._agreement.done_here(report, is_wanted=not entry.is_evicted)
            # An evicted adapter's slot may have another owner by now.
            if isinstance(report, Activated) and not entry.is_evicted and entry.slot is not None:
                self._stream.wait_for(entry.written_event)
                self._owners.own(entry.slot, entry.key)
        self._reports += self._agreement.reports()

    # --- in the background ---

    def _start(
        self, thread: BackgroundThread, work: Callable[..., Report | None], job: int, entry: WorkerAdapter, *args: Any
    ) -> None:
        """Have a thread do the job, or the rest of the job, by `work(job, entry, *args)`; callable from any thread."""
        thread.submit(partial(self._run, job, entry, partial(work, job, entry, *args)))

    def _run(self, job: int, entry: WorkerAdapter, work: Callable[[], Report | None]) -> None:
        """Do a part of a job; the job ends with a report, or with an error, and goes on elsewhere without either."""
        try:
            report = work()
        except BaseException as error:  # noqa: BLE001 - whatever vLLM raises, the engine and all other adapters go on
            self._fail(job, entry, error)
        else:
            if report is not None:
                self._finish(entry, report)

    def _begin_load(self, job: int, entry: WorkerAdapter) -> Report | None:
        path = entry.spec.path
        if entry.spec.lora_request is not None or self._files.is_here(path):
            return self._read_from(job, entry, path)
        # vLLM itself expands ~, and fetches from the Hub.
        work = self._fetch if os.path.isabs(path) else partial(self._read_from, path=path)
        self._start(self._fetcher, work, job, entry)  # in a thread of its own: other loads need not wait
        return None

    def _fetch(self, job: int, entry: WorkerAdapter) -> None:
        path = self._files.fetch(entry.spec.name, entry.spec.path, entry.spec.uri)
        self._start(self._loader, self._read_from, job, entry, path)

    def _read_from(self, job: int, entry: WorkerAdapter, path: str) -> Report:
        spec, began_at = entry.spec, time.perf_counter()
        try:
            if entry.is_evicted:
                raise _evicted()
            adapter = self._read(spec, path)
        finally:
            # Before the end of the job is known: whoever waits for the job then finds the lease ended.
            self._files.release(spec.name, path)
        with entry.writing:
            if not entry.is_evicted:
                entry.adapter = adapter
        load_s = time.perf_counter() - began_at
        return Loaded(job, adapter.size_bytes, adapter.is_instant, load_s, adapter.rank)

    def _write(self, job: int, entry: WorkerAdapter, slot: int, idle_event: Any) -> Report:
        began_at = time.perf_counter()
        with entry.writing:
            if entry.adapter is None:
                raise _evicted()
            try:
                self._stream.write(idle_event, partial(entry.adapter.write, slot))
            except BaseException:
                logger.exception("Writing a slot for adapter '%s' failed", entry.spec.name)
                raise
            finally:
                # Of half a write too: its copies read host memory, and write the slot, later than the job ends.
                entry.written_event = self._stream.written_event()
        return Activated(job, time.perf_counter() - began_at)

    def _fail(self, job: int, entry: WorkerAdapter, error: BaseException) -> None:
        # `explained` makes one of our errors: the report crosses processes, and a class of vLLM's or torch's may not
        # unpickle.
        self._finish(entry, Failed(job, explained(error, entry.spec.name)))

    def _finish(self, entry: WorkerAdapter, report: Report) -> None:
        # First: the engine loop may hear of the job from another worker's store entry at once.
        self._done.append((entry, report))
        self._agreement.publish(report)
        self._something_done.set()


def _evicted() -> NoFreeSlot:
    return NoFreeSlot(
        "an adapter that was evicted while it was loaded",
        expected="one that is wanted",
        remedy="ask again",
    )
