"""Gives jobs to the reading processes of this server: two at most, each with one job at a time, replaced when they end.

`children()` is made once in each process that resolves adapters (API server, worker, command line). Any thread calls
`read`, `write` or `call` and gets a future; two threads of this module take the jobs in order, each with a process
(`reading_process.py`). Of jobs that take long (large adapters, writing), one at a time runs, so that one process is
always free for short jobs, and a small adapter never waits behind a large adapter.

Unlike `resolvers/fair_places.py`, the jobs here know no callers: the resolver has already decided which principal is
next, how many may wait, and how long.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from lora_plugins.adapter.layouts.tensors import NewTensor
from lora_plugins.errors import ErrorKind, LoRAPluginsError, SourceUnavailable, kind_of
from lora_plugins.settings import Settings
from lora_plugins.verification import protocol
from lora_plugins.verification.process_limits import takes_long
from lora_plugins.verification.reading_process import Lost, ReadingProcess

_AT_ONCE = 2  # threads, each with at most one process at work
_ATTEMPTS = 3  # processes for one job, if each is lost
_T = TypeVar("_T")


class Children:
    """Does jobs in reading processes, first come, first served, but only one long job at a time.

    Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._idle: list[ReadingProcess] = []  # processes without a job; used from both threads, by atomic calls
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._long: deque[Callable[[], None]] = deque()
        self._long_turn = threading.Lock()  # held while a turn for a long job is queued or runs
        self._starting = threading.Lock()
        self._has_ended = False
        for _ in range(_AT_ONCE):
            threading.Thread(target=self._work, daemon=True, name="lora-plugins-verify").start()

    def warm(self) -> None:
        """Have a process started unless one is idle, so that a process is ready at the first use; return at once."""
        self._jobs.put(self._start)

    def read(self, directory: Path, settings: Settings, *, config_only: bool = False) -> Future[protocol.ReadAdapter]:
        """Verify the adapter in `directory` without a base model, and make the configuration that engines read.

        With `config_only`, check the configuration alone, as `verify_config` does, and make none.

        The future raises the errors of `verify_adapter`; `InvalidAdapter` also where reading takes too much memory or
        computing, or crashes each process with memory to spare; and `SourceUnavailable` where no process starts, is
        killed or does not answer in time.
        """
        request = protocol.Read(
            os.fsencode(directory.absolute()),
            settings.max_adapter_bytes,
            settings.allow_pickle,
            settings.check_finite,
            settings.adapter_chat,
            config_only,
        )
        return self._submit(
            lambda process: protocol.found_of(*process.ask(request, protocol.AdapterFound)),
            lambda: not config_only and takes_long(str(directory)),
        )

    def write(
        self, tensors: Sequence[NewTensor], directory: Path, target: Path, landed: Callable[[int], None]
    ) -> Future[None]:
        """Write `tensors`, made of the tensors of the adapter in `directory`, to `target` (`write_weights`).

        The future raises OSError where a file cannot be read or written, and otherwise the errors of `read`.
        """
        largest_bytes = max((tensor.info.size_bytes for tensor in tensors), default=0)
        paths = os.fsencode(directory.absolute()), os.fsencode(target.absolute())
        # The limit of memory rises with the largest new tensor: its sources and the tensor are in memory at once.
        request = protocol.Write(*paths, memory_bytes=4 * largest_bytes)

        def write(process: ReadingProcess) -> None:
            answer, _ = process.ask(request, protocol.Written, {"tensors": tensors}, landed)
            if answer.errno:
                raise OSError(answer.errno, answer.strerror)

        return self._submit(write, lambda: True)

    def call(self, function: Callable[[bytes], bytes], argument: bytes) -> Future[bytes]:
        """Call a function of one of this package's modules, whose computing would keep this process's threads waiting.

        The future raises a `LoRAPluginsError` that the function raises, and the errors of `read` without an answer.
        """
        request = protocol.CallFunction(function.__module__, function.__name__)
        lists = {"pieces": protocol.pieces(argument)}
        return self._submit(lambda process: b"".join(process.ask(request, protocol.Returned, lists)[1]["pieces"]))

    def pids(self) -> list[int]:
        """Return the process ids of the idle processes."""
        return [process.pid for process in list(self._idle)]

    def end(self) -> None:
        """End the idle processes now, and the others after their answers."""
        self._has_ended = True
        for process in list(self._idle):
            process.end()

    # `work` does the job with a process; `is_long` says whether the job takes long.
    def _submit(self, work: Callable[[ReadingProcess], _T], is_long: Callable[[], bool] = lambda: False) -> Future[_T]:
        answer: Future[_T] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._with_process(work))
                except BaseException as error:  # noqa: BLE001 - the error belongs to the waiting caller
                    answer.set_exception(error)

        def sort() -> None:
            # Here and not in the caller's thread: `is_long` may read a directory, and the disk may be slow.
            if not is_long():
                run()
            else:
                self._long.append(run)
                self._begin_long()

        self._jobs.put(sort)
        return answer

    def _work(self) -> None:
        while True:
            with suppress(SourceUnavailable):  # of `warm`: the next caller meets the same error, and reports it
                self._jobs.get()()

    def _begin_long(self) -> None:
        """Queue a turn for the first long job, behind all jobs that wait now; one turn at a time is queued or runs.

        With the jobs long A, long B, short C in this order: A's turn runs, C in another thread, then B's turn.
        """
        if self._long and self._long_turn.acquire(blocking=False):
            self._jobs.put(self._do_long)

    def _do_long(self) -> None:
        with suppress(IndexError):  # no job left: both threads saw the same job, and queued one turn each
            self._long.popleft()()
        self._long_turn.release()
        self._begin_long()

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
        # A process that was killed, or lacked memory, says nothing of the bytes. So the error that blames the machine
        # (`FAULT`) wins over errors that blame the bytes.
        raise next((error for error in errors if kind_of(error) is ErrorKind.FAULT), errors[-1])

    def _take(self) -> ReadingProcess:
        """Return an idle process, or a new process."""
        while True:
            with suppress(IndexError):
                return self._idle.pop()
            self._start()

    def _start(self) -> None:
        """Add an idle process, unless there is one; raises SourceUnavailable where the process does not start."""
        with self._starting:
            if not self._idle:  # a caller that waited for the lock may find the process of another caller
                self._idle.append(ReadingProcess())

    def _put_back(self, process: ReadingProcess) -> None:
        if process.is_ready and not self._has_ended:
            self._idle.append(process)
        else:
            process.end()


@functools.cache
def children() -> Children:
    """Return the reading processes of this process, shared by all resolvers in this process."""
    made = Children()
    atexit.register(made.end)
    return made


# A forked process has no threads, and its parent's processes are not its own.
os.register_at_fork(after_in_child=children.cache_clear)
