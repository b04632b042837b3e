"""What waits for a process that reads adapters: small adapters are never behind large ones.

No queue of callers, as `resolvers/places.py` is: threads hand over work here, and take work. Who is next among
principals, how many may wait, and for how long, was decided before: whatever comes here has a place of its principal.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """`run` does it; `takes_long` looks at its files for whether that takes long. Both are called in its thread."""

    run: Callable[[], None]
    takes_long: Callable[[], bool]


class Jobs:
    """Those that wait, the first to come first. For any thread."""

    def __init__(self) -> None:
        self._new: deque[Job] = deque()
        self._long: deque[Job] = deque()  # which somebody has looked at
        self._changed = threading.Condition()

    def put(self, job: Job) -> None:
        """Have it done."""
        with self._changed:
            self._new.append(job)
            self._changed.notify_all()

    def do_next(self, *, also_long: bool) -> None:
        """Wait for a job and do it; one that takes long only after all others, and where `also_long`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._new or (also_long and self._long))
                is_long = not self._new
                job = (self._long if is_long else self._new).popleft()
            if is_long or not job.takes_long():
                job.run()
                return
            with self._changed:
                self._long.append(job)
                self._changed.notify_all()
