"""Jobs that wait for a reading process: small adapters are never behind large adapters.

Unlike `resolvers/places.py`, no queue of callers: threads hand over jobs, and threads take jobs. The resolver has
already decided which principal is next, how many may wait, and for how long.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


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
