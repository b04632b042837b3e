"""Slows a long loop down beside an event loop: pauses between items give up the interpreter's lock.

`paced` wraps the items of loops over an adapter's tensors or a model's modules, in any process: only threads beside the
main thread pause.

Another thread gets the lock only every `sys.getswitchinterval()` (5 ms), and a turn of an event loop may wait for the
lock several times. So a second of computation in a thread slows everything down for much longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")
_PIECE_S = 0.0005
_PAUSE_S = 0.0005  # Python does not give the lock up reliably in less
# Reading the clock for each item would cost as much as a cheap item.
_BETWEEN_LOOKS = 16


def paced(items: Iterable[_T]) -> Iterator[_T]:
    """Yield the same items, with pauses for other threads; without pauses in the main thread, where nobody waits."""
    if threading.current_thread() is threading.main_thread():
        yield from items
        return
    began = time.perf_counter()
    for number, item in enumerate(items):
        if number % _BETWEEN_LOOKS == 0 and time.perf_counter() - began >= _PIECE_S:
            time.sleep(_PAUSE_S)
            began = time.perf_counter()
        yield item
