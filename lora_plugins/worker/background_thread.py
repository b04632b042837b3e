"""A thread of a worker that runs jobs one after another, so that the engine loop never waits for a job.

`worker/jobs.py` has three: adapters are parsed and packed in one, fetched in another, and written into slots in the
third. While any job runs, threads of the process hand the interpreter on sooner than usual: the engine loop needs the
interpreter's lock after each of its operations on tensors.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

from lora_plugins.log import logger

SWITCH_INTERVAL_S = 0.0002


class BackgroundThread:
    """Runs jobs one after another; `begin` is called first, in the thread."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` soon; the job handles its own errors."""
        self._jobs.put(job)

    def _run(self) -> None:
        self._begin()
        while (job := self._jobs.get()) is not None:
            try:
                with _short_switch_interval:
                    job()
            except BaseException:  # noqa: BLE001 - the thread must live on for other jobs
                logger.exception("A background job raised")

    def close(self) -> None:
        """End the thread after the waiting jobs."""
        self._jobs.put(None)
        self._thread.join(timeout=10)


class _SwitchInterval:
    """Makes threads hand the interpreter on after 0.2 ms, not 5, while any job of this process runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs_running = 0
        self._usual_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._jobs_running += 1
            if self._jobs_running == 1:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, SWITCH_INTERVAL_S))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._jobs_running -= 1
            if not self._jobs_running:
                sys.setswitchinterval(self._usual_s)


# A process has a single interpreter with a single interval, so all threads share the counter.
_short_switch_interval = _SwitchInterval()
