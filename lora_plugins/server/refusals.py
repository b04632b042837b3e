"""Requests that wait for an adapter which is unloaded meanwhile, and what they are told; no vLLM, no torch."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from contextlib import contextmanager

from cachetools import LRUCache

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.server.leases import REMEMBERED


class Refusals:
    """Ends the wait of whoever waits for an adapter, by its engine id. For one event loop.

    An id that was refused stays so: vLLM gives none twice.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, set[asyncio.Task[object]]] = {}
        self._refused: LRUCache[int, LoRAPluginsError] = LRUCache(REMEMBERED)

    @contextmanager
    def refusing(self, adapter_id: int) -> Iterator[None]:
        """Inside, the present task waits for an adapter; when that is refused, or was before, it gets the error."""
        self._raise_if_refused(adapter_id)
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can wait")
        waiting, cancelled_before = self._waiting.setdefault(adapter_id, set()), task.cancelling()
        waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # As `asyncio.timeout` does: our cancellation is taken back, and one by somebody else stands.
            if task not in waiting and task.uncancel() <= cancelled_before:
                self._raise_if_refused(adapter_id)
            raise
        finally:
            waiting.discard(task)
            if not waiting and self._waiting.get(adapter_id) is waiting:
                del self._waiting[adapter_id]

    def refuse(self, adapter_id: int, error: LoRAPluginsError) -> None:
        """Have everybody who waits for it, and whoever still comes, get this error."""
        self._refused[adapter_id] = error
        waiting = self._waiting.pop(adapter_id, set())
        while waiting:
            waiting.pop().cancel()

    def _raise_if_refused(self, adapter_id: int) -> None:
        error = self._refused.get(adapter_id)
        if error is not None:
            raise copy.copy(error) from None  # a new one: raising one again and again grows its traceback
