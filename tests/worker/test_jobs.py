"""What a worker's jobs do in the engine's loop, and what in a thread, with adapters that are small objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from lora_plugins.scheduler.messages import Activate, Activated, AdapterSpec, Evict, Failed, Load, Loaded, Move
from lora_plugins.worker.agreement import Agreement
from lora_plugins.worker.jobs import Jobs
from lora_plugins.worker.loaded_adapter import LoadedAdapter
from lora_plugins.worker.slot_stream import SlotStream

A_MB = 1_000_000


class Files:
    """Every file is here."""

    def is_here(self, path: str) -> bool:
        return True

    def release(self, name: str, path: str) -> None: ...


class Owners:
    """Notes the owner of each slot."""

    def __init__(self) -> None:
        self.of: dict[int, int | None] = {}

    def own(self, slot: int, key: int | None) -> None:
        self.of[slot] = key

    def reserve(self, slot: int) -> None:
        self.of[slot] = None


class Disk:
    """Reads an adapter unless `go` is cleared, and notes which thread does; slots of `bad` ones cannot be written."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.readers: list[threading.Thread] = []
        self.bad: set[str] = set()

    def read(self, spec: AdapterSpec, path: str) -> LoadedAdapter:
        self.readers.append(threading.current_thread())
        assert self.go.wait(30)

        def write(slot: int) -> None:
            if spec.name in self.bad:
                raise MemoryError("no room for the copy")

        return LoadedAdapter(spec.name, A_MB, False, (write,))


class FakeCuda:
    """In the place of `torch.cuda`: each thread begins on device 0, and streams enter and leave as torch's do.

    Attributes:
        used: devices that each thread has used, by the thread's name; the first use makes a context on the device.
    """

    def __init__(self) -> None:
        self.used: dict[str, set[int]] = {}
        self._local = threading.local()

    def current_stream(self) -> Any:
        index = getattr(self._local, "index", 0)
        self.used.setdefault(threading.current_thread().name, set()).add(index)
        return self.Stream(torch.device("cuda", index))

    def set_device(self, device: torch.device) -> None:
        self._local.index = device.index

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(device=device, wait_event=lambda _: None, record_event=lambda: None)

    @contextmanager
    def stream(self, entered: Any) -> Iterator[None]:
        left = self.current_stream()
        self.set_device(entered.device)
        yield
        self.set_device(left.device)


def jobs_of(disk: Disk, agreement: Agreement, device: str = "cpu") -> Any:
    return Jobs(disk.read, Files(), Owners(), SlotStream(torch.device(device)), agreement)  # type: ignore[arg-type]


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def jobs(disk: Disk) -> Iterator[Any]:
    made = jobs_of(disk, Agreement())
    yield made
    made.close()


def spec(key: int) -> AdapterSpec:
    return AdapterSpec(key, f"adapter-{key}", f"/{key}", size_bytes=A_MB)


def load(jobs: Any, key: int) -> None:
    jobs.begin_step([Load(spec(key), key, job=key)])
    (report,) = jobs.reports(10.0)
    assert isinstance(report, Loaded)


def test_no_step_reads_a_disk_however_fast_it_was(jobs: Any, disk: Disk) -> None:
    for key in range(1, 21):
        load(jobs, key)
        time.sleep(0.002)  # the batch is longer than the load
        assert jobs.reports() == []
    disk.go.clear()
    jobs.begin_step([Load(spec(21), 21, job=21)])  # everybody would wait for one slow load
    disk.go.set()
    jobs.finish()
    assert len(disk.readers) == 21
    assert threading.current_thread() not in disk.readers


def test_a_slot_is_written_while_another_adapter_is_read(jobs: Any, disk: Disk) -> None:
    load(jobs, 1)
    disk.go.clear()
    jobs.begin_step([Load(spec(2), 2, job=2), Activate(1, 0, job=3)])
    assert [type(report) for report in jobs.reports(10.0)] == [Activated]
    disk.go.set()
    jobs.finish()
    assert [type(report) for report in jobs.reports()] == [Loaded]


def test_what_is_evicted_while_it_is_read_is_never_here(jobs: Any, disk: Disk) -> None:
    load(jobs, 1)
    disk.go.clear()
    jobs.begin_step([Load(spec(2), 2, job=2)])
    while len(disk.readers) < 2:
        time.sleep(0.001)
    jobs.begin_step([Evict(2), Activate(1, 0)])
    disk.go.set()
    jobs.finish()
    assert jobs.reports() == []
    assert jobs.engine_ids == {1}
    assert jobs._owners.of == {0: 1}


class Workers:
    """The `Jobs` of some workers, each with a disk of its own; rank `asked` reports."""

    def __init__(self, count: int, asked: int) -> None:
        self.store, self.asked = HashStore(), asked
        self.disks = [Disk() for _ in range(count)]
        self.jobs: list[Any] = []
        for rank, disk in enumerate(self.disks):
            together = Agreement(rank, count, self.store, "engine", is_reporting=rank == asked)
            self.jobs.append(jobs_of(disk, together if count > 1 else Agreement()))

    def step(self, *commands: Any, rewriting: bool = False) -> list[Any]:
        """What the scheduler hears with the output of a step with a batch, to which all contribute.

        The reporting worker goes first: it has launched its batch before the others begin.
        """
        asked, late = self.jobs[self.asked], None
        for of in sorted(self.jobs, key=lambda of: of is not asked):
            of.rewrite_slots() if rewriting else of.begin_step(commands)
            of.finish()
            unconfirmed = of.take_unconfirmed()
            late = unconfirmed or late
            assert unconfirmed is None or len(self.jobs) > 1, "a worker alone asks nobody"
            assert unconfirmed is None or of is asked, "of a worker whose output nobody reads"
        return asked.reports() + (late() if late is not None else [])

    def load(self, *keys: int) -> None:
        assert len(self.step(*(Load(spec(key), key, job=key) for key in keys))) == len(keys)

    def owners(self) -> list[dict[int, int | None]]:
        return [of._owners.of for of in self.jobs]


@pytest.fixture(params=[(1, 0), (2, 0), (2, 1)], ids=["alone", "first reports", "last reports"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = Workers(*request.param)
    yield made
    for of in made.jobs:
        of.close()


@pytest.mark.parametrize("failing", [{0}, {-1}, {0, -1}], ids=["first", "last", "both"])
def test_a_slot_that_is_not_written_costs_one_adapter(workers: Workers, failing: set[int]) -> None:
    """Its requests are told with this very step: the batch computed half an adapter, or none, on that worker."""
    workers.load(1, 2)
    bad = [rank in {of % len(workers.jobs) for of in failing} for rank in range(len(workers.jobs))]
    for rank in failing:
        workers.disks[rank].bad.add("adapter-1")
    reports = workers.step(Activate(1, 0), Activate(2, 1))
    assert {(it.job, it.key, it.error.code, it.error.adapter) for it in reports} == {(0, 1, "L004", "adapter-1")}
    assert [of.lost for of in workers.jobs] == [{1} if is_bad else set() for is_bad in bad]
    assert workers.owners() == [{0: None if is_bad else 1, 1: 2} for is_bad in bad]
    assert [of.engine_ids for of in workers.jobs] == [{2} if is_bad else {1, 2} for is_bad in bad]
    assert workers.step() == [], "it is said once"
    # The scheduler has planned a step further, and hears of it only then.
    (failed,) = workers.step(Activate(1, 0, job=7))
    assert (failed.job, isinstance(failed, Failed)) == (7, True)
    for disk in workers.disks:
        disk.bad.clear()
    workers.step(Evict(1))
    assert not any(of.lost for of in workers.jobs)
    workers.load(1)
    assert workers.step(Activate(1, 0)) == []
    assert workers.owners() == [{0: 1, 1: 2}] * len(workers.jobs)
    assert workers.store.num_keys() <= 2, "HashStore has a key of its own, and there is the count"


@pytest.mark.parametrize("rank", [0, -1], ids=["first", "last"])
def test_swaps_and_wake_ups_lose_what_one_cannot_write(workers: Workers, rank: int) -> None:
    workers.load(1, 2, 3)
    assert workers.step(Activate(1, 0), Activate(3, 1)) == []
    workers.disks[rank].bad.add("adapter-2")
    (failed,) = workers.step(Move(1, 2))
    assert (failed.key, failed.error.code, failed.error.adapter) == (1, "L004", "adapter-2")
    assert workers.owners()[rank] == {0: None, 1: 3}
    workers.disks[rank].bad.add("adapter-3")
    assert [it.key for it in workers.step(rewriting=True)] == [3]
    assert workers.owners()[rank] == {0: None, 1: None}


def test_others_are_asked_where_a_step_writes_a_slot() -> None:
    two = Workers(2, asked=0)
    two.load(1)
    asked = two.jobs[two.asked]
    for commands in ([], [Activate(1, 0, job=5)], [Evict(1)]):
        asked.begin_step(commands)
        asked.finish()
        assert asked.take_unconfirmed() is None
    two.load(2)
    asked.begin_step([Activate(2, 0)])
    assert asked.take_unconfirmed() is not None
    assert asked.take_unconfirmed() is None
    for of in two.jobs:
        of.close()


def test_a_slot_that_a_thread_cannot_write_costs_one_adapter(jobs: Any, disk: Disk) -> None:
    load(jobs, 1)
    disk.bad.add("adapter-1")
    jobs.begin_step([Activate(1, 0, job=2)])
    (failed,) = jobs.reports(10.0)
    assert (failed.job, failed.key, failed.error.code) == (2, 0, "L004")
    disk.bad.clear()
    jobs.begin_step([Activate(1, 0, job=3)])
    (report,) = jobs.reports(10.0)
    assert isinstance(report, Activated)


def test_threads_use_no_device_but_their_own(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's context on device 0 would take half a GiB there, after the KV cache was given all that is free."""
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    cuda.set_device(torch.device("cuda", 1))  # as the worker of rank 1 does, in its own thread
    jobs = jobs_of(disk, Agreement(), "cuda:1")
    try:
        load(jobs, 1)
        jobs.begin_step([Activate(1, 0, job=2)])
        (report,) = jobs.reports(10.0)
        assert isinstance(report, Activated)
        for thread in (jobs._loader, jobs._fetcher):
            done = threading.Event()
            thread.submit(lambda done=done: (cuda.current_stream(), done.set()))
            assert done.wait(10.0)
    finally:
        jobs.close()
    used = {name: used for name, used in cuda.used.items() if name.startswith("lora-plugins")}
    assert used == {f"lora-plugins-{does}": {1} for does in ("loading", "fetching", "writing")}
