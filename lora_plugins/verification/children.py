"""The processes of this one that read adapters: a few, each with one adapter at a time, and replaced when they end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from lora_plugins.errors import InvalidAdapter, SourceUnavailable
from lora_plugins.settings import Settings
from lora_plugins.verification.messages import Found, Read
from lora_plugins.verification.process import Lost, ReadingProcess

_PROCESSES = 2  # one that takes long keeps nobody waiting but another that does
_ATTEMPTS = 3


class Children:
    """Verifies adapters in processes of its own, in the order in which they are asked for. For any thread."""

    def __init__(self, processes: int = _PROCESSES) -> None:
        self._processes = processes
        self._idle: queue.LifoQueue[ReadingProcess] = queue.LifoQueue()
        self._wanted: queue.SimpleQueue[tuple[Future[Found], Read] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._changing = threading.Lock()
        self._has_started = False
        self._has_ended = False

    def warm(self) -> None:
        """Start a process where there is none yet, so that it runs once it is needed; returns at once."""
        if not self._has_started:
            self._start()
            self._wanted.put(None)

    def read(self, directory: Path, settings: Settings) -> Future[Found]:
        """Verify the adapter in `directory` without a base model, and write the configuration that engines read of it.

        The future raises what `verify_adapter` raises; `InvalidAdapter` also where reading it oversteps a limit, and
        `SourceUnavailable` where no process starts.
        """
        self._start()
        answer: Future[Found] = Future()
        wanted = Read(
            os.fsencode(directory.absolute()), settings.max_adapter_bytes, settings.allow_pickle, settings.check_finite
        )
        self._wanted.put((answer, wanted))
        return answer

    def pids(self) -> list[int]:
        """The processes that wait for work."""
        return [process.pid for process in list(self._idle.queue)]

    def end(self) -> None:
        """End the processes that wait now, and others once they have answered."""
        self._has_ended = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()

    def _start(self) -> None:
        with self._changing:
            if not self._has_started:
                for number in range(self._processes):
                    threading.Thread(target=self._work, daemon=True, name=f"lora-plugins-verify-{number}").start()
            self._has_started = True

    def _work(self) -> None:
        while True:
            wanted = self._wanted.get()
            if wanted is None:
                with contextlib.suppress(SourceUnavailable):  # said to who then asks
                    self._put_back(self._take())
            elif wanted[0].set_running_or_notify_cancel():
                _settle(wanted[0], partial(self._read, wanted[1]))
            del wanted

    def _read(self, request: Read) -> Found:
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(Lost):
                return self._read_once(request)
        raise InvalidAdapter(
            "an adapter with which the process that reads it is killed, each time",
            expected="one that is read at once",
            remedy="save the adapter again with PEFT, or look for what kills processes on this machine",
        )

    def _read_once(self, request: Read) -> Found:
        process = self._take()
        try:
            return process.read(request)
        finally:
            self._put_back(process)

    def _take(self) -> ReadingProcess:
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        with self._starting:  # who waits here may find the one that was started meanwhile
            with contextlib.suppress(queue.Empty):
                return self._idle.get_nowait()
            return ReadingProcess()

    def _put_back(self, process: ReadingProcess) -> None:
        if process.is_alive and not self._has_ended:
            self._idle.put(process)
        else:
            process.end()


def _settle(future: Future[Found], work: Callable[[], Found]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
        future.set_exception(error)


@functools.cache
def children() -> Children:
    """Those of this process, whichever servers and resolvers it has."""
    made = Children()
    atexit.register(made.end)
    return made


os.register_at_fork(after_in_child=children.cache_clear)  # threads are not forked, and processes not one's own then
