"""Work that threads of a worker hand to its engine loop, which does some milliseconds of the work between two batches.

The loading thread asks layers of the model for the norms of their rows (`worker/vectors.py`). A layer of vLLM's CPU
build has one handle of oneDNN, which two threads must not use at once: the loop alone may call a layer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

SHARE_S = 0.005  # of a step; a piece that has begun ends


class LoopWork:
    """Iterators that threads wait for; each `next` is a piece of work.

    Args:
        wake: called in any thread once there is work, so that a waiting loop calls `do_some`.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: deque[tuple[Iterator[None], Future[None]]] = deque()
        self._loop_thread = threading.get_ident()

    def run(self, pieces: Iterator[None]) -> None:
        """Have the loop run an iterator to its end, and wait; in the loop's own thread run the iterator at once.

        Raises:
            RuntimeError: the worker ends first. Any error of the iterator.
        """
        if threading.get_ident() == self._loop_thread:
            for _ in pieces:
                pass
            return
        ended: Future[None] = Future()
        self._waiting.append((pieces, ended))
        self._wake()
        ended.result()

    def do_some(self) -> None:
        """Do the loop's share; the thread that calls is the loop's."""
        self._loop_thread = threading.get_ident()
        deadline = time.monotonic() + SHARE_S
        while self._waiting and time.monotonic() < deadline:
            pieces, ended = self._waiting[0]
            try:
                next(pieces)
                continue
            except StopIteration:
                ended.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                ended.set_exception(error)
            self._waiting.popleft()
        if self._waiting:
            self._wake()

    def close(self) -> None:
        """Let all waiting threads go on with an error."""
        while self._waiting:
            self._waiting.popleft()[1].set_exception(RuntimeError("the worker ends"))
