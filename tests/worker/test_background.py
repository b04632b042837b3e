"""Jobs in a background thread: one after another, and the interpreter is handed on quickly while one runs."""

from __future__ import annotations

import queue
import sys

import pytest

from lora_plugins.worker.background import SWITCH_INTERVAL_S, BackgroundThread

LIMIT_S = 30


@pytest.fixture
def thread():
    made = BackgroundThread("test-loading")
    yield made
    made.close()


def test_jobs_run_in_their_order_also_after_one_that_fails(thread):
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    thread.submit(lambda: done.put(1))
    thread.submit(lambda: 1 // 0)
    thread.submit(lambda: done.put(2))
    assert [done.get(timeout=LIMIT_S) for _ in range(2)] == [1, 2]


def test_the_interpreter_is_handed_on_quickly_while_any_job_runs(thread):
    usual = sys.getswitchinterval()
    assert usual > SWITCH_INTERVAL_S
    other = BackgroundThread("test-fetching")
    seen: queue.SimpleQueue[float] = queue.SimpleQueue()
    go_on: queue.SimpleQueue[None] = queue.SimpleQueue()

    def waits() -> None:
        seen.put(sys.getswitchinterval())
        go_on.get(timeout=LIMIT_S)

    thread.submit(waits)
    assert seen.get(timeout=LIMIT_S) == pytest.approx(SWITCH_INTERVAL_S)
    other.submit(lambda: 1 // 0)
    other.close()  # its job has ended; the first one has not
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    go_on.put(None)
    thread.close()
    assert sys.getswitchinterval() == pytest.approx(usual)
