"""A background thread that parses, packs and copies adapters, so that the engine loop does not have to."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator

from lora_plugins.log import logger

SWITCH_INTERVAL_S = 0.0002


class BackgroundThread:
    """Runs jobs one after another, on cores that the engine's compute threads leave free where there are any."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` soon; it handles its own errors."""
        self._jobs.put(job)

    def _run(self) -> None:
        _leave_compute_cores()
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                with _short_switch_interval():
                    job()
            except BaseException:  # noqa: BLE001 - the thread serves the others
                logger.exception("A background job raised")

    def close(self) -> None:
        """End the thread after the jobs that wait."""
        self._jobs.put(None)
        self._thread.join(timeout=10)


_switching = threading.Lock()
_jobs_running = 0
_usual_interval_s = 0.0


@contextlib.contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Have threads hand the interpreter on after 0.2 ms, not 5: the loop wants it after each of its operations."""
    global _jobs_running, _usual_interval_s
    with _switching:
        _jobs_running += 1
        if _jobs_running == 1:
            _usual_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual_interval_s, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        with _switching:
            _jobs_running -= 1
            if not _jobs_running:
                sys.setswitchinterval(_usual_interval_s)


def _leave_compute_cores() -> None:
    """Move this thread off the cores that the worker is bound to, if its parent may use others."""
    with contextlib.suppress(OSError, AttributeError):
        compute = os.sched_getaffinity(os.getpid())
        others = os.sched_getaffinity(os.getppid()) | set(range(os.cpu_count() or 1))
        free = others - compute
        if free:
            os.sched_setaffinity(threading.get_native_id(), free)
