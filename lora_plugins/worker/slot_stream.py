"""Where a worker's threads write slots: on CUDA in a side stream beside the batches, elsewhere at once.

`worker/jobs.py` has one `SlotStream`. Its events keep two orders on the device: a copy begins once all work launched
before the command has finished with the slot, and a batch with the slot begins after the copies. So no batch reads a
slot in the middle of a write, and the host waits for neither. On the CPU launching means computing, without events.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import torch


class SlotStream:
    """The side stream of a CUDA device, or nothing on the CPU.

    Source: the rules of torch's CUDA streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin_thread(self) -> None:
        """Make the stream's device the calling thread's; on the CPU, leave the cores of the compute threads."""
        if self._stream is None:
            _leave_compute_cores()
            return
        # Each thread begins with device 0, whatever others use: page-locked memory, and the end of `write`, would make
        # a context of 0.5 GiB on device 0 for each rank.
        torch.cuda.set_device(self._stream.device)

    def idle_event(self) -> Any:
        """Return an event after all work launched so far; None where launching means computing."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def write(self, idle_event: Any, write: Callable[[], None]) -> None:
        """Write; on CUDA launch the copies, which the device begins once the slot is idle."""
        if self._stream is None:
            write()
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(idle_event)
            write()

    def written_event(self) -> Any:
        """Return an event after all copies launched so far by `write`; None where launching means computing."""
        return None if self._stream is None else self._stream.record_event()

    def wait_for(self, written_event: Any) -> None:
        """Order all later launches of the current stream after the copies."""
        if written_event is not None:
            torch.cuda.current_stream().wait_event(written_event)


def _leave_compute_cores() -> None:
    """Move this thread off the cores that the worker is bound to, if the parent process may use others."""
    # vLLM's CPU worker binds itself to the cores of OpenMP (VLLM_CPU_OMP_THREADS_BIND); a new thread inherits the
    # binding, and would compete with the engine's compute threads.
    with contextlib.suppress(OSError, AttributeError):
        others = os.sched_getaffinity(os.getppid()) | set(range(os.cpu_count() or 1))
        if free := others - os.sched_getaffinity(os.getpid()):
            os.sched_setaffinity(threading.get_native_id(), free)
