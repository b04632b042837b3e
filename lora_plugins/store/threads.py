"""The threads of this process that hash files and write them to the disk: few, whatever there is to hash."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

_THREADS = 8


@functools.cache
def store_threads() -> ThreadPoolExecutor:
    """A pool for work that waits for no other work in it; its threads start when needed."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="lora-plugins-store")


os.register_at_fork(after_in_child=store_threads.cache_clear)  # threads are not forked
