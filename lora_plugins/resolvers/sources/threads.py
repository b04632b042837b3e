"""Threads for calls that may hang and cannot be interrupted: a mount, or a library that waits for a socket.

Used by the sources of directories, of synchronous fsspec file systems and of the Hub, with `run_in_executor`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")


class OwnThreads(Executor):
    """Runs each call in a thread of its own, at most `limit` at once; a process that ends waits for none of them.

    At its end a process waits for all threads of Python's own pools, and so would not end beside a mount that hangs.
    """

    def __init__(self, name: str, limit: float = math.inf) -> None:
        self._name, self._limit = name, limit
        self._lock, self._running = threading.Lock(), 0
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Call `fn` in a thread, once fewer than `limit` calls run; a call that runs cannot be cancelled."""
        future: Future[_T] = Future()
        with self._lock:
            self._waiting.append((future, partial(fn, *args, **kwargs)))
            if self._running >= self._limit:
                return future
            self._running += 1
        threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                future, call = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the waiting caller gets the error
                future.set_exception(error)
