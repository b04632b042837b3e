"""Ways between the caller's event loop, threads and other loops; each says how a cancellation ends the work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work` on another thread's event loop; a cancellation raises only after the end of the work."""
    started: list[asyncio.Task[Any] | None] = []

    async def run() -> _T:
        started.append(asyncio.current_task())
        return await work

    waiting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        # One step of the loop after the start, which may still be in the loop's queue.
        loop.call_soon_threadsafe(loop.call_soon, lambda: [task.cancel() for task in started if task is not None])
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.exception()  # read the error: asyncio logs errors that nobody reads
        raise


async def in_own_thread(work: Callable[[], _T], name: str) -> _T:
    """Run `work` in a new thread; neither the event loop nor the interpreter waits for the thread at its end.

    For work that cannot be interrupted and must not hold a place in a pool that others wait for. After a cancellation
    the thread goes on alone.
    """
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # runs from now on: a caller's cancellation leaves it alone

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting caller gets the error
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
