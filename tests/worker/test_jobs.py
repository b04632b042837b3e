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
    """Reads an adapter in `read_s`, and notes which thread does; slots of adapters named in `bad` cannot be written."""

    def __init__(self) -> None:
        self.read_s = 0.0
        self.readers: list[threading.Thread] = []
        self.bad: set[str] = set()

    def read(self, spec: AdapterSpec, path: str) -> LoadedAdapter:
        self.readers.append(threading.current_thread())
        time.sleep(self.read_s)

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


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def jobs(disk: Disk) -> Iterator[Any]:
    made = Jobs(disk.read, Files(), Owners(), SlotStream(torch.device("cpu")), Agreement())  # type: ignore[arg-type]
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
    disk.read_s = 1.0
    began_at = time.perf_counter()
    jobs.begin_step([Load(spec(21), 21, job=21)])
    assert time.perf_counter() - began_at < 0.5, "everybody waited for one slow load"
    jobs.finish()
    assert len(disk.readers) == 21
    assert threading.current_thread() not in disk.readers


def test_a_slot_is_written_while_another_adapter_is_read(jobs: Any, disk: Disk) -> None:
    load(jobs, 1)
    disk.read_s = 1.0
    jobs.begin_step([Load(spec(2), 2, job=2), Activate(1, 0, job=3)])
    assert [type(report) for report in jobs.reports(10.0)] == [Activated]
    jobs.finish()
    assert [type(report) for report in jobs.reports()] == [Loaded]


def activated(jobs: Any, *commands: Any) -> Failed:
    """The only report of the step of these commands."""
    jobs.begin_step(commands)
    (report,) = jobs.reports()
    assert isinstance(report, Failed)
    return report


def test_a_slot_that_a_step_cannot_write_costs_one_adapter(jobs: Any, disk: Disk) -> None:
    for key in (1, 2):
        load(jobs, key)
    disk.bad.add("adapter-1")
    failed = activated(jobs, Activate(1, 0), Activate(2, 1))
    assert (failed.job, failed.key, failed.error.code, failed.error.adapter) == (0, 1, "L004", "adapter-1")
    assert jobs._owners.of == {0: None, 1: 2}
    assert jobs.lost == {1}
    assert jobs.engine_ids == {2}
    # The scheduler has planned a step further, and hears of it only then.
    failed = activated(jobs, Activate(1, 0, job=7))
    assert (failed.job, failed.key) == (7, 0)
    disk.bad.clear()
    jobs.begin_step([Evict(1)])
    assert jobs.lost == set()
    load(jobs, 1)
    jobs.begin_step([Activate(1, 0)])
    assert jobs.reports() == []
    assert jobs._owners.of == {0: 1, 1: 2}


def test_a_swap_whose_slot_cannot_be_written_costs_one_adapter(jobs: Any, disk: Disk) -> None:
    for key in (1, 2):
        load(jobs, key)
    jobs.begin_step([Activate(1, 0)])
    disk.bad.add("adapter-2")
    failed = activated(jobs, Move(1, 2))
    assert (failed.key, failed.error.code, failed.error.adapter) == (1, "L004", "adapter-2")
    assert jobs._owners.of == {0: None}


def test_slots_written_again_lose_the_adapters_that_fail(jobs: Any, disk: Disk) -> None:
    for key in (1, 2):
        load(jobs, key)
    jobs.begin_step([Activate(1, 0), Activate(2, 1)])
    disk.bad.add("adapter-2")
    jobs.rewrite_slots()
    (failed,) = jobs.reports()
    assert failed.key == 2
    assert jobs._owners.of == {0: 1, 1: None}


class TwoWorkers:
    """The `Jobs` of two workers, each with a disk of its own; rank `asked` reports."""

    def __init__(self, asked: int) -> None:
        self.store, self.asked = HashStore(), asked
        self.disks = [Disk(), Disk()]
        self.jobs: list[Any] = []
        for rank, disk in enumerate(self.disks):
            agreement = Agreement(rank, 2, self.store, "engine", is_reporting=rank == asked)
            self.jobs.append(Jobs(disk.read, Files(), Owners(), SlotStream(torch.device("cpu")), agreement))  # type: ignore[arg-type]

    def step(self, *commands: Any, rewriting: bool = False) -> list[Any]:
        """What the scheduler hears with the output of a step with a batch, to which both contribute.

        The reporting worker goes first: it has launched its batch before the other begins.
        """
        asked, lates = self.jobs[self.asked], list[Any]()
        for of in (asked, self.jobs[1 - self.asked]):
            of.rewrite_slots() if rewriting else of.begin_step(commands)
            of.finish()
            lates.append(of.take_unconfirmed())
        late, none = lates
        assert none is None, "of a worker whose output nobody reads"
        return asked.reports() + (late() if late is not None else [])

    def load(self, *keys: int) -> None:
        assert len(self.step(*(Load(spec(key), key, job=key) for key in keys))) == len(keys)

    def owners(self) -> list[dict[int, int | None]]:
        return [of._owners.of for of in self.jobs]


@pytest.fixture(params=[0, 1], ids=["first reports", "last reports"])
def two(request: pytest.FixtureRequest) -> Iterator[TwoWorkers]:
    made = TwoWorkers(request.param)
    yield made
    for of in made.jobs:
        of.close()


@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)])
def test_a_slot_unwritten_by_one_worker_costs_one_adapter(two: TwoWorkers, bad: tuple[int]) -> None:
    """Its requests are told with this very step: the batch computed half an adapter, or none, on that worker."""
    two.load(1, 2)
    for rank in bad:
        two.disks[rank].bad.add("adapter-1")
    reports = two.step(Activate(1, 0), Activate(2, 1))
    assert {(it.job, it.key, it.error.code, it.error.adapter) for it in reports} == {(0, 1, "L004", "adapter-1")}
    assert [of.lost for of in two.jobs] == [{1} if rank in bad else set() for rank in (0, 1)]
    assert all(of[1] == 2 for of in two.owners())
    assert two.step() == [], "it is said once"
    # The scheduler has planned a step further, and hears of it only then.
    (failed,) = two.step(Activate(1, 0, job=7))
    assert (failed.job, isinstance(failed, Failed)) == (7, True)
    for disk in two.disks:
        disk.bad.clear()
    two.step(Evict(1))
    assert [of.lost for of in two.jobs] == [set(), set()]
    two.load(1)
    assert two.step(Activate(1, 0)) == []
    assert two.owners() == [{0: 1, 1: 2}] * 2
    assert two.store.num_keys() <= 2, "HashStore has a key of its own, and there is the count"


@pytest.mark.parametrize("rank", [0, 1])
def test_swaps_and_wake_ups_lose_what_one_cannot_write(two: TwoWorkers, rank: int) -> None:
    two.load(1, 2, 3)
    assert two.step(Activate(1, 0), Activate(3, 1)) == []
    two.disks[rank].bad.add("adapter-2")
    (failed,) = two.step(Move(1, 2))
    assert (failed.key, failed.error.code, failed.error.adapter) == (1, "L004", "adapter-2")
    two.disks[rank].bad.add("adapter-3")
    assert [it.key for it in two.step(rewriting=True)] == [3]


def test_others_are_asked_where_a_step_writes_a_slot(two: TwoWorkers) -> None:
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


def test_a_worker_alone_asks_nobody(jobs: Any) -> None:
    load(jobs, 1)
    jobs.begin_step([Activate(1, 0)])
    assert jobs.take_unconfirmed() is None


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
    jobs: Any = Jobs(disk.read, Files(), Owners(), SlotStream(torch.device("cuda", 1)), Agreement())  # type: ignore[arg-type]
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
