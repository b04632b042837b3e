"""The reading processes of this server: a few, each with one adapter at a time, replaced when they end.

Small adapters are never behind large adapters (`JobQueue`). Unlike `resolvers/places.py`, `JobQueue` is no queue of
callers: threads hand over jobs, and threads take jobs. The resolver has already decided which principal is next, how
many may wait, and for how long.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from lora_plugins.adapter.layouts.tensors import NewTensor
from lora_plugins.errors import ErrorKind, LoRAPluginsError, SourceUnavailable, kind_of
from lora_plugins.settings import Settings
from lora_plugins.verification.limits import takes_long
from lora_plugins.verification.messages import Read, ReadAdapter, requests_of
from lora_plugins.verification.process import Lost, ReadingProcess

_PROCESSES = 2  # one process takes long adapters, which delay only each other
_ATTEMPTS = 3
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Job:
    """`run` does the job; `takes_long` looks at the job's files. A reading thread calls both."""

    run: Callable[[], None]
    takes_long: Callable[[], bool]


class JobQueue:
    """The waiting jobs, first come, first served. For any thread."""

    def __init__(self) -> None:
        self._new: deque[Job] = deque()
        self._long: deque[Job] = deque()  # jobs for which `takes_long` was true
        self._changed = threading.Condition()

    def put(self, job: Job) -> None:
        """Add a job."""
        with self._changed:
            self._new.append(job)
            self._changed.notify_all()

    def do_next(self, *, also_long: bool) -> None:
        """Wait for a job and run the job; a long job only after all others, and only with `also_long`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._new or (also_long and self._long))
                is_long = not self._new
                job = (self._long if is_long else self._new).popleft()
            # Outside of the lock: `takes_long` reads a directory, and callers of `put` must not wait for a disk.
            if is_long or not job.takes_long():
                job.run()
                return
            with self._changed:
                self._long.append(job)
                self._changed.notify_all()


class Children:
    """Verifies adapters in reading processes; short reads go first, in their order. For any thread."""

    def __init__(self, processes: int = _PROCESSES) -> None:
        self._processes = processes
        self._idle: queue.LifoQueue[ReadingProcess] = queue.LifoQueue()
        self._jobs = JobQueue()
        self._starting = threading.Lock()
        self._changing = threading.Lock()
        self._has_started = False
        self._has_ended = False

    def warm(self) -> None:
        """Start a process where none was started, so that the process is ready at the first use; return at once."""
        if not self._has_started:
            self._start()
            self._jobs.put(Job(self._warm, takes_long=lambda: False))

    def read(self, directory: Path, settings: Settings) -> Future[ReadAdapter]:
        """Verify the adapter in `directory` without a base model, and make the configuration that engines read.

        The future raises the errors of `verify_adapter`; `InvalidAdapter` also where reading takes too much memory or
        computing, or crashes each process with memory to spare; and `SourceUnavailable` where no process starts, is
        killed or does not answer in time.
        """
        return self._read(directory, settings)

    def read_config(self, directory: Path, settings: Settings) -> Future[ReadAdapter]:
        """Verify as `verify_config` does, and make no configuration; raises as `read`."""
        return self._read(directory, settings, config_only=True)

    def _read(self, directory: Path, settings: Settings, *, config_only: bool = False) -> Future[ReadAdapter]:
        request = Read(
            os.fsencode(directory.absolute()),
            settings.max_adapter_bytes,
            settings.allow_pickle,
            settings.check_finite,
            settings.adapter_chat,
            config_only,
        )
        return self._submit(lambda process: process.read(request), lambda: takes_long(str(directory)))

    def write(
        self, tensors: Sequence[NewTensor], directory: Path, target: Path, landed: Callable[[int], None]
    ) -> Future[None]:
        """Write `tensors`, made of the tensors of the adapter in `directory`, to `target` (`write_weights`).

        The future raises OSError where a file cannot be read or written, and otherwise the errors of `read`.
        """
        original = os.fsencode(directory.absolute())
        requests = list(requests_of(tensors, original, os.fsencode(target.absolute())))
        return self._submit(lambda process: process.write(requests, original, landed), lambda: True)

    def _submit(self, work: Callable[[ReadingProcess], _T], takes_long: Callable[[], bool]) -> Future[_T]:
        self._start()
        answer: Future[_T] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._with_process(work))
                except BaseException as error:  # noqa: BLE001 - the error belongs to the waiting caller
                    answer.set_exception(error)

        self._jobs.put(Job(run, takes_long))
        return answer

    def pids(self) -> list[int]:
        """Return the ids of the processes that wait for work."""
        return [process.pid for process in list(self._idle.queue)]

    def end(self) -> None:
        """End the waiting processes now, and the others after their answers."""
        self._has_ended = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()

    def _start(self) -> None:
        with self._changing:
            if not self._has_started:
                for number in range(self._processes):
                    work = partial(self._work, also_long=number > 0 or self._processes == 1)
                    threading.Thread(target=work, daemon=True, name=f"lora-plugins-verify-{number}").start()
            self._has_started = True

    def _work(self, *, also_long: bool) -> None:
        while True:
            self._jobs.do_next(also_long=also_long)

    def _warm(self) -> None:
        # The next caller meets the same error, and reports it.
        with contextlib.suppress(SourceUnavailable), self._starting:
            if self._idle.empty():
                self._put_back(ReadingProcess())

    def _with_process(self, work: Callable[[ReadingProcess], _T]) -> _T:
        """Run `work` with a process; lost processes are the adapter's fault only if every other cause is ruled out."""
        errors: list[LoRAPluginsError] = []
        for _ in range(_ATTEMPTS):
            process = self._take()
            try:
                return work(process)
            except Lost as lost:
                errors.append(lost.error)
            finally:
                self._put_back(process)
        # A loss that a killer or a lack of memory explains says nothing of the bytes, so such an error wins.
        raise next((error for error in errors if kind_of(error) is ErrorKind.FAULT), errors[-1])

    def _take(self) -> ReadingProcess:
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        with self._starting:  # a caller that waited for the lock may find the process of another caller
            with contextlib.suppress(queue.Empty):
                return self._idle.get_nowait()
            return ReadingProcess()

    def _put_back(self, process: ReadingProcess) -> None:
        if process.is_alive and not self._has_ended:
            self._idle.put(process)
        else:
            process.end()


@functools.cache
def children() -> Children:
    """Return the reading processes of this process, shared by all servers and resolvers."""
    made = Children()
    atexit.register(made.end)
    return made


# A forked process has no threads, and its parent's processes are not its own.
os.register_at_fork(after_in_child=children.cache_clear)
