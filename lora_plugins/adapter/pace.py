"""Long computation in Python beside an event loop: in pieces, with the interpreter's lock given up between them.

Whoever waits for the lock otherwise gets it only every `sys.getswitchinterval()` (5 ms), and a turn of an event loop
may wait for it several times: what takes a second in a thread then slows everything down for as long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")
_PIECE_S = 0.0005
_PAUSE_S = 0.0005  # less is not given up reliably
_BETWEEN_LOOKS = 16


def paced(items: Iterable[_T]) -> Iterator[_T]:
    """The same items, with pauses for other threads; without them in the main thread, where nobody is waited for."""
    if threading.current_thread() is threading.main_thread():
        yield from items
        return
    began = time.perf_counter()
    for number, item in enumerate(items):
        if number % _BETWEEN_LOOKS == 0 and time.perf_counter() - began >= _PIECE_S:
            time.sleep(_PAUSE_S)
            began = time.perf_counter()
        yield item
