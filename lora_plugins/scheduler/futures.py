"""Futures of callers who wait for the planner: failed at once, answered, or one for several.

Used in the engine core process, by the planner and its state. vLLM's engine loop polls or awaits the futures; no thread
waits for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from lora_plugins.errors import LoRAPluginsError


def failed(error: LoRAPluginsError) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(error)
    return future


def resolve(futures: Iterable[Future[None]]) -> None:
    """Answer callers, as far as they still wait."""
    for future in futures:
        with suppress(InvalidStateError):
            future.set_result(None)


def all_of(futures: list[Future[None]]) -> Future[None]:
    """Return a future that is done when all futures are, or raises the first error at once."""
    whole: Future[None] = Future()
    left = set(futures)

    def one_done(future: Future[None]) -> None:
        left.discard(future)
        if (error := future.exception()) is not None and not whole.done():
            whole.set_exception(error)
        if not left:
            resolve([whole])

    for future in futures:
        future.add_done_callback(one_done)
    if not futures:
        whole.set_result(None)
    return whole
