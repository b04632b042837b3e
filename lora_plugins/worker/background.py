"""A background thread that parses, packs and copies adapters, in the place of the engine loop."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lora_plugins.log import logger

SWITCH_INTERVAL_S = 0.0002


class BackgroundThread:
    """Runs jobs one after another, on cores that the engine's compute threads leave free where there are any."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` soon; the job handles its own errors."""
        self._jobs.put(job)

    def _run(self) -> None:
        _leave_compute_cores()
        while True:
            job = self._jobs.get()
            if job is None:
                return
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
    """Makes threads hand the interpreter on after 0.2 ms, not 5, while any job of this process runs.

    The engine loop needs the interpreter's lock after each of its operations on tensors.
    """

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


def _leave_compute_cores() -> None:
    """Move this thread off the cores that the worker is bound to, if the parent process may use others."""
    # vLLM's CPU worker binds itself to the cores of OpenMP (VLLM_CPU_OMP_THREADS_BIND); a new thread inherits the
    # binding, and would compete with the engine's compute threads.
    with contextlib.suppress(OSError, AttributeError):
        compute = os.sched_getaffinity(os.getpid())
        others = os.sched_getaffinity(os.getppid()) | set(range(os.cpu_count() or 1))
        free = others - compute
        if free:
            os.sched_setaffinity(threading.get_native_id(), free)


# How long this worker's steps and loads take, so that a load shorter than a step is done in the step.
#
# A load in a background thread shares the interpreter, the memory and the cores with the steps beside the load. For a
# small adapter, all of these steps together lose more time than the load alone takes.

# Seconds. A step without a batch delays no running request, but the next request may come at any moment.
LONGEST_WITHOUT_BATCH_S = 0.05
_DECAY = 0.9  # the weight of earlier measurements at each new measurement


class LoadTimes:
    """Measures steps with a batch, and loads; a load is expected to take a fixed time and a time for each byte."""

    def __init__(self) -> None:
        self._step_s = 0.0  # the running mean
        self._left_s = 0.0  # the time that this step may still spend on loads
        self._began_at: float | None = None
        # Over the loads, weighted: the number, and the sums of bytes, seconds, bytes² and bytes x seconds (least
        # squares).
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def begin_step(self, *, has_batch: bool) -> None:
        """Note that a step begins, with its commands."""
        self._began_at = None
        self._left_s = self._step_s if has_batch else LONGEST_WITHOUT_BATCH_S

    def begin_batch(self) -> None:
        """Note that the commands have been carried out, and that the step's batch comes next."""
        self._began_at = time.perf_counter()

    def end_batch(self) -> None:
        """Note that the step's batch, if any, has been computed."""
        if self._began_at is not None:
            took_s, self._began_at = time.perf_counter() - self._began_at, None
            self._step_s = _DECAY * self._step_s + (1 - _DECAY) * took_s if self._step_s else took_s

    def take(self, size_bytes: int) -> bool:
        """Take the time of a load of `size_bytes` from this step's rest; False where the rest is too short."""
        expected_s = self.expected_s(size_bytes)
        if expected_s is None or expected_s >= self._left_s:
            return False
        self._left_s -= expected_s
        return True

    def expected_s(self, size_bytes: int) -> float | None:
        """Return the expected seconds of a load; None while unknown (0 bytes: size not known)."""
        n, x, y, xx, xy = self._sums
        if not n or not size_bytes:
            return None
        mean_x, mean_y = x / n, y / n
        spread = xx / n - mean_x**2
        # Loads of a single size say nothing of the fixed part: then the whole time counts as time for bytes.
        by_byte = mean_y / mean_x
        if spread > (0.01 * mean_x) ** 2:
            by_byte = min(max((xy / n - mean_x * mean_y) / spread, 0.0), by_byte)
        return mean_y + by_byte * (size_bytes - mean_x)

    @contextmanager
    def of_load(self, size_bytes: int) -> Iterator[None]:
        """Measure a load of `size_bytes`, in any thread; a failed load is not counted.

        In a background thread the time includes waits for the engine loop: a load that is short there is short in the
        step.
        """
        began_at = time.perf_counter()
        yield
        if size_bytes:
            took_s = time.perf_counter() - began_at
            new = (1.0, float(size_bytes), took_s, float(size_bytes) ** 2, size_bytes * took_s)
            self._sums = tuple(_DECAY * old + one for old, one in zip(self._sums, new, strict=True))  # type: ignore[assignment]
