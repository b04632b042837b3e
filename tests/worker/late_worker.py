"""A worker's `Jobs` on simulated streams: the engine's loop runs ahead of the device, and writes run beside batches.

Everything is said by a seed: the background threads do their work while the loop waits for them, up to the middle of a
write, which stays there until the loop's next step.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lora_plugins.kernels.slot_ranks import after_writing
from lora_plugins.scheduler.messages import AdapterSpec, Command, Load, Move
from lora_plugins.worker.agreement import Agreement
from lora_plugins.worker.jobs import Jobs
from lora_plugins.worker.loaded_adapter import LoadedAdapter
from lora_plugins.worker.slot_stream import SlotStream
from tests.simulated_streams import SimulatedStreams

LAYERS = 4  # the last one has the ranks, which are written last
LIMIT_S = 30


class Owners:
    """The owner of each slot; a slot being written has a negative one."""

    def __init__(self, slots: int) -> None:
        self.of: list[int | None] = [None] * slots

    def own(self, slot: int, key: int | None) -> None:
        self.of[slot] = key

    def reserve(self, slot: int) -> None:
        self.of[slot] = -1 - slot


class HostMemory:
    """The page-locked memory of an adapter: used for something else once nothing refers to it."""

    def __init__(self, weights: str) -> None:
        self.weights = weights


class LateWorker:
    """Carries out a planner's commands as one worker, and computes a batch in each step (`SimulatedWorkers`).

    Attributes:
        wrong: what a batch or a copy found that is another's. reads: of layers of slots.
    """

    def __init__(self, streams: SimulatedStreams, slots: int, seed: int, running: Callable[[], Iterable[int]]) -> None:
        self.choose = random.Random(seed)
        self.streams = streams
        self.owners = Owners(slots)
        self.wrong: list[str] = []
        self.reads = 0
        self._slots = [[""] * LAYERS for _ in range(slots)]
        self._weights: dict[int, str] = {}  # that batches expect, by key
        self._running = running
        self._loads: set[int] = set()  # jobs
        self._reports: deque[list[Any]] = deque([[]])  # of the step before: the loop hears of it a step later
        self._ends: deque[Any] = deque()  # of the batches in flight
        self._go_on = threading.Event()
        self._stays = threading.Event()
        stream = SlotStream(torch.device("cuda"))
        for each in streams.all:
            each.speed = self.choose.choice([0.1, 1.0])
        self.jobs = Jobs(self._read, self, self.owners, stream, Agreement())  # type: ignore[arg-type]

    next_report_at = None

    # --- as the loop's steps ---

    def carry_out(self, commands: Iterable[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, Load):
                self._weights[command.key] = command.spec.path
                self._loads.add(command.job)
            elif isinstance(command, Move):
                self._weights[command.key] = self._weights.pop(command.source)
        self._let_thread_go_on()
        self.jobs.begin_step(list(commands))
        self._await_thread()

    def reports(self, now: float) -> list[Any]:
        """Compute the batch, and return the reports of the step before."""
        self._compute()
        for _ in range(self.choose.choice([0, 0, 1, 3, 30])):
            self.streams.step(self.choose)
        if self.choose.random() < 0.5:
            self._let_thread_go_on()
        self._await_thread()
        self._reports.append(self.jobs.reports())
        return self._reports.popleft()

    def _compute(self) -> None:
        """Launch a batch, which reads the slots of all owners; the output of the last but one is here before."""
        while len(self._ends) > 1 and not self._ends[0].query():
            self.streams.step(self.choose)
        if len(self._ends) > 1:
            self._ends.popleft()
        for key in self._running():
            if key not in self.owners.of and key not in self.jobs.lost:
                self.wrong.append(f"a batch with {key}, in no slot of {self.owners.of}")
        for layer in range(LAYERS):
            for slot, key in enumerate(self.owners.of):
                if key is not None and key >= 0:
                    self._launch_read(slot, layer, self._weights[key])
        self._ends.append(self.streams.main.record_event())

    def _launch_read(self, slot: int, layer: int, want: str) -> None:
        def read() -> None:
            self.reads += 1
            if (found := self._slots[slot][layer]) != want:
                self.wrong.append(f"slot {slot}, layer {layer}: {found or 'nothing'} in the place of {want}")

        self.streams.main.give(read)

    def close(self) -> None:
        self._let_thread_go_on()
        self.jobs.close()
        while self.streams.step(self.choose):
            pass

    # --- in the background ---

    def is_here(self, path: str) -> bool:
        return True

    def release(self, name: str, path: str) -> None: ...

    def _read(self, spec: AdapterSpec, path: str) -> LoadedAdapter:
        memory, stays_at = HostMemory(path), self.choose.choice([None, *range(LAYERS)])

        def copy(slot: int, layer: int) -> None:
            if layer == stays_at and threading.current_thread() is not threading.main_thread():
                self._stay()
            kept = weakref.ref(memory)  # the device has an address, and keeps nothing

            def copied() -> None:
                if kept() is None:
                    self.wrong.append(f"a copy of {path} from memory that something else has by now")
                self._slots[slot][layer] = path

            self.streams.current.give(copied)

        def write(slot: int) -> None:
            after_writing(("ranks", slot), lambda: copy(slot, LAYERS - 1))
            for layer in range(LAYERS - 1):
                copy(slot, layer)
            if spec.name == "bad":
                raise MemoryError("no room for the rest")

        return LoadedAdapter(spec.name, spec.size_bytes, False, (write,))

    # --- between both ---

    def _stay(self) -> None:
        self._go_on.clear()
        self._stays.set()
        assert self._go_on.wait(LIMIT_S)
        self._stays.clear()

    def _let_thread_go_on(self) -> None:
        if self._stays.is_set():
            self._stays.clear()
            self._go_on.set()

    def _await_thread(self) -> None:
        until = time.monotonic() + LIMIT_S
        while True:
            unfinished = self.jobs._running - {report.job for _, report in list(self.jobs._done)}
            if not unfinished & self._loads and (self._stays.is_set() or not unfinished):
                return
            assert time.monotonic() < until
            time.sleep(0)
