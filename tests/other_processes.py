"""Other processes, forked by a server that has imported what they need: each would take a second of a core to do so."""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver

import pytest


def other_processes(count: int = 1) -> ProcessPoolExecutor:
    """At most `count` processes, which have no threads; each ends with the pool."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.store.common", "tests.store.test_crash_points"])
    with pytest.MonkeyPatch.context() as patched:
        # The server would leave out what it cannot import without a word: with -P it has no working directory.
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return ProcessPoolExecutor(count, mp_context=context)
