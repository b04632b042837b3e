"""The few threads of this process that hash files and write files to the disk."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

_THREADS = 8


@functools.cache
def store_threads() -> ThreadPoolExecutor:
    """A pool for tasks that wait for no other task of the pool; threads start on demand."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="lora-plugins-store")


os.register_at_fork(after_in_child=store_threads.cache_clear)  # threads are not forked
