"""The reading processes of this server: a few, each with one adapter at a time, replaced when they end.

Small adapters are never behind large adapters, of which one at a time is read. Unlike `resolvers/places.py`, the jobs
here know no callers: the resolver has already decided which principal is next, how many may wait, and for how long.
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
from pathlib import Path
from typing import TypeVar

from lora_plugins.adapter.layouts.tensors import NewTensor
from lora_plugins.errors import ErrorKind, LoRAPluginsError, SourceUnavailable, kind_of
from lora_plugins.settings import Settings
from lora_plugins.verification.limits import takes_long
from lora_plugins.verification.messages import Read, ReadAdapter, requests_of
from lora_plugins.verification.process import Lost, ReadingProcess

_ATTEMPTS = 3
_T = TypeVar("_T")
# What does the job, and whether the job takes long, by its files. A reading thread calls both.
_Job = tuple[Callable[[], None], Callable[[], bool]]


class Children:
    """Verifies adapters in reading processes, first come, first served. For any thread."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[ReadingProcess] = queue.LifoQueue()
        self._new: deque[_Job] = deque()
        self._long: deque[_Job] = deque()  # jobs that take long: one thread does these, and only after all others
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._has_ended = False

    def warm(self) -> None:
        """Start a process where none was started, so that the process is ready at the first use; return at once."""
        if not self._threads:
            self._put(self._new, (self._warm, lambda: False))

    def read(self, directory: Path, settings: Settings, *, config_only: bool = False) -> Future[ReadAdapter]:
        """Verify the adapter in `directory` without a base model, and make the configuration that engines read.

        With `config_only` as `verify_config` does, and without making a configuration.

        The future raises the errors of `verify_adapter`; `InvalidAdapter` also where reading takes too much memory or
        computing, or crashes each process with memory to spare; and `SourceUnavailable` where no process starts, is
        killed or does not answer in time.
        """
        request = Read(
            os.fsencode(directory.absolute()),
            settings.max_adapter_bytes,
            settings.allow_pickle,
            settings.check_finite,
            settings.adapter_chat,
            config_only,
        )
        return self._submit(lambda it: it.read(request), lambda: not config_only and takes_long(str(directory)))

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
        answer: Future[_T] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._with_process(work))
                except BaseException as error:  # noqa: BLE001 - the error belongs to the waiting caller
                    answer.set_exception(error)

        self._put(self._new, (run, takes_long))
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

    def _put(self, jobs: deque[_Job], job: _Job) -> None:
        with self._changed:
            jobs.append(job)
            self._changed.notify_all()
            for also_long in (False, True)[len(self._threads) :]:
                thread = threading.Thread(target=self._work, args=(also_long,), daemon=True, name="lora-plugins-verify")
                thread.start()
                self._threads.append(thread)

    def _work(self, also_long: bool) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._new or (also_long and self._long))
                is_new = bool(self._new)
                run, takes_long = job = (self._new or self._long).popleft()
            # Outside of the lock: `takes_long` reads a directory, and callers of `_put` must not wait for a disk.
            if is_new and takes_long():
                self._put(self._long, job)
            else:
                run()

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
