"""An event loop whose time passes only while nothing can run: a test of waits then has one outcome, on every machine.

A sleep of a minute takes no time, and a machine that stops for three seconds takes none away from anybody. What the
loop hands to threads runs in the loop's own thread, so that nothing depends on who is scheduled first: at once, or
after times that a test chooses. As in a thread, work that has begun goes on after its caller's cancellation.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest import mock

LONGEST_S = 3600.0
Result = TypeVar("Result")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` and, in a run, `time.monotonic()` and `time.perf_counter()` move by waiting only, and that at once.

    Attributes:
        thread_s: how long work waits for a thread, and how long a thread takes.
    """

    def __init__(self, thread_s: Callable[[], float] = lambda: 0.0) -> None:
        self.now, self.thread_s = 0.0, thread_s
        super().__init__(_Waiting(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()

        def begin() -> None:
            if not done.cancelled():
                self.call_later(run_s, finish) if (run_s := self.thread_s()) else finish()

        def finish() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        if wait_s := self.thread_s():
            self.call_later(wait_s, begin)
        else:
            self.call_soon(begin)
        return done


class _Waiting(selectors.DefaultSelector):
    """Passes the time that the loop would wait for."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if ready := super().select(0):
            return ready  # what has been sent over a socket of this process is here already
        if timeout is None:
            raise RuntimeError("every task waits for another one: nothing will ever happen")
        self._loop.now += max(timeout, 0.0)
        return []


def run_in_virtual_time(
    main: Coroutine[Any, Any, Result],
    *,
    longest_s: float = LONGEST_S,
    thread_s: Callable[[], float] = lambda: 0.0,
) -> Result:
    """As `asyncio.run`; raises TimeoutError once it has taken `longest_s` of virtual time."""

    async def bounded() -> Result:
        async with asyncio.timeout(longest_s):
            return await main

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(thread_s)) as runner:
        loop = runner.get_loop()
        with mock.patch.multiple(time, monotonic=loop.time, perf_counter=loop.time):
            return runner.run(bounded())


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test, and what it asks pytest for, on an event loop of its own, in virtual time, with an end."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        run_in_virtual_time(test(*args, **fixtures))

    return run


def run_until_late(
    main: Coroutine[Any, Any, Result],
    once: Callable[[], bool],
    late_s: float,
    loop: asyncio.AbstractEventLoop | None = None,
) -> Result:
    """As `asyncio.run`, but `late_s` pass as soon as `once` says so: what comes before a deadline has come by then.

    They pass for `loop`, or for the one that runs it. For what waits for threads and sockets too.
    """

    async def hurried() -> Result:
        late = loop or asyncio.get_running_loop()
        real, passed_s = late.time, 0.0
        task = asyncio.create_task(main)
        while not once() and not task.done():
            await asyncio.sleep(0.001)

        def later() -> float:
            return real() + passed_s

        with mock.patch.object(late, "time", later):
            while not task.done():  # again where bytes that came late have restarted a deadline
                passed_s += late_s
                late.call_soon_threadsafe(lambda: None)  # the loop looks at its clock
                await asyncio.wait([task], timeout=1.0)
            return await task

    return asyncio.run(hurried())


def let_threads_take(seconds: float) -> None:
    """Have all work for threads wait so long for a thread, and take as long, on the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.thread_s = lambda: seconds
