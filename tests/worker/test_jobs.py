"""What a worker's jobs do in the engine's loop, and what in a thread, with adapters that are small objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lora_plugins.scheduler.messages import AdapterSpec, Load, Loaded
from lora_plugins.worker.agreement import Agreement
from lora_plugins.worker.jobs import Jobs
from lora_plugins.worker.loaded_adapter import LoadedAdapter
from lora_plugins.worker.slot_copy import SlotStream

A_MB = 1_000_000


class Files:
    """Every file is here."""

    def is_here(self, path: str) -> bool:
        return True

    def release(self, path: str) -> None: ...


class Owners:
    """Notes the owner of each slot."""

    def __init__(self) -> None:
        self.of: dict[int, int | None] = {}

    def own(self, slot: int, key: int | None) -> None:
        self.of[slot] = key

    def reserve(self, slot: int) -> None:
        self.of[slot] = None


class Disk:
    """Reads an adapter in `read_s`, and notes which thread does."""

    def __init__(self) -> None:
        self.read_s = 0.0
        self.readers: list[threading.Thread] = []

    def read(self, spec: AdapterSpec, path: str) -> LoadedAdapter:
        self.readers.append(threading.current_thread())
        time.sleep(self.read_s)
        return LoadedAdapter(spec.name, path, A_MB, False, (lambda _: None,))


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
